"""The next attempt for accounts that could not be settled, as a recheck event when it is due (design rule 20).

The due time stands in the status record. This process's timers are the quick way; the sweeper of any process
publishes the same event, under the same message id, if the process that set the timer is gone.
"""

import asyncio
import logging
from datetime import UTC, datetime

from spur_events import errors, jetstream
from spur_events.schemas import names, subjects
from spur_events.schemas.events import Recheck, RecheckReason
from spur_events.schemas.status import AccountStatus

log = logging.getLogger(__name__)


class Retries:
    """Timers of one process, at most one an account."""

    def __init__(self, bus: jetstream.Bus) -> None:
        self._bus = bus
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def schedule(self, status: AccountStatus) -> None:
        """Set the account's timer to the status's due time."""
        slug = _slug(status)
        if (running := self._tasks.pop(slug, None)) is not None:
            running.cancel()
        task = asyncio.create_task(self._later(status))
        self._tasks[slug] = task
        task.add_done_callback(
            lambda ended: self._tasks.pop(slug) if self._tasks.get(slug) is ended else None
        )

    async def _later(self, status: AccountStatus) -> None:
        if status.retry_at is None:
            return
        await asyncio.sleep(max(0.0, (status.retry_at - datetime.now(UTC)).total_seconds()))
        try:
            await publish(self._bus, status)
        except errors.TemporaryError as error:
            log.warning("retry left to the sweeper", extra={"account": status.name, "error": str(error)})

    def close(self) -> None:
        """Cancel all timers."""
        for task in list(self._tasks.values()):
            task.cancel()


async def publish(bus: jetstream.Bus, status: AccountStatus) -> None:
    """Publish the retry that a status record asks for; a second time is stored as a duplicate."""
    due_ms = 0 if status.retry_at is None else int(status.retry_at.timestamp() * 1000)
    slug = _slug(status)
    await recheck(
        bus,
        cluster=status.cluster,
        installation=status.installation,
        slug=slug,
        reason=RecheckReason.RETRY,
        message_id=f"retry.{status.cluster}.{slug}.{status.wanted}.{status.attempts}.{due_ms}",
    )


def _slug(status: AccountStatus) -> str:
    # Not from the name: of an unexplained namespace the account's name may be unknown.
    return status.namespace.removeprefix(names.NAMESPACE_PREFIX)


async def recheck(
    bus: jetstream.Bus, *, cluster: str, installation: str, slug: str, reason: RecheckReason, message_id: str
) -> int:
    """Ask the one writer of an account to look at it again; returns the event's sequence."""
    return await bus.publish(
        subjects.recheck(cluster, slug, bus.partitions),
        Recheck(installation=installation, slug=slug, reason=reason),
        message_id=message_id,
    )
