"""Requests handled side by side, so many at once: the driver itself hands out one after the other.

`service` and `callout` use it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

R = TypeVar("R")

#: Seconds that requests in hand get at the end.
_LAST_ANSWERS_S = 2.0


@asynccontextmanager
async def at_once(
    number: int, respond: Callable[[R], Awaitable[None]]
) -> AsyncIterator[Callable[[R], Awaitable[None]]]:
    """Yield what takes a request and returns as soon as one of `number` places is free for it.

    At the end of the block, requests in hand are waited for a moment, then dropped.
    """
    slots = asyncio.Semaphore(number)
    tasks: set[asyncio.Task[None]] = set()

    async def work(request: R) -> None:
        try:
            await respond(request)
        finally:
            slots.release()

    async def handle(request: R) -> None:
        await slots.acquire()
        task = asyncio.create_task(work(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    try:
        yield handle
    finally:
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_ANSWERS_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
