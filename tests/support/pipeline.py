"""Pieces of the pipeline for tests: settings for given servers, parts running in the background, waiting."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from spur_events import jetstream, postgres, settings
from spur_events.local.nats import Nats
from spur_events.producers.relay import Relay
from spur_events.schemas import names, subjects
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.events import AccountChanged, Change

T = TypeVar("T")

#: Generous: these machines are shared, and a test that waits for a condition loses nothing by it.
PATIENCE_S = 60.0


def config(database_url: str, nats_server: Nats, **groups: dict[str, Any]) -> settings.Settings:
    """Return settings for these servers; groups override, for example relay={"batch_rows": 2}."""
    given: dict[str, dict[str, Any]] = {
        "database": {"url": database_url},
        "nats": {"url": nats_server.url, "user": nats_server.user, "password": nats_server.password},
        # So that a broken notification path is seen: nothing may depend on a short poll.
        "relay": {"poll_interval_s": 1.0, "heartbeat_s": 1.0},
    }
    for group, values in groups.items():
        given[group] = {**given.get(group, {}), **values}
    return settings.Settings.model_validate(given)


async def eventually(
    check: Callable[[], Awaitable[T | None]], what: str, patience_s: float = PATIENCE_S
) -> T:
    """Poll until `check` returns something true, and return it."""
    try:
        async with asyncio.timeout(patience_s):
            while True:
                found = await check()
                if found:
                    return found
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"did not happen within {patience_s:.0f} s: {what}") from None


@contextlib.asynccontextmanager
async def background(part: Coroutine[Any, Any, object]) -> AsyncIterator[asyncio.Task[object]]:
    """Run a part until the block ends; its failure fails the test."""
    task = asyncio.ensure_future(part)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def relay(given: settings.Settings) -> AsyncIterator[tuple[Relay, jetstream.Bus]]:
    """Run a relay until the block ends; begins when it leads."""
    async with jetstream.connect(given.nats, "test relay") as bus:
        part = Relay(given, bus)
        async with background(part.run()) as task:
            leading = asyncio.ensure_future(part.leading.wait())
            await asyncio.wait({leading, task}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            assert leading.done()
            yield part, bus


def execute(given: settings.Settings, statement: str, *parameters: object) -> None:
    """Run SQL as a writer that knows nothing of us."""
    with postgres.connect(given.database, "psql") as connection:
        connection.execute(statement.encode(), parameters or None)


async def state(bus: jetstream.Bus, account: str) -> AccountState | None:
    """Return an account's state in the bucket."""
    entry = await bus.get(subjects.ACCOUNTS_BUCKET, names.slug(account), AccountState)
    return entry.value if entry else None


async def changes(bus: jetstream.Bus, account: str | None = None) -> list[tuple[AccountChanged, Change]]:
    """Return all changes in the event stream, in order."""
    found = []
    for event in await bus.read_stream(subjects.EVENTS_STREAM, subjects.ALL_CHANGES, AccountChanged):
        if account is None or event.name == account:
            found += [(event, change) for change in event.changes]
    return found
