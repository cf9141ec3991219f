"""Several things at once: the first failure ends all, a signal ends them in order."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Coroutine, Iterator
from typing import Any, TypeVar, overload

T = TypeVar("T")
U = TypeVar("U")


@overload
async def together(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U], /) -> tuple[T, U]: ...


@overload
async def together(*parts: Coroutine[Any, Any, T]) -> tuple[T, ...]: ...


async def together(*parts: Coroutine[Any, Any, Any]) -> tuple[Any, ...]:
    """Run parts until one fails or all return, and return what they returned.

    The first failure is raised when the others have ended: they were cancelled. `asyncio.gather` lets them go on,
    with a connection that may be closed meanwhile, and Python 3.11's TaskGroup loses a cancellation that comes
    together with a failure.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    if tasks:
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in tasks if task.done() and not task.cancelled() and task.exception()]
        finally:
            await _end(tasks)
        for task in failed:
            task.result()
    return tuple(task.result() for task in tasks)


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended; a cancellation meanwhile is raised then."""
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while left := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # only the first failure is raised
    if cancelled is not None:
        raise cancelled


@contextlib.contextmanager
def cancellable() -> Iterator[None]:
    """Raise a cancellation that came during the block and that a driver swallowed.

    In Python 3.11 `asyncio.wait_for`, which the drivers wait with, returns the answer and drops the
    cancellation where both come at once (https://github.com/python/cpython/issues/86296): a part that was told
    to end would go on for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
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


def abort(transport: asyncio.WriteTransport) -> None:
    """End a connection at once, whatever state it is in."""
    # One over TLS that was closed twice has forgotten its protocol, which `abort` of Python 3.11.2 does not expect.
    with contextlib.suppress(AttributeError):
        transport.abort()
