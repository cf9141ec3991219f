"""A connection from its first byte to its last: opened for sure, and ended for good where the driver does so.

`bus` and `caller` open theirs here. What nats-py 2.16 leaves to do:
- `connect` returns at the server's first line. That may be a ping while the auth callout still thinks; such a
  connection never works.
- A connection that was refused stays open.
- A server that ends a connection with an error (credentials revoked, session expired) ends it for good: the driver
  does not connect again, even if it was told to for ever, and whoever waits for an answer waits for nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats.errors
from nats.aio.client import Client

from spur_events import errors


async def connect(client: Client, **options: Any) -> asyncio.Event:
    """Connect, and return what is set when the connection has ended for good."""
    ended = asyncio.Event()

    async def end() -> None:
        ended.set()

    try:
        await client.connect(**{**options, "closed_cb": end})
    except BaseException:
        await discard(client)
        raise
    if not client.is_connected:
        await discard(client)
        raise nats.errors.TimeoutError
    return ended


async def discard(client: Client) -> None:
    """Close a connection, whatever state it is in."""
    with contextlib.suppress(Exception):
        await client.close()
    transport: Any = client._transport  # noqa: SLF001 - the driver keeps it open where it was refused
    if transport is not None:
        transport.close()
        with contextlib.suppress(Exception):
            await transport.wait_closed()


@asynccontextmanager
async def until_ended(client: Client, ended: asyncio.Event, where: str) -> AsyncIterator[None]:
    """Run the block; if the server ends the connection for good meanwhile, the block is cancelled.

    Raises:
        MisconfiguredError: then, with what the server said.
    """

    async def watch(scope: asyncio.Timeout) -> None:
        await ended.wait()
        scope.reschedule(asyncio.get_running_loop().time())

    scope = asyncio.timeout(None)
    watcher: asyncio.Task[None] | None = None
    try:
        async with scope:
            watcher = asyncio.create_task(watch(scope))
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise errors.MisconfiguredError(
            f"{where} ended the connection: {client.last_error or 'it was closed'}; check the credentials"
        ) from error
    finally:
        if watcher is not None:
            watcher.cancel()
