"""The border to NATS, as far as it can be seen without a server."""

import asyncio
from typing import Any, cast

import pytest

from spur_events import errors, jetstream, settings


class Client:
    """A connection that stands."""

    is_connected = True

    def jetstream(self, **_options: object) -> None:
        return None


def bus() -> jetstream.Bus:
    return jetstream.Bus(cast("Any", Client()), settings.Nats())


async def test_a_cancellation_that_comes_with_the_answer_is_not_lost() -> None:
    """As Python 3.11's `wait_for` does: a partition or a lease would go on for ever."""
    border = bus()
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ask() -> int:
        async with border._asking():
            return await asyncio.wait_for(answer, 30)
        raise AssertionError("unreachable")

    task = asyncio.create_task(ask())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_result(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_lost_connection_ends_the_wait_as_an_error_and_not_as_a_cancellation() -> None:
    border = bus()

    async def ask() -> None:
        async with border._asking():
            await asyncio.Event().wait()

    task = asyncio.create_task(ask())
    await asyncio.sleep(0)
    await border.cut()
    with pytest.raises(errors.UnreachableError, match="connection was lost"):
        await task
    assert not task.cancelling()


async def test_a_connection_that_is_lost_twice_while_a_wait_ends() -> None:
    """The driver would never connect again, if its callback failed."""
    border = bus()
    ending = asyncio.Event()

    async def ask() -> None:
        async with border._asking():
            try:
                await asyncio.Event().wait()
            finally:
                await ending.wait()

    task = asyncio.create_task(ask())
    await asyncio.sleep(0)
    await border.cut()
    while not all(scope.expired() for scope in border._in_flight):
        await asyncio.sleep(0)
    await border.cut()
    ending.set()
    with pytest.raises(errors.UnreachableError, match="connection was lost"):
        await task


async def test_a_time_out_around_a_request_stays_a_time_out() -> None:
    border = bus()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), border._asking():
            await asyncio.Event().wait()
