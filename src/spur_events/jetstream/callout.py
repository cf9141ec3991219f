"""Plain requests and answers in bytes, for the auth callout: the server asks us, in a protocol of its own.

`consumers.auth` knows what stands in them (https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_callout).
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from spur_events.jetstream import bus as buses
from spur_events.jetstream import handling

SUBJECT = "$SYS.REQ.USER.AUTH"
_QUEUE = "spur-events-auth"
#: Questions that wait; the server takes an answer that comes within some seconds.
_WAITING = 1024


@asynccontextmanager
async def answering(
    bus: buses.Bus, answer: Callable[[bytes], Awaitable[bytes | None]], at_once: int
) -> AsyncIterator[None]:
    """Answer the server's questions for as long as the block lasts; several processes share them.

    `answer` must not raise; None is no answer. More than `at_once` questions wait for their turn, and the server
    gives up on those that wait too long; far too many are dropped.
    """
    client: Client = bus._client  # noqa: SLF001 - one package, one border

    async def respond(message: Msg) -> None:
        # A lost connection is the server's to notice: it asks again when the client tries again.
        with contextlib.suppress(nats.errors.Error):
            data = await answer(message.data)
            if data is not None:
                await client.publish(message.reply, data)

    async with handling.at_once(at_once, respond, waiting=_WAITING) as handle:
        async with bus._asking():  # noqa: SLF001
            subscription = await client.subscribe(SUBJECT, queue=_QUEUE, cb=handle)
        try:
            async with bus._asking():  # noqa: SLF001
                await client.flush()
                bus.check_permitted()
            yield
        finally:
            await buses.unsubscribe(subscription)
