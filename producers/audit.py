"""The database against the bucket: what the bucket lacks or has otherwise is queued to be published again.

The leading relay calls it at start, at its interval, on request, and when the bucket is not what the relay left
there. It ends with what a checkpoint says (design rules 3 and 12). Absence never deletes: an account that only
the bucket knows stays there, and is listed as unexplained.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from spur_events import jetstream, postgres
from spur_events.producers import outbox
from spur_events.schemas import names, subjects
from spur_events.schemas.accounts import AccountState, Revision
from spur_events.schemas.resync import Contents

log = logging.getLogger(__name__)

Live = Mapping[str, jetstream.Entry[AccountState]]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found. `sequences` are the bucket's own revisions, by slug, for conditional writes."""

    contents: Contents
    sequences: dict[str, int]
    newest: Revision
    differing: tuple[str, ...]
    unexplained: tuple[str, ...]


async def run(connection: postgres.AsyncConnection, bus: jetstream.Bus, owner: outbox.Installation) -> Audit:
    """Compare, and queue what differs in the outbox. Nothing else may write to the bucket meanwhile."""
    entries = await bus.read_all(subjects.ACCOUNTS_BUCKET, AccountState)
    live = {slug: entry for slug, entry in entries.items() if isinstance(entry, jetstream.Entry)}
    async with connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        every = [row["name"] for row in await outbox.rows(connection, "every_name")]
        wanted = await outbox.read_states(connection, owner, every, numbered=False)
        changing = {names.slug(row["account"]) for row in await outbox.rows(connection, "changing")}
        old = {
            name
            for name, state in wanted.items()
            if state.slug not in changing and _is_of_before(state, live)
        }
        differing = tuple(name for name, state in wanted.items() if name not in old and _differs(state, live))
        await outbox.rows(connection, "republish", names=list(differing))
    known = {names.slug(name) for name in wanted.keys() - old} | changing
    found = Audit(
        contents=Contents(entry.value for entry in live.values()),
        sequences={slug: entry.sequence for slug, entry in entries.items()},
        newest=max((entry.value.revision for entry in live.values()), default=Revision(0, 0)),
        differing=differing,
        unexplained=tuple(
            sorted(slug for slug, entry in live.items() if slug not in known and entry.value.deletion is None)
        ),
    )
    if differing or found.unexplained:
        log.warning(
            "bucket differs from the database",
            extra={"republished": len(differing), "unexplained": len(found.unexplained)},
        )
    return found


def _is_of_before(state: AccountState, live: Live) -> bool:
    """Whether a tombstone is about an earlier account than the one that is alive in the bucket.

    A database that was restored to before the account was created again has such a tombstone. It says nothing
    about the account of today, which is thus unexplained.
    """
    entry = live.get(state.slug)
    return (
        state.deletion is not None
        and entry is not None
        and entry.value.deletion is None
        and entry.value.incarnation != state.incarnation
    )


def _differs(state: AccountState, live: Live) -> bool:
    entry = live.get(state.slug)
    if entry is None:
        return True
    return entry.value.model_copy(update={"revision": state.revision}) != state


async def open_epoch(
    connection: postgres.AsyncConnection, owner: outbox.Installation, newest: Revision
) -> outbox.Installation:
    """Return the installation, in a new epoch where the bucket is ahead of the database: it was restored."""
    number = (await outbox.rows(connection, "last_revision"))[0]["number"]
    if newest <= (owner.epoch, number):
        return owner
    epoch = newest.epoch + 1
    await outbox.rows(connection, "new_epoch", epoch=epoch)
    log.error(
        "the database is older than the bucket: it was restored; a new epoch begins, nothing is pruned on its account",
        extra={"bucket": str(newest), "database": f"{owner.epoch}.{number}", "epoch": epoch},
    )
    return outbox.Installation(id=owner.id, epoch=epoch)


async def forget(
    connection: postgres.AsyncConnection, bus: jetstream.Bus, slugs: tuple[str, ...], requested_by: str
) -> None:
    """Record the deletion of accounts that only the bucket knows; those that the database has are left alone."""
    for slug in slugs:
        entry = await bus.get(subjects.ACCOUNTS_BUCKET, slug, AccountState, newest=True)
        if entry is not None and entry.value.deletion is None:
            await outbox.rows(
                connection,
                "forget",
                account=entry.value.name,
                incarnation=entry.value.incarnation,
                by=f"resync --prune-unexplained by {requested_by or 'somebody'}",
            )
