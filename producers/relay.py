"""The relay: takes changes out of the outbox and puts them on the bus (design rules 1 and 2).

One relay leads, by an advisory lock in the database; others stand by on the same lock. The boring order is
the whole point: snapshot, put states, publish events, wait for the acknowledgements, commit.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from datetime import UTC, datetime

from spur_events import errors, jetstream, postgres, process, retrying, settings
from spur_events.producers import audit, outbox
from spur_events.producers.publisher import Publisher
from spur_events.schemas import subjects
from spur_events.schemas.events import AuditRequest
from spur_events.schemas.resync import Checkpoint
from spur_events.schemas.status import RelayStatus

log = logging.getLogger(__name__)

#: Advisory lock of the leading relay ("spur" in ASCII); advisory locks are per database.
LOCK = 0x73707572
# A relay that hangs holding the lock loses its session, so that the standby takes over.
_SESSION_LIMITS = (
    "SELECT set_config('idle_session_timeout', '30s', false),"
    " set_config('idle_in_transaction_session_timeout', '60s', false)"
)


class Relay:
    """One relay process. `run` returns only by cancellation or a MisconfiguredError."""

    def __init__(self, config: settings.Settings, bus: jetstream.Bus) -> None:
        self._config = config
        self._bus = bus
        self._wake = asyncio.Event()
        self._requests: list[tuple[AuditRequest, asyncio.Future[Checkpoint]]] = []
        self.leading = asyncio.Event()

    async def run(self) -> None:
        """Lead, or stand by until this relay may; start again after every temporary error."""
        await process.together(
            retrying.forever("listen", self._listen), retrying.forever("relay", self._follow_or_lead)
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

    async def _follow_or_lead(self) -> None:
        async with postgres.session(self._config.database, "spur-events relay") as connection:
            await self._wait_for_lock(connection)
            owner = await outbox.installation(connection)
            await self._bus.ensure_topology(owner.id)
            await connection.execute(_SESSION_LIMITS)
            async with self._bus.answering(subjects.AUDIT_REQUEST, AuditRequest, self._take_request):
                lead = _Lead(self._config, self._bus, connection, owner, self._wake, self._requests)
                await lead.run(self.leading)

    async def _take_request(self, request: AuditRequest) -> Checkpoint:
        answer: asyncio.Future[Checkpoint] = asyncio.get_running_loop().create_future()
        self._requests.append((request, answer))
        self._wake.set()
        try:
            return await answer
        finally:
            self._requests.remove((request, answer))

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


class _Lead:
    """One lead, from taking the lock to losing it."""

    def __init__(
        self,
        config: settings.Settings,
        bus: jetstream.Bus,
        connection: postgres.AsyncConnection,
        owner: outbox.Installation,
        wake: asyncio.Event,
        requests: list[tuple[AuditRequest, asyncio.Future[Checkpoint]]],
    ) -> None:
        self._config = config
        self._bus = bus
        self._connection = connection
        self._owner = owner
        self._wake = wake
        self._requests = requests
        self._publisher = Publisher(config.relay, bus)
        self._audited_at = datetime.now(UTC)
        self._audit_due_s = 0.0
        self._probe_due_s = 0.0

    async def run(self, leading: asyncio.Event) -> None:
        """Audit, then publish what comes, until the database, the bus or another relay says stop."""
        await self._audit()
        log.info("relay leads", extra={"installation": self._owner.id, "epoch": self._owner.epoch})
        leading.set()
        heartbeat = asyncio.create_task(self._beat())
        try:
            while not heartbeat.done():
                with process.cancellable():
                    await self._round()
            heartbeat.result()
        finally:
            leading.clear()
            heartbeat.cancel()

    async def _round(self) -> None:
        if await outbox.waiting(self._connection):
            await self._drain_or_yield()
        elif self._requests:
            await self._answer_requests()
        elif time.monotonic() >= self._audit_due_s:
            await self._audit()
        elif time.monotonic() >= self._probe_due_s:
            await self._probe()
        else:
            await self._sleep()

    async def _sleep(self) -> None:
        """Wait for a notification, at most one poll interval."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.relay.poll_interval_s):
                await self._wake.wait()
        self._wake.clear()

    async def _drain_or_yield(self) -> None:
        """Publish one batch; where a writer was in the way, the next round takes a newer snapshot.

        That is no reason to give up the lead: leading anew reads the whole database and the whole bucket.
        """
        try:
            with postgres.translated(self._config.database):
                await self._drain()
        except postgres.ConflictError as error:
            log.info("batch met a writer and is taken again", extra={"error": str(error)})
            await asyncio.sleep(retrying.jittered_s(0.05))

    async def _drain(self) -> None:
        """Publish one batch. Any error rolls the batch back: its rows stay and are published again."""
        if not self._bus.connected:
            raise errors.UnreachableError("NATS is not connected; the outbox keeps the changes")
        async with outbox.batch(self._connection, self._config.relay.batch_rows) as batch:
            await self._publisher.publish(batch)
        await self._publisher.write_checkpoint(self._owner, self._audited_at)
        log.info(
            "published",
            extra={"accounts": len(batch.changes), "changes": sum(map(len, batch.changes.values()))},
        )

    async def _audit(self) -> Checkpoint:
        """Compare, publish what differs, and write the checkpoint."""
        found = await audit.run(self._connection, self._bus, self._owner)
        self._owner = await audit.open_epoch(self._connection, self._owner, found.newest)
        self._publisher.start_from(found)
        while await outbox.waiting(self._connection):
            await self._drain_or_yield()
        self._audited_at = datetime.now(UTC)
        self._audit_due_s = time.monotonic() + self._config.audit.interval_s
        return await self._publisher.write_checkpoint(self._owner, self._audited_at)

    async def _answer_requests(self) -> None:
        """Audit once for all who ask, after recording the deletions that they ask for."""
        asked = list(self._requests)
        for request, _ in asked:
            if request.installation == self._owner.id:
                await audit.forget(self._connection, self._bus, request.forget, request.requested_by)
        checkpoint = await self._audit()
        for _, answer in asked:
            if not answer.done():
                answer.set_result(checkpoint)

    async def _probe(self) -> None:
        """Make good what was purged, deleted or restored behind our back: streams, buckets, the checkpoint."""
        self._probe_due_s = time.monotonic() + self._config.relay.heartbeat_s
        if not self._bus.connected:
            return
        await self._bus.ensure_topology(self._owner.id)
        if not await self._publisher.is_as_left():
            log.warning("bucket is not as the relay left it: auditing")
            await self._audit()
        elif await self._bus.get(subjects.STATUS_BUCKET, subjects.CHECKPOINT_KEY, Checkpoint) is None:
            await self._publisher.write_checkpoint(self._owner, self._audited_at)

    async def _beat(self) -> None:
        while True:
            status = RelayStatus(
                installation=self._owner.id,
                epoch=self._owner.epoch,
                host=socket.gethostname(),
                pid=os.getpid(),
                at=datetime.now(UTC),
                revision=self._publisher.revision,
                refused=dict(self._publisher.refused),
            )
            try:
                await self._bus.put(subjects.STATUS_BUCKET, subjects.RELAY_KEY, status)
            except jetstream.MissingError:
                raise  # the bucket is gone: leading anew makes it
            except errors.TemporaryError as error:
                log.warning("heartbeat not written", extra={"error": str(error)})
            await asyncio.sleep(self._config.relay.heartbeat_s)
