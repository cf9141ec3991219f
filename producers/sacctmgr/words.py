"""How single words are read: options, `key=value`, quotes, lists, and what to say about unknown ones. Pure."""

import difflib
from collections.abc import Collection, Iterable
from typing import NamedTuple

from spur_events import errors

_LONGEST_SHOWN = 60


class Assignment(NamedTuple):
    """A word `key=value`, with the key in lower case and the value without its quotes."""

    key: str
    value: str
    word: str


def shown(word: str) -> str:
    """Return a word for a message: quoted, harmless to terminals, not too long."""
    return repr(word if len(word) <= _LONGEST_SHOWN else word[:_LONGEST_SHOWN] + "...")


def unknown(
    kind: str, word: str, where: str, known: Collection[str], candidates: Iterable[str] | None = None
) -> errors.UsageError:
    """Return the error about an unknown word, with the nearest known one and all of them."""
    near = difflib.get_close_matches(word.lower(), list(candidates or known), n=1)
    place = f" in {shown(where)}" if where != word else ""
    hint = f"did you mean {near[0]!r}? " if near else ""
    return errors.UsageError(f"unknown {kind} {shown(word)}{place}; {hint}known are {', '.join(known)}")


def assignment(word: str) -> Assignment:
    """Read a word that holds a '='.

    Raises:
        UsageError: if there is nothing before the '=', or one of Slurm's operators += and -=.
    """
    key, _, value = word.partition("=")
    key = key.strip().lower()
    if not key:
        raise errors.UsageError(f"there is no key before the '=' in {shown(word)}; write key=value")
    if key[-1] in "+-":
        raise errors.UsageError(
            f"{shown(word)}: {key[-1]}= is not supported for {key[:-1]!r}; write {key[:-1]}=value with the whole value"
        )
    return Assignment(key, unquoted(value), word)


def unquoted(value: str) -> str:
    """Return a value without the one pair of quotes around it, which Slurm takes off too."""
    stripped = value.strip()
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "\"'":
        return stripped[1:-1]
    return value


def split_list(key: str, value: str) -> tuple[str, ...]:
    """Split `a,"b,c",d`; commas inside quotes belong to the element.

    Raises:
        UsageError: if an element is empty or a quote is not closed.
    """
    elements: list[str] = []
    element, quote = "", ""
    for character in value:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not element.strip():
            quote = character
        elif character == ",":
            elements.append(element)
            element = ""
            continue
        element += character
    if quote:
        raise errors.UsageError(f"a quote is not closed in {shown(f'{key}={value}')}")
    elements.append(element)
    cleaned = tuple(unquoted(element.strip()) for element in elements)
    if not all(part.strip() for part in cleaned):
        raise errors.UsageError(
            f"there is an empty element in {shown(f'{key}={value}')}; write {key}=one or {key}=one,two"
        )
    return cleaned
