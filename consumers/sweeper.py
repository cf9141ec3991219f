"""Finds accounts whose status is behind the bucket and asks for another look at them.

This is what makes every other loss harmless: an event that the stream dropped, a consumer that was deleted, a
process that ended with its timers. `run apply` runs it beside the worker; it never writes to the cluster.
"""

import asyncio
import logging
from datetime import UTC, datetime, timedelta

from spur_events import errors, jetstream, retrying, settings
from spur_events.consumers import retries
from spur_events.schemas import subjects
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.events import RecheckReason
from spur_events.schemas.status import AccountStatus

log = logging.getLogger(__name__)

#: A retry that is later than this was lost with the process that set its timer.
_OVERDUE = timedelta(seconds=5)
_ROUND_S = 60


class Sweeper:
    """One look at both buckets, at start and then every sweep interval."""

    def __init__(self, config: settings.Settings, bus: jetstream.Bus) -> None:
        self._interval_s = config.apply.sweep_interval_s
        self._cluster = config.kubernetes.cluster
        self._bus = bus
        self._seen: tuple[int, int] | None = None
        self._open = False

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            try:
                await self.sweep()
            except errors.TemporaryError as error:
                log.warning("sweep did not end", extra={"error": str(error)})
            await asyncio.sleep(retrying.backoff_s(1, self._interval_s, self._interval_s))

    async def sweep(self) -> int:
        """Publish a recheck for every account that is behind; returns how many there were."""
        seen = (
            await self._bus.last_sequence(f"KV_{subjects.ACCOUNTS_BUCKET}"),
            await self._bus.last_sequence(f"KV_{subjects.STATUS_BUCKET}"),
        )
        if seen == self._seen and not self._open:
            return 0  # nothing was written since the last sweep, and that one left nothing behind
        states = await self._bus.read_all(subjects.ACCOUNTS_BUCKET, AccountState)
        prefix = f"{self._cluster}."
        statuses = await self._bus.read_all(subjects.STATUS_BUCKET, AccountStatus, prefix)
        busy = await self._busy()
        behind = 0
        self._open = False
        for slug, state in states.items():
            if not isinstance(state, jetstream.Entry):
                continue
            status = statuses.get(prefix + slug)
            known = status.value if isinstance(status, jetstream.Entry) else None
            if known is not None and known.settled and known.wanted >= state.value.revision:
                continue
            self._open = True
            if subjects.partition(slug, self._bus.partitions) in busy:
                continue  # its event is on its way
            behind += await self._ask(slug, state.value, known)
        self._seen = seen
        if behind:
            log.warning("accounts are behind", extra={"accounts": behind, "cluster": self._cluster})
        return behind

    async def _ask(self, slug: str, state: AccountState, known: AccountStatus | None) -> bool:
        now = datetime.now(UTC)
        if known is not None and known.wanted >= state.revision and known.retry_at is not None:
            if known.retry_at + _OVERDUE > now:
                return False
            await retries.publish(self._bus, known)
            return True
        # One a round, whichever of several processes is first.
        round_number = int(now.timestamp()) // _ROUND_S
        await retries.recheck(
            self._bus,
            cluster=self._cluster,
            installation=state.installation,
            slug=slug,
            reason=RecheckReason.BEHIND,
            message_id=f"behind.{self._cluster}.{slug}.{state.revision}.{round_number}",
        )
        return True

    async def _busy(self) -> set[int]:
        """Return the partitions that have events waiting."""
        busy = set()
        for number in range(self._bus.partitions):
            try:
                if await self._bus.waiting(subjects.durable(self._cluster, number)):
                    busy.add(number)
            except jetstream.MissingError:
                continue
        return busy
