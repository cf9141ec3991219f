"""Carries out a typed command: asks the person, calls producers.accounting or .members, prints the outcome.

Called by main with what the grammar made. Imports the database and the settings, which the grammar does
without, so that `--help` and typing errors answer at once.
"""

import os
import pwd
import select
import sys
from collections.abc import Sequence
from typing import assert_never

from spur_events import errors, postgres, settings
from spur_events.producers import accounting, members, rows
from spur_events.producers.sacctmgr import commands, output

#: Seconds that a person has to answer, as in Slurm.
DECIDE_WITHIN_S = 30
_QUESTION = f"Would you like to commit changes? (You have {DECIDE_WITHIN_S} seconds to decide)\n(N/y): "


def run(command: commands.Change | commands.Show, options: commands.Options) -> int:
    """Carry out a command and return the exit code.

    Raises:
        SpurEventsError: what is wrong, for a person; nothing was stored then.
    """
    if isinstance(command, commands.ShowAccounts | commands.ShowUsers):
        with postgres.connect(settings.load().database, "sacctmgr") as connection:
            lines = _show(connection, command, options)
        _print(lines)
        return 0
    if options.readonly:
        raise errors.UsageError("option -r refuses changes; leave it out to make one")
    if not options.immediate and not sys.stdin.isatty():
        raise errors.UsageError(
            "there is no terminal to ask for confirmation; write -i to commit without asking"
        )
    return _change(command, options)


def actor() -> rows.Actor:
    """Return the user that the operating system says we are; SUDO_USER and the like anybody can set."""
    uid = os.getuid()
    try:
        return rows.Actor(os_user=pwd.getpwuid(uid).pw_name, uid=uid)
    except KeyError:
        return rows.Actor(os_user=f"uid {uid}", uid=uid)


def _change(command: commands.Change, options: commands.Options) -> int:
    who = actor()
    with postgres.connect(settings.load().database, "sacctmgr") as connection:
        if not options.immediate:
            # A dry run first: whatever is wrong is said before the question, and no lock is held while a
            # person thinks.
            planned = _apply(connection, who, command, dry_run=True)
            _print(output.change(command, planned, options))
            if not _confirmed():
                _print([" Changes Discarded"])
                return 1
        outcome = _apply(connection, who, command, dry_run=False)
    if options.immediate:
        if not options.quiet:
            _print(output.change(command, outcome, options))
    elif outcome != planned:  # somebody else was faster
        _print(output.change(command, outcome, options))
    return 0


def _apply(
    connection: postgres.Connection, who: rows.Actor, command: commands.Change, *, dry_run: bool
) -> rows.Outcome:
    match command:
        case commands.AddAccounts():
            return accounting.add(connection, who, command.names, command.patch, dry_run=dry_run)
        case commands.ModifyAccounts():
            return accounting.modify(connection, who, command.names, command.patch, dry_run=dry_run)
        case commands.DeleteAccounts():
            return accounting.delete(connection, who, command.names, dry_run=dry_run)
        case commands.AddUsers():
            return members.add(
                connection, who, command.names, command.accounts, command.patch, dry_run=dry_run
            )
        case commands.ModifyUsers():
            return members.modify(
                connection, who, command.names, command.patch, command.accounts, dry_run=dry_run
            )
        case commands.DeleteUsers():
            return members.delete(connection, who, command.names, command.accounts, dry_run=dry_run)
        case _:
            assert_never(command)


def _show(
    connection: postgres.Connection, command: commands.Show, options: commands.Options
) -> Sequence[str]:
    if isinstance(command, commands.ShowAccounts):
        accounts = accounting.show(connection, command.names)
        if options.style is commands.Style.JSON:
            return [output.accounts_json(accounts)]
        found = output.account_rows(accounts, associations=command.associations)
    else:
        users = members.show(connection, command.names, command.accounts)
        if options.style is commands.Style.JSON:
            return [output.users_json(users)]
        found = output.user_rows(users, associations=command.associations)
    return output.table(command.fields, found, options)


def _confirmed() -> bool:
    sys.stdout.write(_QUESTION)
    sys.stdout.flush()
    ready, _, _ = select.select([sys.stdin], [], [], DECIDE_WITHIN_S)
    return bool(ready) and sys.stdin.readline().strip().lower() in {"y", "yes"}


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(line + "\n" for line in lines))
    sys.stdout.flush()
