"""The right to write for an account: as long as the server hands its event to nobody else.

The lease ends a little before the server's ack wait does, measured on the monotonic clock from before the
event was asked for. It is checked right before every write; long work renews it. The clock also counts while
the machine sleeps: a suspended virtual machine must not wake up with a lease.
"""

import asyncio
import time
from collections.abc import Callable

from spur_events import errors, jetstream


def now_s() -> float:
    """Return seconds on the clock of all leases of this machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LostError(errors.TemporaryError):
    """The event may have been handed to another worker meanwhile: stop writing, answer nothing."""


class Lease:
    """One event's lease."""

    def __init__(
        self,
        message: jetstream.Message,
        *,
        asked_at_s: float,
        ack_wait_s: float,
        request_timeout_s: float,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._message = message
        self._ack_wait_s = ack_wait_s
        # A write that is sent at the last moment must have ended before another worker may begin.
        self._margin_s = min(request_timeout_s, ack_wait_s / 2)
        self._until_s = asked_at_s + ack_wait_s
        self._clock = clock
        self._ended = False

    def check(self) -> None:
        """Return if a write may be sent now.

        Raises:
            LostError: if the lease is over.
        """
        if self._ended or self._clock() >= self._until_s - self._margin_s:
            raise LostError("the event was held longer than its ack wait; another worker may have it")

    def end(self) -> None:
        """Give the lease up: nothing may be written any more, and `keep` returns.

        Cancelling `keep` alone would not do: a renewal that swallowed the cancellation would hold the event,
        and its partition with it, for as long as this process lives.
        """
        self._ended = True

    async def keep(self) -> None:
        """Renew until the lease ends or this is cancelled. A renewal counts only when the server confirmed it."""
        while True:
            await asyncio.sleep(self._ack_wait_s / 4)
            asked_at_s = self._clock()
            if self._ended or asked_at_s >= self._until_s:
                return
            try:
                await self._message.working(self._ack_wait_s / 4)
            except errors.TemporaryError:
                continue
            self._until_s = asked_at_s + self._ack_wait_s
