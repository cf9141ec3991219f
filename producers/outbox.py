"""The outbox as the relay sees it: one batch of changes, with the states of their accounts, in one snapshot.

Everything here runs on the relay's own connection. Publishing is the relay's business.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Any

from spur_events import postgres
from spur_events.schemas import tres
from spur_events.schemas.accounts import AccountState, Allocation, Deletion, Member, Revision
from spur_events.schemas.events import Actor, Change, ChangeKind


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Changes taken from the outbox, and the whole state of each account that they touch.

    A name without a state is an account that is neither there nor recorded as deleted.
    """

    changes: dict[str, list[Change]]
    states: dict[str, AccountState]


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Which database this is. A restored database gets a new epoch."""

    id: str
    epoch: int


@cache
def statement(name: str) -> bytes:
    """Return the text of producers/sql/relay/<name>.sql."""
    return resources.files("spur_events.producers").joinpath(f"sql/relay/{name}.sql").read_bytes()


async def rows(connection: postgres.AsyncConnection, name: str, **parameters: object) -> list[dict[str, Any]]:
    """Run a named statement and return its rows, if it has any."""
    cursor = await connection.execute(statement(name), parameters)
    return await cursor.fetchall() if cursor.description else []


async def installation(connection: postgres.AsyncConnection) -> Installation:
    """Return which database this is."""
    cursor = await connection.execute("SELECT id, epoch FROM spur_events.installation")
    row = await cursor.fetchone()
    if row is None:
        raise LookupError("spur_events.installation is empty")
    return Installation(id=row["id"], epoch=row["epoch"])


async def waiting(connection: postgres.AsyncConnection) -> bool:
    """Return whether the outbox has rows."""
    cursor = await connection.execute("SELECT EXISTS (SELECT FROM spur_events.outbox) AS waiting")
    row = await cursor.fetchone()
    return bool(row and row["waiting"])


@asynccontextmanager
async def batch(connection: postgres.AsyncConnection, limit: int) -> AsyncIterator[Batch]:
    """Take up to `limit` rows; they leave the outbox when the block ends without an error.

    Raises:
        ConflictError: if another relay took a batch meanwhile; nothing was taken.
    """
    async with connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        fence = (await rows(connection, "fence"))[0]
        taken = await rows(connection, "take", limit=limit)
        changes: dict[str, list[Change]] = defaultdict(list)
        for row in taken:
            changes[row["account"]].append(_change(row))
        owner = Installation(id=fence["id"], epoch=fence["epoch"])
        states = await read_states(connection, owner, list(changes))
        yield Batch(changes=dict(changes), states=states)
        await _keep_good_allocations(connection, states.values())
        await rows(connection, "done", ids=[row["id"] for row in taken])


async def read_states(
    connection: postgres.AsyncConnection, owner: Installation, names: Sequence[str], *, numbered: bool = True
) -> dict[str, AccountState]:
    """Return the states of accounts, each at a revision of its own; at revision 0 unless `numbered`.

    Call it inside a REPEATABLE READ transaction: it reads several tables.
    """
    if not names:
        return {}
    members: dict[str, list[Member]] = defaultdict(list)
    for row in await rows(connection, "members", names=names):
        members[row["account"]].append(
            Member(name=row["name"], generation=row["generation"], is_default=row["is_default"])
        )
    found = [
        row
        for row in await rows(connection, "accounts", names=names)
        if row["present"] or row["deleted_at"] is not None
    ]
    numbers = [0] * len(found)
    if numbered:
        numbers = [row["number"] for row in await rows(connection, "revisions", count=len(found))]
    return {
        row["name"]: _state(owner, Revision(owner.epoch, number), row, members[row["name"]])
        for row, number in zip(found, numbers, strict=True)
    }


def _change(row: dict[str, Any]) -> Change:
    return Change(
        id=row["id"],
        kind=ChangeKind(row["kind"]),
        user=row["user_name"],
        before=row["before"] or "",
        after=row["after"] or "",
        actor=Actor(
            database_user=row["database_user"], os_user=row["os_user"], application=row["application"]
        ),
        at=row["at"],
    )


def _state(
    owner: Installation, revision: Revision, row: dict[str, Any], members: list[Member]
) -> AccountState:
    if not row["present"]:
        return AccountState(
            installation=owner.id,
            revision=revision,
            name=row["name"],
            incarnation=row["incarnation"],
            # The bus carries milliseconds; a state must equal itself after a round trip.
            deletion=Deletion(at=_milliseconds(row["deleted_at"]), by=row["deleted_by"]),
        )
    return AccountState(
        installation=owner.id,
        revision=revision,
        name=row["name"],
        incarnation=row["incarnation"],
        description=row["description"],
        organization=row["organization"],
        parent=row["parent_account"] or "",
        allocation=_allocation(row["grp_tres"], row["last_good"]),
        members=tuple(members),
    )


def _milliseconds(at: datetime) -> datetime:
    return at.replace(microsecond=at.microsecond // 1000 * 1000)


def _allocation(text: str | None, last_good: str | None) -> Allocation | None:
    """Return what `grp_tres` says; a malformed text never lifts a limit (design rule 6)."""
    if text is None or not text.strip():
        return None
    try:
        return Allocation(limits=dict(sorted(tres.parse(text).items())))
    except tres.TresError as error:
        limits = dict(sorted(tres.parse(last_good).items())) if last_good else {}
        return Allocation(limits=limits, problem=str(error))


async def _keep_good_allocations(
    connection: postgres.AsyncConnection, states: Iterable[AccountState]
) -> None:
    good = {
        state.name: tres.format_limits(state.allocation.limits)
        for state in states
        if state.allocation is not None and not state.allocation.problem
    }
    gone = [state.name for state in states if state.allocation is None]
    if good:
        await rows(connection, "keep_allocations", names=list(good), limits=list(good.values()))
    if gone:
        await rows(connection, "forget_allocations", names=gone)
