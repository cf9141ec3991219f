"""Trackable resources (TRES): the text of `grptres`, as `sacctmgr` takes it and the database stores it.

A limit is a whole number, or None where it was cleared with -1: 0, cleared and absent are three different
things (design rule 5). `mem` counts base-10 megabytes. Grammar and names as in Slurm's sacctmgr
(https://slurm.schedmd.com/tres.html), except that a value that Slurm would silently turn into 0 is refused.
"""

import re
from collections.abc import Mapping

Limits = dict[str, int | None]

CPU = "cpu"
MEM = "mem"
GPU = "gres/gpu"
GPU_TYPED_PREFIX = "gres/gpu:"

#: Largest value that a signed 64-bit integer holds, which is what Slurm and Kubernetes count with.
MAX_VALUE = 2**63 - 1
#: Largest `mem`: above it the number of bytes no longer fits in 64 bits and Kubernetes would cap it.
MAX_MEM_MB = MAX_VALUE // 10**6

_SYNONYMS = {"memory": MEM, "gpu": GPU}
_PLAIN = frozenset({CPU, MEM, GPU, "node", "billing", "energy", "pages", "vmem"})
_NAMED = re.compile(r"(?:gres|license|fs|bb|ic)/[a-z0-9_][a-z0-9_.:@-]*", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]+", re.ASCII)
_WITH_UNIT = re.compile(r"[0-9]+[kmgtp](?:i?b)?", re.ASCII | re.IGNORECASE)
_KNOWN = "cpu, mem, gres/gpu, gres/gpu:<type>, gres/<name>, license/<name>, node, billing, energy"


class TresError(ValueError):
    """A TRES text that cannot be understood. The message names the token, the reason and the remedy."""

    def __init__(self, token: str, reason: str) -> None:
        super().__init__(f"bad TRES {token!r}: {reason}")
        self.token = token


def parse(text: str) -> Limits:
    """Parse `cpu=64,mem=131072,gres/gpu=8` into limits by canonical TRES name.

    The empty text has no limits. None stands for a value of -1 (cleared).

    Raises:
        TresError: on the first token that is not `name=whole number`.
    """
    limits: Limits = {}
    if not text.strip():
        return limits
    for raw in text.split(","):
        token = raw.strip()
        name, equals, value_text = (part.strip() for part in token.partition("="))
        if not token:
            raise TresError(token, f"there is nothing between two commas in {text!r}; write name=number")
        if not equals:
            raise TresError(token, "it has no '='; write name=number, for example cpu=64")
        name = canonical_name(name, token)
        if name in limits:
            raise TresError(token, f"{name} is given twice; give it once")
        limits[name] = _value(name, value_text, token)
    return limits


def canonical_name(name: str, token: str) -> str:
    """Return the one spelling of a TRES name.

    Raises:
        TresError: if the name is not a TRES, with `token` as the token at fault.
    """
    lower = name.lower()
    lower = _SYNONYMS.get(lower, lower)
    if lower in _PLAIN or _NAMED.fullmatch(lower):
        return lower
    raise TresError(token, f"unknown TRES name {name!r}; known are {_KNOWN}")


def _value(name: str, text: str, token: str) -> int | None:
    if not text:
        raise TresError(token, f"it has no value; write {name}=number, or {name}=-1 to clear the limit")
    if not _NUMBER.fullmatch(text):
        if _WITH_UNIT.fullmatch(text):
            if name == MEM:
                raise TresError(token, f"mem is a plain number of MB, without a unit{_in_mb(text)}")
            raise TresError(token, f"{name} is a plain count, without a unit; write it out in full")
        raise TresError(token, f"{text!r} is not a whole number; write {name}=number")
    # Python refuses to convert very long digit runs; no such number fits in 64 bits anyway.
    digits = text.lstrip("-").lstrip("0")
    value = int(text) if len(digits) <= len(str(MAX_VALUE)) else MAX_VALUE + 1
    if text.startswith("-") and value != 0:
        if value == -1:
            return None
        raise TresError(token, f"a limit cannot be negative; write a number from 0, or {name}=-1 to clear it")
    if value > MAX_VALUE:
        raise TresError(token, f"the number does not fit in 64 bits; the largest is {MAX_VALUE}")
    if name == MEM and value > MAX_MEM_MB:
        raise TresError(
            token, f"that many MB do not fit in 64 bits of bytes; the largest mem is {MAX_MEM_MB}"
        )
    return value


def _in_mb(text: str) -> str:
    """Return what to type instead of a memory size with a unit, as Slurm reads units (1G = 1024 MB)."""
    match = re.match(r"([0-9]{1,12})([kmgtp])", text.lower())
    if match is None:
        return ""
    number = int(match[1])
    kilobytes = number * 1024 ** "kmgtp".index(match[2])
    if match[2] == "m":
        return f"; write mem={number}"
    if kilobytes % 1024:
        return ""
    return f"; write mem={kilobytes // 1024} for what Slurm takes {text} to mean"


def format_limits(limits: Mapping[str, int | None]) -> str:
    """Return the text of limits, cleared ones as -1: the inverse of `parse`."""
    return ",".join(f"{name}={-1 if value is None else value}" for name, value in limits.items())


def merge(stored: Mapping[str, int | None], change: Mapping[str, int | None]) -> Limits:
    """Return stored limits after a `modify`: TRES by TRES, as Slurm does it; a cleared one is dropped.

    Where nothing but cleared limits would remain they are kept as -1: the account was given "no limit"
    on purpose, which is not the same as never having been given an allocation (design rules 5 and 6).
    """
    merged = {**stored, **change}
    counted: Limits = {name: value for name, value in merged.items() if value is not None}
    return counted or merged
