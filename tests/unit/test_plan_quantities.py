"""Quantities are compared by value, exactly."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spur_events.consumers.plan import quantities


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("64", 64),
        ("1000m", 1),
        ("1.5", Fraction(3, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("-1", -1),
        ("+2k", 2000),
        ("131072M", 131_072_000_000),
        ("131072Mi", 131072 * 2**20),
        ("1Ei", 2**60),
        ("1E", 10**18),
        ("1E3", 1000),
        ("1e-3", Fraction(1, 1000)),
        ("7n", Fraction(7, 10**9)),
        ("7u", Fraction(7, 10**6)),
        ("9223372036854775807", 2**63 - 1),
        ("9223372036854M", (2**63 - 1) // 10**6 * 10**6),
        (3, 3),
        (0.5, Fraction(1, 2)),
    ],
)
def test_value(text: str | float, value: int | Fraction) -> None:
    assert quantities.value(text) == value


@pytest.mark.parametrize("text", ["", "x", "1K", "1e", "1 M", "1MB", "1e9999", "٣", "1m\n", "--1", "."])
def test_texts_that_are_no_quantity(text: str) -> None:
    assert quantities.value(text) is None


@given(st.integers(0, 2**63 - 1))
def test_the_same_number_in_other_units(number: int) -> None:
    assert quantities.same(f"{number}M", f"{number * 1000}k")
    assert quantities.same(f"{number}", f"{number * 1000}m")
    assert not quantities.same(f"{number}", f"{number + 1}")


def test_maps_are_equal_by_key_and_value() -> None:
    assert quantities.equal({"cpu": "1000m"}, {"cpu": "1"})
    assert not quantities.equal({"cpu": "0"}, {})
    assert quantities.same("junk", "junk")
    assert not quantities.same("junk", "1")
