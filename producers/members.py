"""Commands on users and their memberships, on an open connection; each is one transaction, all or nothing.

Called by `sacctmgr` (producers.sacctmgr.actions); accounts are producers.accounting's. A user has one row an
account; default account and admin level belong to the user, though the table spreads them over the rows.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from spur_events import errors
from spur_events.producers import changes, rows

if TYPE_CHECKING:  # as in rows
    from spur_events import postgres


def add(
    connection: "postgres.Connection",
    actor: rows.Actor,
    names: Iterable[str],
    accounts: Iterable[str],
    patch: changes.UserPatch,
    *,
    dry_run: bool = False,
) -> rows.Outcome:
    """Add each user to each account; memberships that exist already are left as they are.

    The first account becomes the default of a user without one, unless the patch names another.

    Raises:
        PermanentError: if all of the memberships exist already.
        UsageError: if a name cannot be stored, or an account is not given or does not exist.
    """
    users = changes.user_names(names)
    default = _default(patch)
    # As in Slurm, the default account need not be repeated in account=.
    wanted = changes.account_names([*accounts, *default])
    if not wanted:
        raise errors.UsageError(f"no account for user {changes.listed(users)}; write account=NAME")
    with rows.transaction(connection, actor, dry_run=dry_run) as work:
        known = work.accounts(wanted)
        missing = [name for name in wanted if name not in known]
        if missing:
            raise errors.UsageError(
                f"unknown account {changes.listed(missing)} for user {changes.listed(users)}. Nothing new added;"
                f" add it first: sacctmgr add account name={missing[0]}"
            )
        stored = work.memberships(users)
        pairs = [(user, account) for user in users for account in wanted]
        old = [(user, account) for user, account in pairs if account in stored.get(user, {})]
        if len(old) == len(pairs):
            raise errors.PermanentError(
                f"Already existing user {changes.listed(users)} in account {changes.listed(wanted)}."
                " Nothing new added; use 'sacctmgr modify user' to change it"
            )
        for user in users:
            _add_one(work, user, wanted, stored.get(user, {}), patch)
    return rows.Outcome(
        done=tuple(f"{user} in {account}" for user, account in pairs if (user, account) not in old),
        notes=tuple(f"Already existing user {user!r} in {account!r}, left as it is" for user, account in old),
    )


def _add_one(
    work: rows.Transaction,
    user: str,
    accounts: Sequence[str],
    stored: dict[str, dict[str, Any]],
    patch: changes.UserPatch,
) -> None:
    levels = [row["admin_level"] for row in stored.values()]
    level = patch.admin_level or next(iter(levels), changes.ADMIN_LEVELS[0])
    if stored and patch.admin_level is not None:
        work.update("users", {"admin_level": level}, {"name": user})
    has_default = any(row["default_account"] is not None for row in stored.values())
    target = next(iter(_default(patch)), None if has_default else accounts[0])
    if target is not None and has_default:
        work.clear_default(user)
    for account in accounts:
        default = account if account == target else None
        if account not in stored:
            row = {"name": user, "account": account, "admin_level": level, "default_account": default}
            work.insert("users", row)
            work.audit("add", "user", user, row)
        elif default is not None:
            work.update("users", {"default_account": default}, {"name": user, "account": account})


def modify(
    connection: "postgres.Connection",
    actor: rows.Actor,
    names: Iterable[str],
    patch: changes.UserPatch,
    accounts: Iterable[str] = (),
    *,
    dry_run: bool = False,
) -> rows.Outcome:
    """Change users' default account or admin level. `accounts` are memberships that they must have.

    Raises:
        PermanentError: if a user does not exist, or is not in an account that is named.
        UsageError: if a name cannot be stored.
    """
    users = changes.user_names(names)
    default = _default(patch)
    required = changes.account_names([*accounts, *default])
    with rows.transaction(connection, actor, dry_run=dry_run) as work:
        stored = work.memberships(users)
        _refuse(stored, users, required, "modified")
        for user in users:
            columns: dict[str, Any] = {}
            if patch.admin_level is not None:
                columns["admin_level"] = patch.admin_level
                work.update("users", columns, {"name": user})
            for account in default:
                columns["default_account"] = account
                if stored[user][account]["default_account"] is None:
                    work.clear_default(user)
                    work.update("users", {"default_account": account}, {"name": user, "account": account})
            work.audit("modify", "user", user, columns)
    return rows.Outcome(done=users)


def delete(
    connection: "postgres.Connection",
    actor: rows.Actor,
    names: Iterable[str],
    accounts: Iterable[str] = (),
    *,
    dry_run: bool = False,
) -> rows.Outcome:
    """Take users out of the named accounts, or out of all where none is named.

    Raises:
        PermanentError: if a user does not exist, or is not in an account that is named.
        UsageError: if a name cannot be stored.
    """
    users = changes.user_names(names)
    chosen = changes.account_names(accounts)
    with rows.transaction(connection, actor, dry_run=dry_run) as work:
        stored = work.memberships(users)
        _refuse(stored, users, chosen, "deleted")
        gone = [(user, account) for user in users for account in (chosen or sorted(stored[user]))]
        for user, account in gone:
            key = (user, account)
            work.select("delete from users where name = %s and account = %s returning name", key)
            work.select("delete from associations where user_name = %s and account = %s returning id", key)
            work.audit("delete", "user", user, {"account": account})
        notes = work.move_defaults(users)
    return rows.Outcome(done=tuple(f"{user} in {account}" for user, account in gone), notes=notes)


def show(
    connection: "postgres.Connection", names: Sequence[str] = (), accounts: Sequence[str] = ()
) -> list[changes.User]:
    """Return the named users (or all) that are in one of the accounts (or in any), by name."""
    found = connection.execute(
        "select name, array_agg(account order by account) as accounts, max(admin_level) as admin_level,"
        " coalesce(max(account) filter (where default_account is not null), '') as default_account"
        " from users where %s::text[] is null or name = any(%s)"
        " group by name having %s::text[] is null or array_agg(account) && %s order by name",
        (list(names) or None, list(names), list(accounts) or None, list(accounts)),
    ).fetchall()
    return [changes.User(**{**row, "accounts": tuple(row["accounts"])}) for row in found]


def _default(patch: changes.UserPatch) -> tuple[str, ...]:
    """Return the default account that a patch names, cleaned, as none or one."""
    return () if patch.default_account is None else (changes.account_name(patch.default_account),)


def _refuse(stored: rows.Memberships, users: Sequence[str], accounts: Sequence[str], done: str) -> None:
    """Raise PermanentError unless every user exists and is in every one of the accounts."""
    rows.refuse_missing("user", [user for user in users if user not in stored], done)
    for user in users:
        missing = [account for account in accounts if account not in stored[user]]
        if missing:
            raise errors.PermanentError(
                f"user {user!r} is not in account {changes.listed(missing)}, only in"
                f" {changes.listed(sorted(stored[user]))}. Nothing {done}"
            )
