"""The right to write, on a clock that the test moves."""

import asyncio
import contextlib
from typing import cast

import pytest

from spur_events import errors, jetstream
from spur_events.consumers import lease


class Clock:
    """A monotonic clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Message:
    """A message whose renewals succeed, fail, or take (fake) time."""

    def __init__(self, clock: Clock, *, takes_s: float = 0.0, fails: bool = False) -> None:
        self.renewals = 0
        self._clock, self._takes_s, self._fails = clock, takes_s, fails

    async def working(self, _timeout_s: float) -> None:
        self.renewals += 1
        self._clock.now_s += self._takes_s
        if self._fails:
            raise errors.UnreachableError("NATS is away")


def made(clock: Clock, message: Message, *, ack_wait_s: float = 30.0, timeout_s: float = 10.0) -> lease.Lease:
    return lease.Lease(
        cast("jetstream.Message", message),
        asked_at_s=clock.now_s,
        ack_wait_s=ack_wait_s,
        request_timeout_s=timeout_s,
        clock=clock,
    )


@pytest.mark.parametrize(
    ("held_s", "timeout_s", "lost"),
    [(0.0, 10.0, False), (19.9, 10.0, False), (20.0, 10.0, True), (14.9, 25.0, False), (15.0, 25.0, True)],
)
def test_the_lease_ends_one_request_before_the_ack_wait_but_lasts_half_of_it(
    held_s: float, timeout_s: float, lost: bool
) -> None:
    clock = Clock()
    held = made(clock, Message(clock), timeout_s=timeout_s)
    clock.now_s += held_s
    with pytest.raises(lease.LostError) if lost else contextlib.nullcontext():
        held.check()


async def renewed(held: lease.Lease, message: Message) -> None:
    """Let `keep` renew once."""
    keeper = asyncio.create_task(held.keep())
    async with asyncio.timeout(30):
        while not message.renewals:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    keeper.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeper


async def test_a_renewal_counts_from_before_it_was_asked_for() -> None:
    clock = Clock()
    message = Message(clock, takes_s=0.01)
    held = made(clock, message, ack_wait_s=0.04, timeout_s=0.01)
    clock.now_s += 0.02
    await renewed(held, message)
    clock.now_s += 0.0199  # 0.0299 since it was asked for; the first lease ended long ago
    held.check()
    clock.now_s += 0.001
    with pytest.raises(lease.LostError):
        held.check()


async def test_a_renewal_that_was_not_confirmed_does_not_count() -> None:
    clock = Clock()
    message = Message(clock, fails=True)
    held = made(clock, message, ack_wait_s=0.04, timeout_s=0.01)
    clock.now_s += 0.02
    await renewed(held, message)
    clock.now_s += 0.01
    with pytest.raises(lease.LostError):
        held.check()


async def test_an_expired_lease_is_not_renewed() -> None:
    """Else a worker that was frozen would take the event back from the one that has it now."""
    clock = Clock()
    message = Message(clock)
    held = made(clock, message, ack_wait_s=0.04, timeout_s=0.01)
    clock.now_s += 0.04
    async with asyncio.timeout(30):
        await held.keep()
    assert message.renewals == 0
    with pytest.raises(lease.LostError):
        held.check()


async def test_a_lease_that_was_given_up_is_neither_renewed_nor_good_for_writing() -> None:
    """Even where the renewal in flight swallowed its cancellation, as Python 3.11's `wait_for` can."""
    clock = Clock()
    message = Message(clock)
    held = made(clock, message, ack_wait_s=0.04, timeout_s=0.01)
    held.end()
    async with asyncio.timeout(30):
        await held.keep()
    assert message.renewals == 0
    with pytest.raises(lease.LostError):
        held.check()
