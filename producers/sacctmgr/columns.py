"""The columns that `show` can print, with Slurm's headers and widths, and the value of `format=`. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from spur_events import errors
from spur_events.producers.sacctmgr import words

MAX_WIDTH = 1000


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: its key in a row, what people may call it, its header, and its width in characters."""

    key: str
    header: str
    width: int
    synonyms: tuple[str, ...] = ()


class Field(NamedTuple):
    """A column as it is to be printed; a negative width aligns to the left, as in Slurm."""

    column: Column
    width: int


ACCOUNT = (
    Column(key="account", header="Account", width=10, synonyms=("name", "names", "acct")),
    Column(key="description", header="Descr", width=20, synonyms=("descr", "desc")),
    Column(key="organization", header="Org", width=20, synonyms=("org",)),
    Column(key="parent", header="Par Name", width=10, synonyms=("parentname",)),
    Column(key="user", header="User", width=10, synonyms=("users",)),
    Column(key="fairshare", header="Share", width=9, synonyms=("share", "shares")),
    Column(key="maxjobs", header="MaxJobs", width=7),
    # Slurm's 13 would cut most allocations off.
    Column(key="grptres", header="GrpTRES", width=30),
)
USER = (
    Column(key="user", header="User", width=10, synonyms=("name", "names")),
    Column(key="defaultaccount", header="Def Acct", width=10, synonyms=("defaultacct", "defacct")),
    Column(key="adminlevel", header="Admin", width=13, synonyms=("admin",)),
    Column(key="account", header="Account", width=10, synonyms=("acct",)),
    Column(key="accounts", header="Accounts", width=30),
)

# Slurm's own columns first, ours behind them: scripts that cut fields by number go on working.
_ACCOUNT_DEFAULT = "account,description,organization,grptres"
_ACCOUNT_ASSOCIATIONS = "account,description,organization,grptres,parent,user,fairshare"
_USER_DEFAULT = "user,defaultaccount,adminlevel,accounts"
_USER_ASSOCIATIONS = "user,defaultaccount,adminlevel,account"


def account_fields(wanted: str | None, *, associations: bool) -> tuple[Field, ...]:
    """Return the fields of `show account`.

    Raises:
        UsageError: if `wanted`, the value of format=, names an unknown column or a bad width.
    """
    return _fields(wanted or (_ACCOUNT_ASSOCIATIONS if associations else _ACCOUNT_DEFAULT), ACCOUNT)


def user_fields(wanted: str | None, *, associations: bool) -> tuple[Field, ...]:
    """Return the fields of `show user`.

    Raises:
        UsageError: as `account_fields`.
    """
    return _fields(wanted or (_USER_ASSOCIATIONS if associations else _USER_DEFAULT), USER)


def _fields(wanted: str, known: tuple[Column, ...]) -> tuple[Field, ...]:
    by_name = {name: column for column in known for name in (column.key, *column.synonyms)}
    fields = []
    for part in words.split_list("format", wanted):
        name, percent, width = part.partition("%")
        column = by_name.get(name.strip().lower())
        if column is None:
            raise words.unknown("column", name, f"format={wanted}", [column.key for column in known], by_name)
        fields.append(Field(column, _width(width, part) if percent else column.width))
    return tuple(fields)


def _width(text: str, part: str) -> int:
    digits = text.strip().removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(digits) <= len(str(MAX_WIDTH)):
        width = int(text)
        if 1 <= abs(width) <= MAX_WIDTH:
            return width
    raise errors.UsageError(
        f"bad width in format={part}: write NAME%NUMBER with a number from 1 to {MAX_WIDTH}, or negative to align left"
    )
