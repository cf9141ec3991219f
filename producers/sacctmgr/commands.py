"""What the words of a command line mean: the values that the grammar makes and the actions carry out. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from spur_events.producers import changes
from spur_events.producers.sacctmgr import columns


class Style(StrEnum):
    """How a table is written."""

    TABLE = "table"
    #: `-p`: fields end with a bar.
    PARSABLE = "parsable"
    #: `-P`: bars only between fields.
    PARSABLE2 = "parsable2"
    JSON = "json"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the whole command line."""

    immediate: bool = False
    quiet: bool = False
    readonly: bool = False
    header: bool = True
    associations: bool = False
    style: Style = Style.TABLE


@dataclass(frozen=True, kw_only=True)
class AddAccounts:
    """Add accounts."""

    names: tuple[str, ...]
    patch: changes.AccountPatch


@dataclass(frozen=True, kw_only=True)
class ModifyAccounts:
    """Change the named columns of accounts."""

    names: tuple[str, ...]
    patch: changes.AccountPatch


@dataclass(frozen=True, kw_only=True)
class DeleteAccounts:
    """Delete accounts."""

    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AddUsers:
    """Add users to accounts."""

    names: tuple[str, ...]
    accounts: tuple[str, ...]
    patch: changes.UserPatch


@dataclass(frozen=True, kw_only=True)
class ModifyUsers:
    """Change properties of users."""

    names: tuple[str, ...]
    accounts: tuple[str, ...]
    patch: changes.UserPatch


@dataclass(frozen=True, kw_only=True)
class DeleteUsers:
    """Take users out of accounts; out of all where none is named."""

    names: tuple[str, ...]
    accounts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ShowAccounts:
    """Show accounts; all where none is named."""

    names: tuple[str, ...]
    fields: tuple[columns.Field, ...]
    associations: bool


@dataclass(frozen=True, kw_only=True)
class ShowUsers:
    """Show users; all where none is named."""

    names: tuple[str, ...]
    accounts: tuple[str, ...]
    fields: tuple[columns.Field, ...]
    associations: bool


@dataclass(frozen=True, kw_only=True)
class Help:
    """Print the usage."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """Print the version."""


Change = AddAccounts | ModifyAccounts | DeleteAccounts | AddUsers | ModifyUsers | DeleteUsers
Show = ShowAccounts | ShowUsers
Command = Change | Show | Help | Version
