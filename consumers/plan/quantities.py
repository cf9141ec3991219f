"""Kubernetes quantities by value: "1000m" is "1", and the API server may write either.

Used by `diff` and by `consumers.kube.observe`. Exact: fractions, never floats, since `mem` in bytes needs
more than 53 bits. Grammar: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.
"""

import re
from collections.abc import Mapping
from fractions import Fraction

_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))"
    r"(?:(?P<suffix>n|u|m|k|[MGTPE]|[KMGTPE]i)|[eE](?P<exponent>[+-]?[0-9]{1,3}))?",
    re.ASCII,
)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = "KMGTPE"


def value(text: str | float) -> Fraction | None:
    """Return the exact value of a quantity, or None for a text that is none.

    JSON numbers are allowed because the API server takes them in place of text.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        return None
    number = Fraction(match["number"].removesuffix("."))
    suffix = match["suffix"] or ""
    if suffix.endswith("i"):
        return number * (1 << 10 * (_BINARY.index(suffix[0]) + 1))
    power = _DECIMAL[suffix] if suffix else int(match["exponent"] or 0)
    scale = Fraction(f"1e{power}")
    return number * scale


def equal(left: Mapping[str, str], right: Mapping[str, str]) -> bool:
    """Whether two maps have the same keys with the same values."""
    return left.keys() == right.keys() and all(same(text, right[key]) for key, text in left.items())


def same(left: str, right: str) -> bool:
    """Whether two quantities have the same value; texts that are none are the same only if identical."""
    first = value(left)
    return left == right if first is None else first == value(right)
