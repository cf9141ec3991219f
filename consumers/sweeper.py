"""Finds accounts whose status is behind the bucket and asks for another look at them.

This is what makes every other loss harmless: an event that the stream dropped, a consumer that was deleted, a
process that ended with its timers. `run apply` runs it beside the worker; it never writes to the cluster.
"""

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from spur_events import errors, jetstream, retrying, settings
from spur_events.consumers import retries
from spur_events.schemas import subjects
from spur_events.schemas.accounts import AccountState, Revision
from spur_events.schemas.events import RecheckReason
from spur_events.schemas.status import AccountStatus

log = logging.getLogger(__name__)

#: A retry that is later than this was lost with the process that set its timer.
_OVERDUE = timedelta(seconds=5)
_ROUND_S = 60


class _Wanted(NamedTuple):
    """What is kept of a state: ten thousand of them are looked at."""

    installation: str
    revision: Revision


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
            await asyncio.sleep(retrying.jittered_s(self._interval_s))

    async def sweep(self) -> int:
        """Publish a recheck for every account that is behind; returns how many there were."""
        seen = (
            await self._bus.last_sequence(f"KV_{subjects.ACCOUNTS_BUCKET}"),
            await self._bus.last_sequence(f"KV_{subjects.STATUS_BUCKET}"),
        )
        if seen == self._seen and not self._open:
            return 0  # nothing was written since the last sweep, and that one left nothing behind
        left = await self._unsettled()
        busy = await self._busy() if left else set()
        behind = 0
        self._open = bool(left)
        for slug, (wanted, known) in left.items():
            if subjects.partition(slug, self._bus.partitions) in busy:
                continue  # its event is on its way
            behind += await self._ask(slug, wanted, known)
        self._seen = seen
        if behind:
            log.warning("accounts are behind", extra={"accounts": behind, "cluster": self._cluster})
        return behind

    async def _unsettled(self) -> dict[str, tuple[_Wanted, AccountStatus | None]]:
        """Return the accounts that are not as they should be, with their status; the others are not kept."""
        wanted: dict[str, _Wanted] = {}
        async for slug, state in self._bus.each(subjects.ACCOUNTS_BUCKET, AccountState):
            if isinstance(state, jetstream.Entry):
                wanted[slug] = _Wanted(state.value.installation, state.value.revision)
        left: dict[str, tuple[_Wanted, AccountStatus | None]] = {
            slug: (one, None) for slug, one in wanted.items()
        }
        prefix = f"{self._cluster}."
        async for key, status in self._bus.each(subjects.STATUS_BUCKET, AccountStatus, prefix):
            slug = key.removeprefix(prefix)
            if slug not in wanted or not isinstance(status, jetstream.Entry):
                continue
            if status.value.settled and status.value.wanted >= wanted[slug].revision:
                del left[slug]
            else:
                left[slug] = (wanted[slug], status.value)
        return left

    async def _ask(self, slug: str, state: _Wanted, known: AccountStatus | None) -> bool:
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
