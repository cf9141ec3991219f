"""Long-running parts together in one process: the first failure ends all, a signal ends them in order."""

import asyncio
import signal
from collections.abc import Awaitable, Coroutine
from typing import Any


async def together(*parts: Coroutine[Any, Any, object]) -> None:
    """Run parts until one fails or all return; the failure is raised as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except BaseExceptionGroup as failures:
        raise _first(failures) from failures


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def raise_if_cancelled() -> None:
    """End the current task if it was asked to end and somebody swallowed that.

    Until Python 3.12 `asyncio.wait_for`, which the drivers use, loses a cancellation that comes at the same
    moment as the result. Loops that are to end by cancellation call this once a round.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def until_signal(work: Awaitable[object]) -> None:
    """Run `work` until it ends by itself or SIGTERM or SIGINT asks it to; then cancel it and wait for it."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    asked = False

    def ask() -> None:
        nonlocal asked
        asked = True
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    try:
        await task
    except asyncio.CancelledError:
        if not asked:
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
