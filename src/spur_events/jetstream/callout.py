"""Plain requests and answers in bytes, for the auth callout: the server asks us, in a protocol of its own.

`consumers.auth` knows what stands in them (https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_callout).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from spur_events.jetstream import bus as buses

SUBJECT = "$SYS.REQ.USER.AUTH"
_QUEUE = "spur-events-auth"
_LAST_ANSWERS_S = 2.0


@asynccontextmanager
async def answering(
    bus: buses.Bus, answer: Callable[[bytes], Awaitable[bytes | None]], at_once: int
) -> AsyncIterator[None]:
    """Answer the server's questions for as long as the block lasts; several processes share them.

    `answer` must not raise; None is no answer. More than `at_once` questions wait for their turn, and the server
    gives up on those that wait too long.
    """
    client: Client = bus._client  # noqa: SLF001 - one package, one border
    slots = asyncio.Semaphore(at_once)
    tasks: set[asyncio.Task[None]] = set()

    async def respond(message: Msg) -> None:
        try:
            # A lost connection is the server's to notice: it asks again when the client tries again.
            with contextlib.suppress(nats.errors.Error):
                data = await answer(message.data)
                if data is not None:
                    await client.publish(message.reply, data)
        finally:
            slots.release()

    async def handle(message: Msg) -> None:
        await slots.acquire()
        task = asyncio.create_task(respond(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async with bus._asking():  # noqa: SLF001
        subscription = await client.subscribe(SUBJECT, queue=_QUEUE, cb=handle)
        await client.flush()
    try:
        yield
    finally:
        if client.is_connected:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_ANSWERS_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
