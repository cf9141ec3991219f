"""Commands on accounts, on an open connection; each is one transaction, all or nothing.

Called by `sacctmgr` (producers.sacctmgr.actions). Plain SQL on the accounting tables: events are the triggers'
business, words and their meaning the grammar's, and users producers.members'.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from spur_events import errors
from spur_events.producers import changes, rows
from spur_events.schemas import tres

if TYPE_CHECKING:  # as in rows
    from spur_events import postgres


def add(
    connection: "postgres.Connection",
    actor: rows.Actor,
    names: Iterable[str],
    patch: changes.AccountPatch,
    *,
    dry_run: bool = False,
) -> rows.Outcome:
    """Add accounts, all with the same columns; those that exist already are left as they are.

    Raises:
        PermanentError: if every one of them exists already.
        UsageError: if a name or text cannot be stored, or the parent does not exist.
    """
    wanted = changes.account_names(names)
    columns = _columns(patch)
    if patch.limits is not None:
        columns["grp_tres"] = tres.format_limits(tres.merge({}, patch.limits))
    with rows.transaction(connection, actor, dry_run=dry_run) as work:
        existing = work.accounts(wanted)
        new = [name for name in wanted if name not in existing]
        if not new:
            raise errors.PermanentError(
                f"Already existing account {changes.listed(wanted)}. Nothing new added;"
                " use 'sacctmgr modify account' to change it"
            )
        columns |= _parent(work, new, patch.parent)
        for name in new:
            work.insert("accounts", {"name": name, **columns})
            work.audit("add", "account", name, columns)
    notes = [f"Already existing account {name!r}, left as it is" for name in wanted if name in existing]
    return rows.Outcome(done=tuple(new), notes=tuple(notes))


def modify(
    connection: "postgres.Connection",
    actor: rows.Actor,
    names: Iterable[str],
    patch: changes.AccountPatch,
    *,
    dry_run: bool = False,
) -> rows.Outcome:
    """Write the patch's columns, and no others, to accounts. TRES limits are merged one by one.

    Raises:
        PermanentError: if one of the accounts does not exist.
        UsageError: if a name or text cannot be stored, or the new parent does not exist or is below the account.
    """
    wanted = changes.account_names(names)
    columns = _columns(patch)
    notes: list[str] = []
    with rows.transaction(connection, actor, dry_run=dry_run) as work:
        stored = work.accounts(wanted)
        rows.refuse_missing("account", [name for name in wanted if name not in stored], "modified")
        columns |= _parent(work, wanted, patch.parent)
        for name in wanted:
            if patch.limits is not None:
                # Nobody can say what a malformed text was to mean, so there is nothing to merge with; a
                # refusal would only send the administrator to psql.
                old, problem = _stored_limits(stored[name])
                columns["grp_tres"] = tres.format_limits(tres.merge(old, patch.limits))
                if problem:
                    notes.append(
                        f"{name}: the stored grptres {stored[name]!r} was malformed ({problem});"
                        f" it is replaced whole by {columns['grp_tres']!r}"
                    )
            work.update("accounts", columns, {"name": name})
            work.audit("modify", "account", name, columns)
    return rows.Outcome(done=wanted, notes=tuple(notes))


def delete(
    connection: "postgres.Connection", actor: rows.Actor, names: Iterable[str], *, dry_run: bool = False
) -> rows.Outcome:
    """Delete accounts with their members and associations.

    Raises:
        PermanentError: if one of them does not exist or is the parent of an account that stays.
    """
    wanted = changes.account_names(names)
    key = (list(wanted),)
    with rows.transaction(connection, actor, dry_run=dry_run) as work:
        existing = work.accounts(wanted)
        rows.refuse_missing("account", [name for name in wanted if name not in existing], "deleted")
        children = work.select(
            "select name, parent_account from accounts"
            " where parent_account = any(%s) and name <> all(%s) order by parent_account, name",
            key * 2,
        )
        if children:
            names_of_children = changes.listed([row["name"] for row in children])
            raise errors.PermanentError(
                f"account {children[0]['parent_account']!r} is the parent of {names_of_children}. Nothing deleted;"
                " delete them first, or move them: sacctmgr modify account NAME set parent=OTHER"
            )
        removed = work.select("delete from users where account = any(%s) returning name, account", key)
        work.select("delete from associations where account = any(%s) returning id", key)
        work.select("delete from accounts where name = any(%s) returning name", key)
        notes = work.move_defaults(sorted({row["name"] for row in removed}))
        for name in wanted:
            members = sorted(row["name"] for row in removed if row["account"] == name)
            work.audit("delete", "account", name, {"members": members})
    return rows.Outcome(done=wanted, notes=notes)


def show(connection: "postgres.Connection", names: Sequence[str] = ()) -> list[changes.Account]:
    """Return the named accounts that exist, or all, by name."""
    found = connection.execute(
        "select a.*, coalesce((select array_agg(u.name order by u.name) from users u where u.account = a.name), '{}')"
        " as members from accounts a where %s::text[] is null or a.name = any(%s) order by a.name",
        (list(names) or None, list(names)),
    ).fetchall()
    return [
        changes.Account(
            name=row["name"],
            description=row["description"],
            organization=row["organization"],
            parent=row["parent_account"] or "",
            grptres=row["grp_tres"] or "",
            fairshare=row["fairshare_weight"],
            max_jobs=row["max_running_jobs"],
            members=tuple(row["members"]),
        )
        for row in found
    ]


def _columns(patch: changes.AccountPatch) -> dict[str, Any]:
    """Return the columns of a patch that do not depend on what is stored."""
    columns: dict[str, Any] = {}
    if patch.description is not None:
        columns["description"] = changes.text("description", patch.description)
    if patch.organization is not None:
        columns["organization"] = changes.text("organization", patch.organization)
    if patch.fairshare is not None:
        cleared = patch.fairshare == changes.CLEARED
        columns["fairshare_weight"] = changes.DEFAULT_FAIRSHARE if cleared else patch.fairshare
    if patch.max_jobs is not None:
        columns["max_running_jobs"] = None if patch.max_jobs == changes.CLEARED else patch.max_jobs
    return columns


def _parent(work: rows.Transaction, children: Sequence[str], given: str | None) -> dict[str, str | None]:
    """Return the parent column, if it is to be written, after a look at the accounts above."""
    if given is None:
        return {}
    parent = changes.account_name(given)
    seen: set[str] = set()
    above: str | None = parent
    while above is not None and above not in seen:  # a circle further up is not of our making
        if above in children:
            raise errors.UsageError(
                f"parent={given}: account {above!r} would be below itself. Nothing changed; choose another parent"
            )
        seen.add(above)
        found = work.select("select parent_account from accounts where name = %s for key share", (above,))
        if not found and above == parent:
            if parent == changes.ROOT:
                return {"parent_account": None}  # Slurm's top needs no row
            raise errors.UsageError(
                f"unknown parent account {parent!r}. Nothing changed; add it first: sacctmgr add account name={parent}"
            )
        above = found[0]["parent_account"] if found else None
    return {"parent_account": parent}


def _stored_limits(text: str | None) -> tuple[tres.Limits, str]:
    """Return the limits that a stored text means, and why it means none where it is malformed."""
    try:
        return tres.parse(text or ""), ""
    except tres.TresError as error:
        return {}, str(error)
