"""What a command may ask the accounting tables for: cleaned names, patches and rows. Pure.

Made by the grammar of `sacctmgr`, carried out by producers.accounting and producers.members. A patch holds only
what is to be written: None means "not named", which is never the same as an empty or a cleared value (case C18).
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spur_events import errors
from spur_events.schemas import tres

MAX_NAME_LENGTH = 255
MAX_TEXT_LENGTH = 4096
#: What the integer columns hold; -1 clears.
MAX_INTEGER = 2**31 - 1
#: Value that clears a limit, as everywhere in Slurm.
CLEARED = -1
DEFAULT_FAIRSHARE = 1
#: Slurm's name for "no parent".
ROOT = "root"

ADMIN_LEVELS = ("none", "operator", "administrator")
_ADMIN_SYNONYMS = {"admin": "administrator"}

# Control characters, lone surrogates (bytes that are not UTF-8), line and paragraph separators: they break
# terminals, tables and the database's encoding.
_FORBIDDEN_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})


@dataclass(frozen=True, kw_only=True)
class AccountPatch:
    """Columns of an account to be written. `parent` is "root" for none, `max_jobs` -1 for no limit."""

    description: str | None = None
    organization: str | None = None
    parent: str | None = None
    limits: tres.Limits | None = None
    fairshare: int | None = None
    max_jobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class UserPatch:
    """Properties of a user to be written, in all of the user's accounts."""

    default_account: str | None = None
    admin_level: str | None = None


@dataclass(frozen=True, kw_only=True)
class Account:
    """A row of `accounts` with its members."""

    name: str
    description: str
    organization: str
    parent: str
    grptres: str
    fairshare: int
    max_jobs: int | None
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class User:
    """A user, gathered from the user's rows in `users`."""

    name: str
    default_account: str
    admin_level: str
    accounts: tuple[str, ...]


def account_name(text: str) -> str:
    """Return an account's name as it is stored, in lower case as Slurm does.

    Raises:
        UsageError: if it is empty, too long or holds a control character.
    """
    return _name("account", text)


def user_name(text: str) -> str:
    """Return a user's name as it is stored, in lower case as Slurm does.

    Raises:
        UsageError: as `account_name`.
    """
    return _name("user", text)


def account_names(texts: Iterable[str]) -> tuple[str, ...]:
    """Return cleaned account names, each once, in their order."""
    return tuple(dict.fromkeys(map(account_name, texts)))


def user_names(texts: Iterable[str]) -> tuple[str, ...]:
    """Return cleaned user names, each once, in their order."""
    return tuple(dict.fromkeys(map(user_name, texts)))


def text(key: str, value: str) -> str:
    """Return a free text as it is stored.

    Raises:
        UsageError: if it is too long or holds a control character.
    """
    _refuse_forbidden(key, value)
    if len(value) > MAX_TEXT_LENGTH:
        raise errors.UsageError(
            f"{key} has {len(value)} characters; at most {MAX_TEXT_LENGTH} are stored, shorten it"
        )
    return value


def integer(key: str, value: str) -> int:
    """Return a number for an integer column, or -1.

    Raises:
        UsageError: if it is no whole number or out of range.
    """
    remedy = f"write {key}=number from 0 to {MAX_INTEGER}, or {key}={CLEARED} to clear it"
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        raise errors.UsageError(f"bad value in {key}={value}: {value!r} is not a whole number; {remedy}")
    # Python refuses to convert very long digit runs; none of them is in range.
    number = int(value) if len(digits.lstrip("0")) <= len(str(MAX_INTEGER)) else MAX_INTEGER + 1
    if not CLEARED <= number <= MAX_INTEGER:
        raise errors.UsageError(f"bad value in {key}={value}: out of range; {remedy}")
    return number


def admin_level(value: str) -> str:
    """Return an admin level as it is stored.

    Raises:
        UsageError: if there is no such level.
    """
    level = _ADMIN_SYNONYMS.get(value.lower(), value.lower())
    if level not in ADMIN_LEVELS:
        raise errors.UsageError(f"bad value in adminlevel={value}: known are {', '.join(ADMIN_LEVELS)}")
    return level


def limits(value: str) -> tres.Limits:
    """Return the limits of `grptres=value`.

    Raises:
        UsageError: naming the token at fault and the remedy.
    """
    try:
        parsed = tres.parse(value)
    except tres.TresError as error:
        raise errors.UsageError(f"grptres={value}: {error}") from error
    if not parsed:
        raise errors.UsageError(
            "grptres= has no value; write grptres=cpu=64,mem=131072, or clear a limit with grptres=cpu=-1"
        )
    return parsed


def listed(names: Sequence[str]) -> str:
    """Return names for a message, in quotes."""
    return ", ".join(repr(name) for name in names)


def _name(kind: str, given: str) -> str:
    name = given.lower()
    if not name.strip():
        raise errors.UsageError(
            f"the {kind} name is empty; write a name of 1 to {MAX_NAME_LENGTH} characters"
        )
    _refuse_forbidden(f"the {kind} name", name)
    if len(name) > MAX_NAME_LENGTH:
        raise errors.UsageError(
            f"the {kind} name {name[:20] + '...'!r} has {len(name)} characters; at most {MAX_NAME_LENGTH} are allowed"
        )
    return name


def _refuse_forbidden(what: str, value: str) -> None:
    for position, character in enumerate(value, start=1):
        if unicodedata.category(character) in _FORBIDDEN_CATEGORIES:
            raise errors.UsageError(
                f"{what} {value[:60]!r} holds the control character U+{ord(character):04X} at position {position};"
                " leave it out"
            )
