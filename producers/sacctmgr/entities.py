"""What can be added, modified, deleted and shown: the keys of each entity, and the command that they make. Pure.

Used by the grammar, which has sorted the words into clauses. A new entity is one more row of `ENTITIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from spur_events import errors
from spur_events.producers import changes
from spur_events.producers.sacctmgr import columns, commands, words

_Value = TypeVar("_Value")

#: Keys whose empty value means something: the text is emptied.
MAY_BE_EMPTY = frozenset({"description", "organization"})
REMEDIES = {
    "grptres": "write grptres=cpu=64,mem=131072, or clear one limit with grptres=cpu=-1",
    "maxjobs": "write maxjobs=number, or maxjobs=-1 to clear it",
    "fairshare": "write fairshare=number, or fairshare=-1 for the default",
    "parent": "write parent=NAME, or parent=root for none",
}
_SHORTEST_PREFIX = 2


@dataclass(kw_only=True)
class Clauses:
    """The words behind action and entity: names without a key, conditions, values to set, flags."""

    positional: list[str] = field(default_factory=list)
    where: dict[str, str] = field(default_factory=dict)
    set: dict[str, str] = field(default_factory=dict)
    associations: bool = False


@dataclass(frozen=True, kw_only=True)
class Entity:
    """An entity: its name, its keys with their synonyms, which of them an action takes, and what it makes."""

    name: str
    plural: str
    keys: Mapping[str, tuple[str, ...]]
    selecting: Mapping[str, tuple[str, ...]]
    settable: Mapping[str, tuple[str, ...]]
    refusals: Mapping[str, str]
    builders: Mapping[str, Callable[[Clauses], commands.Command]]


def find(word: str) -> Entity:
    """Return the entity that a word names; prefixes are enough, as in Slurm.

    Raises:
        UsageError: if there is none.
    """
    lower = word.lower()
    for entity in ENTITIES.values():
        if lower in {"acct", "accts"} and entity is ENTITIES["account"]:
            return entity
        if len(lower) >= _SHORTEST_PREFIX and entity.plural.startswith(lower):
            return entity
    raise words.unknown("entity", word, word, list(ENTITIES))


def _add_accounts(clauses: Clauses) -> commands.Command:
    names = _names(clauses, clauses.set, "account to add", changes.account_name)
    return commands.AddAccounts(names=names, patch=_account_patch(clauses.set))


def _modify_accounts(clauses: Clauses) -> commands.Command:
    names = _names(clauses, clauses.where, "account to modify", changes.account_name)
    return commands.ModifyAccounts(names=names, patch=_account_patch(_something(clauses)))


def _delete_accounts(clauses: Clauses) -> commands.Command:
    return commands.DeleteAccounts(
        names=_names(clauses, clauses.where, "account to delete", changes.account_name)
    )


def _show_accounts(clauses: Clauses) -> commands.Command:
    return commands.ShowAccounts(
        names=_names(clauses, clauses.where, "", changes.account_name),
        fields=columns.account_fields(clauses.where.get("format"), associations=clauses.associations),
        associations=clauses.associations,
    )


def _add_users(clauses: Clauses) -> commands.Command:
    names = _names(clauses, clauses.set, "user to add", changes.user_name)
    if "account" not in clauses.set and "defaultaccount" not in clauses.set:
        raise errors.UsageError(
            f"no account for user {changes.listed(names)}; write account=NAME or account=one,two"
        )
    return commands.AddUsers(names=names, accounts=_accounts(clauses.set), patch=_user_patch(clauses.set))


def _modify_users(clauses: Clauses) -> commands.Command:
    return commands.ModifyUsers(
        names=_names(clauses, clauses.where, "user to modify", changes.user_name),
        accounts=_accounts(clauses.where),
        patch=_user_patch(_something(clauses)),
    )


def _delete_users(clauses: Clauses) -> commands.Command:
    return commands.DeleteUsers(
        names=_names(clauses, clauses.where, "user to delete", changes.user_name),
        accounts=_accounts(clauses.where),
    )


def _show_users(clauses: Clauses) -> commands.Command:
    return commands.ShowUsers(
        names=_names(clauses, clauses.where, "", changes.user_name),
        accounts=_accounts(clauses.where),
        fields=columns.user_fields(clauses.where.get("format"), associations=clauses.associations),
        associations=clauses.associations,
    )


def _names(
    clauses: Clauses, source: Mapping[str, str], needed: str, clean: Callable[[str], str]
) -> tuple[str, ...]:
    """Return the names that stand alone or in name=; `needed` is what to ask for where there must be one."""
    if clauses.positional and "name" in source:
        raise errors.UsageError(
            f"names are given twice, as {words.shown(clauses.positional[0])} and in"
            f" {words.shown('name=' + source['name'])}; give them once, as name=one,two"
        )
    given = [source["name"]] if "name" in source else clauses.positional
    names = tuple(dict.fromkeys(clean(name) for text in given for name in words.split_list("name", text)))
    if needed and not names:
        raise errors.UsageError(f"no name: say which {needed}, with name=NAME or name=one,two")
    return names


def _accounts(source: Mapping[str, str]) -> tuple[str, ...]:
    if "account" not in source:
        return ()
    return changes.account_names(words.split_list("account", source["account"]))


def _something(clauses: Clauses) -> Mapping[str, str]:
    if not clauses.set:
        raise errors.UsageError("nothing to set; write 'set key=value' behind the names")
    return clauses.set


def _account_patch(given: Mapping[str, str]) -> changes.AccountPatch:
    return changes.AccountPatch(
        description=_read(given, "description", lambda value: changes.text("description", value)),
        organization=_read(given, "organization", lambda value: changes.text("organization", value)),
        parent=_read(given, "parent", changes.account_name),
        limits=_read(given, "grptres", changes.limits),
        fairshare=_read(given, "fairshare", lambda value: changes.integer("fairshare", value)),
        max_jobs=_read(given, "maxjobs", lambda value: changes.integer("maxjobs", value)),
    )


def _user_patch(given: Mapping[str, str]) -> changes.UserPatch:
    return changes.UserPatch(
        default_account=_read(given, "defaultaccount", changes.account_name),
        admin_level=_read(given, "adminlevel", changes.admin_level),
    )


def _read(given: Mapping[str, str], key: str, read: Callable[[str], _Value]) -> _Value | None:
    return read(given[key]) if key in given else None


_ACCOUNT_VALUES = ("description", "organization", "parent", "grptres", "fairshare", "maxjobs")
_USER_VALUES = ("defaultaccount", "adminlevel")
_NO_RENAME = (
    "{kind} cannot be renamed, since its name is the identity of what it has in the clusters;"
    " add the new {kind} and delete the old one"
)

ENTITIES = {
    "account": Entity(
        name="account",
        plural="accounts",
        keys={
            "name": ("names", "account", "accounts", "acct"),
            "description": ("desc", "descr"),
            "organization": ("org",),
            "parent": ("parentname",),
            "grptres": (),
            "fairshare": ("share", "shares"),
            "maxjobs": (),
            "format": (),
        },
        selecting={"add": (), "modify": ("name",), "delete": ("name",), "show": ("name", "format")},
        settable={"add": ("name", *_ACCOUNT_VALUES), "modify": _ACCOUNT_VALUES},
        refusals={"name": "an " + _NO_RENAME.format(kind="account")},
        builders={
            "add": _add_accounts,
            "modify": _modify_accounts,
            "delete": _delete_accounts,
            "show": _show_accounts,
        },
    ),
    "user": Entity(
        name="user",
        plural="users",
        keys={
            "name": ("names", "user", "users"),
            "account": ("accounts", "acct"),
            "defaultaccount": ("defaultacct", "defacct"),
            "adminlevel": ("admin",),
            "format": (),
        },
        selecting={
            "add": (),
            "modify": ("name", "account"),
            "delete": ("name", "account"),
            "show": ("name", "account", "format"),
        },
        settable={"add": ("name", "account", *_USER_VALUES), "modify": _USER_VALUES},
        refusals={
            "name": "a " + _NO_RENAME.format(kind="user"),
            "account": "memberships are not set: use 'sacctmgr add user name=USER account=NEW'"
            " and 'sacctmgr delete user name=USER account=OLD'",
        },
        builders={"add": _add_users, "modify": _modify_users, "delete": _delete_users, "show": _show_users},
    ),
}
