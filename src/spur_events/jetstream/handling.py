"""Requests handled side by side, so many at once, and askers in turns: the driver hands out one after the other.

`service` and `callout` use it.
"""

import asyncio
import collections
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)
R = TypeVar("R")

#: Seconds that requests in hand get at the end.
_LAST_ANSWERS_S = 2.0


class _Turns(Generic[R]):
    """Who waits for a turn, and what is in hand."""

    def __init__(
        self, number: int, each: int, waiting: int, respond: Callable[[R], Coroutine[Any, Any, None]]
    ) -> None:
        self._number, self._each, self._waiting = number, each, waiting
        self._respond = respond
        self._queues: dict[str, collections.deque[R]] = {}  # in the order of their turns
        self._in_hand: collections.Counter[str] = collections.Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._too_many: set[str] = set()

    async def take(self, asker: str, request: R) -> None:
        queue = self._queues.setdefault(asker, collections.deque())
        if len(queue) < self._waiting:
            queue.append(request)
            self._start()
            return
        if asker not in self._too_many:
            self._too_many.add(asker)
            extra = {"asker": asker, "waiting": self._waiting}
            log.warning("too many requests at once: some are dropped", extra=extra)
        await asyncio.sleep(0)  # a flood keeps nobody else from running

    def _start(self) -> None:
        while len(self._tasks) < self._number:
            asker = next((one for one in self._queues if self._in_hand[one] < self._each), None)
            if asker is None:
                return
            queue = self._queues.pop(asker)
            task = asyncio.create_task(self._respond(queue.popleft()))
            self._tasks.add(task)
            self._in_hand[asker] += 1
            task.add_done_callback(functools.partial(self._done, asker))
            if queue:
                self._queues[asker] = queue  # behind the others
            else:
                self._too_many.discard(asker)

    def _done(self, asker: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._in_hand[asker] -= 1
        if not self._in_hand[asker]:
            del self._in_hand[asker]
        self._start()

    async def end(self) -> None:
        self._queues.clear()
        last = set(self._tasks)
        if last:
            await asyncio.wait(last, timeout=_LAST_ANSWERS_S)
        for task in last:
            task.cancel()
        await asyncio.gather(*last, return_exceptions=True)


@asynccontextmanager
async def at_once(
    number: int,
    respond: Callable[[R], Coroutine[Any, Any, None]],
    *,
    waiting: int,
    whose: Callable[[R], str] = lambda _request: "",
    each: int | None = None,
) -> AsyncIterator[Callable[[R], Awaitable[None]]]:
    """Yield what takes a request, and returns at once; `number` requests are in hand at a time.

    `whose` says who asks. Askers take turns, and of one at most `each` requests are in hand and `waiting` wait: what
    she sends beyond is dropped, so that nobody can make the others wait. At the end of the block, requests in hand
    are waited for a moment; then they are dropped, as those that wait are.
    """
    turns = _Turns(number, each or number, waiting, respond)

    async def handle(request: R) -> None:
        await turns.take(whose(request), request)

    try:
        yield handle
    finally:
        await turns.end()
