"""The relay: takes changes out of the outbox and puts them on the bus (design rules 1 and 2).

One relay leads, by an advisory lock in the database; others stand by on the same lock. The boring order is
the whole point: snapshot, put states, publish events, wait for the acknowledgements, commit.
"""

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime

from spur_events import errors, jetstream, postgres, process, retrying, settings
from spur_events.producers import outbox
from spur_events.schemas import codec, names, subjects
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.events import AccountChanged, Change
from spur_events.schemas.status import RelayStatus

log = logging.getLogger(__name__)

#: Advisory lock of the leading relay ("spur" in ASCII); advisory locks are per database.
LOCK = 0x73707572
_PUBLISH_ATTEMPTS = 5
_CONCURRENCY = 64
# A relay that hangs holding the lock loses its session, so that the standby takes over.
_SESSION_LIMITS = (
    "SELECT set_config('idle_session_timeout', '30s', false),"
    " set_config('idle_in_transaction_session_timeout', '60s', false)"
)


class FencedError(errors.TemporaryError):
    """The bucket holds a newer revision than this relay's: another relay leads, or the database is older."""


class Relay:
    """One relay process. `run` returns only by cancellation or a MisconfiguredError."""

    def __init__(self, config: settings.Settings, bus: jetstream.Bus) -> None:
        self._config = config
        self._bus = bus
        self._wake = asyncio.Event()
        self._sequences: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._revision = 0
        self.leading = asyncio.Event()

    async def run(self) -> None:
        """Lead, or stand by until this relay may; start again after every temporary error."""
        await process.together(
            retrying.forever("listen", self._listen), retrying.forever("relay", self._lead)
        )

    async def _listen(self) -> None:
        """Turn notifications into wake-ups. What is lost here, the poll finds (rule 2)."""
        database = self._config.database
        async with postgres.session(database, "spur-events relay listen") as connection:
            await connection.execute("LISTEN spur_events")
            # Whatever was committed while nobody listened is in the table: look there first.
            self._wake.set()
            while True:
                async for _ in connection.notifies(timeout=10.0, stop_after=1):
                    self._wake.set()
                async with asyncio.timeout(database.connect_timeout_s):
                    await connection.execute("SELECT 1")  # a dead peer without a TCP reset shows here

    async def _lead(self) -> None:
        async with postgres.session(self._config.database, "spur-events relay") as connection:
            await self._wait_for_lock(connection)
            owner = await outbox.installation(connection)
            await self._bus.ensure_topology(owner.id)
            await connection.execute(_SESSION_LIMITS)
            self._sequences.clear()
            await self._refill(connection, owner)
            log.info("relay leads", extra={"installation": owner.id, "epoch": owner.epoch})
            self.leading.set()
            heartbeat = asyncio.create_task(self._beat(owner.id, owner.epoch))
            try:
                while not heartbeat.done():
                    with process.cancellable():
                        if await outbox.waiting(connection):
                            await self._drain_or_yield(connection)
                        else:
                            await self._sleep()
                heartbeat.result()
            finally:
                self.leading.clear()
                heartbeat.cancel()

    async def _wait_for_lock(self, connection: postgres.AsyncConnection) -> None:
        told = False
        while True:
            cursor = await connection.execute("SELECT pg_try_advisory_lock(%s) AS locked", (LOCK,))
            row = await cursor.fetchone()
            if row is not None and row["locked"]:
                return
            if not told:
                log.info("relay stands by: another one leads")
                told = True
            await asyncio.sleep(self._config.relay.poll_interval_s)

    async def _sleep(self) -> None:
        """Wait for a notification, at most one poll interval."""
        try:
            async with asyncio.timeout(self._config.relay.poll_interval_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _drain_or_yield(self, connection: postgres.AsyncConnection) -> None:
        """Publish one batch; where a writer was in the way, the next round takes a newer snapshot.

        That is no reason to give up the lead: leading anew reads the whole database and the whole bucket.
        """
        try:
            with postgres.translated(self._config.database):
                await self._drain(connection)
        except postgres.ConflictError as error:
            log.info("batch met a writer and is taken again", extra={"error": str(error)})
            await asyncio.sleep(retrying.backoff_s(1, 0.05, 0.05))

    async def _drain(self, connection: postgres.AsyncConnection) -> None:
        """Publish one batch. Any error rolls the batch back: its rows stay and are published again."""
        if not self._bus.connected:
            raise errors.UnreachableError("NATS is not connected; the outbox keeps the changes")
        relay = self._config.relay
        async with outbox.batch(connection, relay.batch_rows) as batch:
            limit = asyncio.Semaphore(_CONCURRENCY)
            outcomes = await asyncio.gather(
                *(
                    self._publish(limit, batch.states.get(name), name, changes)
                    for name, changes in batch.changes.items()
                ),
                return_exceptions=True,
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        log.info(
            "published",
            extra={"accounts": len(batch.changes), "changes": sum(map(len, batch.changes.values()))},
        )

    async def _publish(
        self, limit: asyncio.Semaphore, state: AccountState | None, name: str, changes: Sequence[Change]
    ) -> None:
        if state is None:
            log.warning("account is neither stored nor recorded as deleted", extra={"account": name})
            return
        slug = names.slug(name)
        async with limit:
            try:
                await self._put(slug, state)
            except codec.TooLargeError as error:
                # It must not block the others (design section 4); `status` shows it.
                self._refused[slug] = str(error)
                log.warning(
                    "account is too large to be published", extra={"account": name, "error": str(error)}
                )
                return
            self._refused.pop(slug, None)
            self._revision = max(self._revision, state.revision.number)
            size = self._config.relay.changes_per_event
            parts = [changes[start : start + size] for start in range(0, len(changes), size)]
            for number, part in enumerate(parts, 1):
                event = AccountChanged(
                    installation=state.installation,
                    revision=state.revision,
                    name=name,
                    changes=tuple(part),
                    part=number,
                    parts=len(parts),
                )
                await self._announce(slug, event)

    async def _put(self, slug: str, state: AccountState) -> None:
        """Write a state over an older one of ours; conditional, so that a second relay cannot undo it."""

        async def attempt() -> int:
            return await self._bus.put(
                subjects.ACCOUNTS_BUCKET, slug, state, last=self._sequences.get(slug, 0)
            )

        for _ in range(_PUBLISH_ATTEMPTS):
            try:
                self._sequences[slug] = await retrying.call(
                    "put state",
                    _PUBLISH_ATTEMPTS,
                    attempt,
                    unless=(jetstream.StaleError, jetstream.MissingError),
                )
            except jetstream.StaleError:
                # Also where only the acknowledgement of our own write was lost.
                live = await self._live(slug)
                self._sequences[slug] = live.sequence if live else 0
                if live and live.value == state:
                    return
                if live and live.value.revision >= state.revision:
                    raise FencedError(
                        f"bucket holds revision {live.value.revision} of {slug}, this relay has {state.revision}"
                    ) from None
            else:
                return
        raise errors.TemporaryError(f"state of {slug} is written by somebody else all the time")

    async def _live(self, slug: str) -> jetstream.Entry[AccountState] | None:
        return await self._bus.get(subjects.ACCOUNTS_BUCKET, slug, AccountState, newest=True)

    async def _announce(self, slug: str, event: AccountChanged) -> None:
        message_id = f"{event.installation}.{event.revision}.{event.part}"
        trace = hashlib.sha256(message_id.encode("ascii")).hexdigest()

        async def attempt() -> int:
            return await self._bus.publish(
                subjects.change(slug, self._bus.partitions),
                event,
                message_id=message_id,
                headers={"traceparent": f"00-{trace[:32]}-{trace[32:48]}-01"},
            )

        # A missing stream is not waited for: the relay starts again and makes it.
        await retrying.call("publish event", _PUBLISH_ATTEMPTS, attempt, unless=(jetstream.MissingError,))

    async def _refill(self, connection: postgres.AsyncConnection, owner: outbox.Installation) -> None:
        """Queue what the bucket lacks or has otherwise: a lost, emptied or new bucket fills by itself."""
        entries = await self._bus.read_all(subjects.ACCOUNTS_BUCKET, AccountState)
        live = {key: entry for key, entry in entries.items() if isinstance(entry, jetstream.Entry)}
        self._sequences.update({key: entry.sequence for key, entry in entries.items()})
        await self._check_epoch(connection, owner, live)
        async with connection.transaction():
            await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            every = [row["name"] for row in await outbox.rows(connection, "every_name")]
            wanted = await outbox.read_states(connection, owner, every, numbered=False)
            differing = [
                name
                for name, state in wanted.items()
                if (entry := live.get(names.slug(name))) is None
                or entry.value.model_copy(update={"revision": state.revision}) != state
            ]
            await outbox.rows(connection, "republish", names=differing)
        if differing:
            log.warning("bucket differs from the database", extra={"republished": len(differing)})

    async def _check_epoch(
        self,
        connection: postgres.AsyncConnection,
        owner: outbox.Installation,
        live: dict[str, jetstream.Entry[AccountState]],
    ) -> None:
        """Open a new epoch where the bucket is ahead of the database: it was restored (rule 3)."""
        if not live:
            return
        newest = max(entry.value.revision for entry in live.values())
        number = (await outbox.rows(connection, "last_revision"))[0]["number"]
        if newest <= (owner.epoch, number):
            return
        await outbox.rows(connection, "new_epoch", epoch=newest.epoch + 1)
        log.error(
            "the database is older than the bucket: it was restored; a new epoch begins",
            extra={"bucket": str(newest), "database": f"{owner.epoch}.{number}", "epoch": newest.epoch + 1},
        )

    async def _beat(self, installation: str, epoch: int) -> None:
        while True:
            status = RelayStatus(
                installation=installation,
                epoch=epoch,
                host=socket.gethostname(),
                pid=os.getpid(),
                at=datetime.now(UTC),
                revision=self._revision,
                refused=dict(self._refused),
            )
            try:
                await self._bus.put(subjects.STATUS_BUCKET, subjects.RELAY_KEY, status)
            except jetstream.MissingError:
                raise  # the bucket is gone: leading anew makes it
            except errors.TemporaryError as error:
                log.warning("heartbeat not written", extra={"error": str(error)})
            await asyncio.sleep(self._config.relay.heartbeat_s)
