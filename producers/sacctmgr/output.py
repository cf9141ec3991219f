"""Rows as text: Slurm's tables, its two parsable styles, and JSON; and what a change did. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spur_events.producers import changes, rows
from spur_events.producers.sacctmgr import columns, commands
from spur_events.schemas import tres

Row = Mapping[str, str]

_HEADINGS: dict[type[commands.Change], str] = {
    commands.AddAccounts: "Adding Account(s)",
    commands.ModifyAccounts: "Modifying account(s)...",
    commands.DeleteAccounts: "Deleting account(s)...",
    commands.AddUsers: "Adding User(s)",
    commands.ModifyUsers: "Modifying user(s)...",
    commands.DeleteUsers: "Deleting user(s)...",
}
_LABELS = {
    "description": "Description",
    "organization": "Organization",
    "parent": "Parent",
    "limits": "GrpTRES",
    "fairshare": "Fairshare",
    "max_jobs": "MaxJobs",
    "default_account": "DefaultAccount",
    "admin_level": "AdminLevel",
}


def table(fields: Sequence[columns.Field], found: Iterable[Row], options: commands.Options) -> list[str]:
    """Return the lines of a table in the style that the options ask for."""
    texts = [[_printable(row.get(field.column.key, "")) for field in fields] for row in found]
    header = [field.column.header for field in fields]
    if options.style is commands.Style.TABLE:
        lines = [_padded(fields, line) for line in texts]
        if options.header:
            dashes = " ".join("-" * abs(field.width) for field in fields) + " "
            lines = [_padded(fields, header), dashes, *lines]
        return lines
    end = "|" if options.style is commands.Style.PARSABLE else ""
    return ["|".join(line) + end for line in ([header] if options.header else []) + texts]


def account_rows(accounts: Iterable[changes.Account], *, associations: bool) -> list[Row]:
    """Return one row an account, with associations followed by one row a member."""
    found: list[Row] = []
    for account in accounts:
        row = {
            "account": account.name,
            "description": account.description,
            "organization": account.organization,
            "parent": account.parent or changes.ROOT,
            "fairshare": str(account.fairshare),
            "maxjobs": "" if account.max_jobs is None else str(account.max_jobs),
            "grptres": account.grptres,
        }
        found.append(row)
        if associations:
            found += [
                {
                    **row,
                    "user": member,
                    "fairshare": "",
                    "maxjobs": "",
                    "grptres": "",
                    "parent": "",
                }
                for member in account.members
            ]
    return found


def user_rows(users: Iterable[changes.User], *, associations: bool) -> list[Row]:
    """Return one row a user, or with associations one row an account of each."""
    found: list[Row] = []
    for user in users:
        row = {
            "user": user.name,
            "defaultaccount": user.default_account,
            "adminlevel": user.admin_level.capitalize(),
            "account": user.default_account,
            "accounts": ",".join(user.accounts),
        }
        found += [{**row, "account": account} for account in user.accounts] if associations else [row]
    return found


def accounts_json(accounts: Iterable[changes.Account]) -> str:
    """Return accounts whole; `limits` is null where grptres cannot be understood."""
    return _json(
        "accounts",
        [
            {
                "name": account.name,
                "description": account.description,
                "organization": account.organization,
                "parent": account.parent or None,
                "grptres": account.grptres,
                "limits": _limits(account.grptres),
                "fairshare": account.fairshare,
                "max_jobs": account.max_jobs,
                "members": list(account.members),
            }
            for account in accounts
        ],
    )


def users_json(users: Iterable[changes.User]) -> str:
    """Return users whole."""
    return _json(
        "users",
        [
            {
                "name": user.name,
                "default_account": user.default_account or None,
                "admin_level": user.admin_level,
                "accounts": list(user.accounts),
            }
            for user in users
        ],
    )


def change(command: commands.Change, outcome: rows.Outcome, options: commands.Options) -> list[str]:
    """Return what is being changed, in Slurm's layout, with remarks behind it."""
    if options.style is commands.Style.JSON:
        return [json.dumps({"done": outcome.done, "notes": outcome.notes}, indent=2)]
    lines = [f" {_HEADINGS[type(command)]}", *(f"  {_printable(name)}" for name in outcome.done)]
    settings = _settings(command)
    if settings:
        lines += [" Settings", *settings]
    return [*lines, *(f" Note: {_printable(note)}" for note in outcome.notes)]


def _settings(command: commands.Change) -> list[str]:
    patch = getattr(command, "patch", None)
    if patch is None:
        return []
    given = {key: getattr(patch, key) for key in _LABELS if getattr(patch, key, None) is not None}
    return [
        f"  {_LABELS[key]:<14} = {tres.format_limits(value) if key == 'limits' else _printable(str(value))}"
        for key, value in given.items()
    ]


def _limits(text: str) -> tres.Limits | None:
    try:
        return tres.parse(text)
    except tres.TresError:
        return None


def _json(key: str, found: list[dict[str, Any]]) -> str:
    return json.dumps({key: found}, indent=2, ensure_ascii=False)


def _padded(fields: Sequence[columns.Field], texts: Sequence[str]) -> str:
    parts = []
    for field, text in zip(fields, texts, strict=True):
        width = abs(field.width)
        # As Slurm: a plus sign for what was cut off, and a blank behind every column.
        shown = text if len(text) <= width else text[: width - 1] + "+"
        parts.append(shown.ljust(width) if field.width < 0 else shown.rjust(width))
    return "".join(part + " " for part in parts)


def _printable(text: str) -> str:
    """Return a text that another program stored, without what would drive the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
