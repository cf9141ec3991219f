"""Cancellation ends what is to be ended, also where a driver swallowed it."""

import asyncio

import pytest

from spur_events import process


async def test_a_swallowed_cancellation_ends_the_task_at_the_next_check() -> None:
    swallowed = asyncio.Event()

    async def work() -> None:
        with process.cancellable():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed.set()  # as asyncio.wait_for does when the result comes at the same moment
        pytest.fail("the task went on")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert swallowed.is_set()


async def test_a_task_that_nobody_cancelled_goes_on() -> None:
    with process.cancellable():
        await asyncio.sleep(0)


async def test_the_first_failure_ends_the_other_parts_and_is_raised_as_it_is() -> None:
    ended = asyncio.Event()

    async def fails() -> None:
        raise LookupError("x")

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(LookupError):
        await process.together(waits(), fails())
    assert ended.is_set()


@pytest.mark.parametrize("turns", range(7))
async def test_a_cancellation_that_comes_with_a_failure_is_not_lost(turns: int) -> None:
    """Who rides out failures in a loop would go on for ever."""
    now = asyncio.Event()

    async def fails() -> None:
        await now.wait()
        raise LookupError("x")

    async def rides_it_out() -> None:
        while True:
            try:
                await process.together(fails(), asyncio.Event().wait())
            except LookupError:
                now.clear()

    task = asyncio.create_task(rides_it_out())
    await asyncio.sleep(0.01)
    now.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=20)
    assert task.cancelled()


async def test_what_the_parts_return_comes_in_their_order() -> None:
    assert await process.together(asyncio.sleep(0.01, "a"), asyncio.sleep(0, 1)) == ("a", 1)
