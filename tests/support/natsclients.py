"""Plain NATS clients, as anybody could write them: what the server lets them do, and what it says."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from spur_events.jetstream import opening, signin
from spur_events.local.nats import Nats


class Someone:
    """One connection, and what the server said on the side."""

    def __init__(self, client: Client, said: list[str]) -> None:
        self.client = client
        self._said = said

    async def may_publish(self, subject: str, reply: str = "", data: bytes = b"x") -> bool:
        """Publish, and return whether the server let it."""
        return await self._lets("publish", self.client.publish(subject, data, reply=reply))

    async def may_subscribe(self, subject: str) -> bool:
        """Subscribe, and return whether the server let us."""
        return await self._lets("subscription", self.client.subscribe(subject))

    async def listen(self, subject: str) -> list[Msg]:
        """Subscribe; what comes is in the list."""
        heard: list[Msg] = []

        async def hear(message: Msg) -> None:
            heard.append(message)

        await self.client.subscribe(subject, cb=hear)
        await self.client.flush()
        return heard

    async def _lets(self, what: str, work: Any) -> bool:
        before = len(self._said)
        await work
        # The server answers in order: what it says of this, it has said by then.
        await self.client.flush()
        return not any(what in one for one in self._said[before:])


@contextlib.asynccontextmanager
async def someone(
    server: Nats | str, credentials: Path | None = None, inbox: str = "", **options: Any
) -> AsyncIterator[Someone]:
    """Connect; with a credentials file its own inbox prefix is used, unless another is given."""
    said: list[str] = []

    async def hear(error: Exception) -> None:
        said.append(str(error).lower())

    if credentials is not None:
        options["user_credentials"] = str(credentials)
        inbox = inbox or signin.inbox_prefix(signin.claims(credentials)["name"])
    given = {
        "allow_reconnect": False,
        "connect_timeout": 20,
        "max_reconnect_attempts": 1,
        "inbox_prefix": inbox or "_INBOX",
        **options,
    }
    servers = [server if isinstance(server, str) else server.url]
    client, _ = await opening.opened(servers=servers, error_cb=hear, **given)
    try:
        yield Someone(client, said)
    finally:
        await opening.discard(client)
