"""TRES: what is accepted, what is refused and how, and the laws of merging."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spur_events.schemas import tres

NAMES = st.one_of(
    st.sampled_from(["cpu", "mem", "gres/gpu", "node", "billing", "energy", "license/matlab@server"]),
    st.from_regex(r"gres/gpu:[a-z0-9][a-z0-9_.-]{0,8}", fullmatch=True),
)
LIMITS = st.dictionaries(NAMES, st.none() | st.integers(0, tres.MAX_MEM_MB), max_size=6)


@given(LIMITS)
def test_format_and_parse_are_inverse(limits: tres.Limits) -> None:
    assert tres.parse(tres.format_limits(limits)) == limits


@given(LIMITS)
def test_formatted_text_is_canonical(limits: tres.Limits) -> None:
    text = tres.format_limits(limits)
    assert tres.format_limits(tres.parse(text)) == text


@given(LIMITS)
def test_spelling_does_not_matter(limits: tres.Limits) -> None:
    synonyms = {"mem": "Memory", "gres/gpu": "GPU"}
    text = " , ".join(
        f" {synonyms.get(name, name.upper())} = {-1 if value is None else f'00{value}'}"
        for name, value in limits.items()
    )
    assert tres.parse(text) == limits


@given(LIMITS, LIMITS)
def test_merge_takes_the_change_and_keeps_the_rest(stored: tres.Limits, change: tres.Limits) -> None:
    merged = tres.merge(stored, change)
    for name, value in {**stored, **change}.items():
        assert merged.get(name) == value  # a cleared limit is dropped or None, never a number
    assert merged.keys() <= {**stored, **change}.keys()
    assert bool(merged) == bool({**stored, **change})


@given(LIMITS, LIMITS)
def test_merging_twice_changes_nothing_more(stored: tres.Limits, change: tres.Limits) -> None:
    once = tres.merge(stored, change)
    assert tres.merge(once, change) == once


@given(LIMITS)
def test_merging_nothing_only_drops_cleared_limits(stored: tres.Limits) -> None:
    numbers = {name: value for name, value in stored.items() if value is not None}
    assert tres.merge(stored, {}) == (numbers or stored)


@given(LIMITS, LIMITS, LIMITS)
def test_counted_limits_merge_associatively(a: tres.Limits, b: tres.Limits, c: tres.Limits) -> None:
    def counted(limits: tres.Limits) -> tres.Limits:
        return {name: value for name, value in limits.items() if value is not None}

    assert counted(tres.merge(tres.merge(a, b), c)) == counted({**a, **b, **c})


def test_zero_cleared_and_absent_are_apart() -> None:
    zero, cleared, absent = tres.parse("gres/gpu=0"), tres.parse("gres/gpu=-1"), tres.parse("")
    assert (zero, cleared, absent) == ({"gres/gpu": 0}, {"gres/gpu": None}, {})
    assert [tres.format_limits(limits) for limits in (zero, cleared, absent)] == [
        "gres/gpu=0",
        "gres/gpu=-1",
        "",
    ]
    assert tres.merge({"cpu": 1, "gres/gpu": 8}, cleared) == {"cpu": 1}
    assert tres.merge({"gres/gpu": 8}, cleared) == {"gres/gpu": None}
    assert tres.merge({"gres/gpu": 8}, zero) == {"gres/gpu": 0}


@given(st.text(max_size=40))
def test_any_text_gives_limits_or_an_error_that_names_its_token(text: str) -> None:
    try:
        limits = tres.parse(text)
    except tres.TresError as error:
        assert repr(error.token) in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert tres.parse(tres.format_limits(limits)) == limits


@pytest.mark.parametrize(
    ("text", "token", "remedy"),
    [
        ("cpu=abc", "cpu=abc", "write cpu=number"),
        ("cpu=-5", "cpu=-5", "cpu=-1 to clear"),
        ("cpu=1.5", "cpu=1.5", "not a whole number"),
        ("mem=10,cpu=", "cpu=", "no value"),
        ("cpu=4,cpu=8", "cpu=8", "give it once"),
        ("mem=4,Memory=8", "Memory=8", "give it once"),
        ("foo=3", "foo=3", "known are cpu, mem"),
        ("cpu", "cpu", "no '='"),
        ("cpu=1,,mem=2", "", "between two commas"),
        ("cpu=1,", "", "between two commas"),
        ("=4", "=4", "unknown TRES name ''"),
        ("gres/=4", "gres/=4", "unknown TRES name"),
        ("mem=1G", "mem=1G", "write mem=1024 "),
        ("mem=1T", "mem=1T", "write mem=1048576 "),
        ("mem=512m", "mem=512m", "write mem=512"),
        ("mem=1GiB", "mem=1GiB", "plain number of MB"),
        ("cpu=4k", "cpu=4k", "write it out in full"),
        ("cpu=99999999999999999999", "cpu=99999999999999999999", str(2**63 - 1)),
        (f"cpu={2**63}", f"cpu={2**63}", "64 bits"),
        (f"cpu={'9' * 5000}", f"cpu={'9' * 5000}", "64 bits"),
        (f"mem={2**63 // 10**6 + 1}", f"mem={2**63 // 10**6 + 1}", "largest mem"),
        ("cpu=\u0664", "cpu=\u0664", "not a whole number"),  # ARABIC-INDIC DIGIT FOUR
        ("cpu=+4", "cpu=+4", "not a whole number"),
        ("cpu=--1", "cpu=--1", "not a whole number"),
        ("cpu=1=2", "cpu=1=2", "not a whole number"),
    ],
)
def test_refusals_name_token_and_remedy(text: str, token: str, remedy: str) -> None:
    with pytest.raises(tres.TresError) as caught:
        tres.parse(text)
    assert caught.value.token == token
    assert remedy in str(caught.value)


@pytest.mark.parametrize("text", ["mem=1", "mem=1536", "mem=131072", f"cpu={2**63 - 1}", "cpu=-0"])
def test_accepted_to_the_limit(text: str) -> None:
    name, _, value = text.partition("=")
    assert tres.parse(text) == {name: int(value)}
