"""One request, one answer, for a person at a terminal: no streams, no endless reconnecting, and each failure by name.

The commands `kubeconfig` and `credential` use it. "Nobody answers there", "no answer in time" and "you may not ask
that" are different troubles with different exit codes; the NATS server tells the first and the last at once.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client

from spur_events import errors
from spur_events.jetstream import opening, signin
from spur_events.schemas import codec
from spur_events.schemas.accounts import Frozen
from spur_events.settings import Nats

M = TypeVar("M", bound=Frozen)


class NobodyError(errors.SpurEventsError):
    """No service listens on the subject (exit code 1)."""


@asynccontextmanager
async def caller(settings: Nats, name: str, part: str = signin.ADMIN) -> AsyncIterator["Caller"]:
    """Connect as a part, within the configured time; a lost connection is not made again.

    Raises:
        UnreachableError: if no server answers; it names the address.
        MisconfiguredError: if the server refuses the credentials.
    """
    made = Caller(settings)
    options: dict[str, Any] = {
        "servers": settings.url.split(","),
        "name": name,
        "connect_timeout": settings.connect_timeout_s,
        "allow_reconnect": False,
        "max_reconnect_attempts": 1,
        "reconnect_time_wait": 0.1,
        "error_cb": made.told,
    }
    options |= signin.options(settings, part) | opening.tls(settings)
    try:
        client, ended = await opening.opened(**options)
    except (nats.errors.Error, OSError) as error:
        raise opening.refused(settings, error) from error
    try:
        made.use(client, ended)
        yield made
    finally:
        await opening.discard(client)


class Caller:
    """A connection for requests."""

    _client: Client
    _ended: asyncio.Event

    def __init__(self, settings: Nats) -> None:
        self._where = f"NATS at {settings.url}"
        self._forbidden: set[asyncio.Future[None]] = set()

    def use(self, client: Client, ended: asyncio.Event) -> None:
        """Ask over this connection; nothing is answered any more when it has ended."""
        self._client, self._ended = client, ended

    async def told(self, error: Exception) -> None:
        """Take what the server says on the side: that a request may not be published."""
        if "permissions violation for publish" in str(error).lower():
            for waiting in self._forbidden:
                if not waiting.done():
                    waiting.set_result(None)

    async def ask(self, subject: str, model: Frozen, kind: type[M], timeout_s: float, service: str) -> M:
        """Send a request, and return the answer; `service` is what should answer, for messages.

        Raises:
            NobodyError: if no such service runs.
            TimedOutError: if it runs and does not answer in time.
            RefusedError: if we may not ask there.
            UnreachableError: if the connection is lost meanwhile.
            PermanentError: if the answer cannot be read.
        """
        data, headers = codec.encode(model, self._client.max_payload)
        forbidden: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forbidden.add(forbidden)
        request = asyncio.ensure_future(
            self._client.request(subject, data, timeout=timeout_s, headers=headers)
        )
        lost = asyncio.ensure_future(self._ended.wait())
        try:
            waiting: set[asyncio.Future[Any]] = {request, forbidden, lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if lost.done() and not request.done():
                raise errors.UnreachableError(f"{self._where}: the connection was lost; asking again is safe")
            if not request.done():
                raise errors.RefusedError(
                    f"{self._where} does not let you ask on {subject}: everybody may ask for herself only; leave"
                    " --user out, or use an administrator's credentials"
                )
            reply = request.result()
        except nats.errors.NoRespondersError as error:
            raise NobodyError(
                f"{service} is not running: nobody answers on {subject} at {self._where}; ask the administrator to"
                " start it ('spur-events run kubeconfig'), or check --cluster"
            ) from error
        except (TimeoutError, nats.errors.TimeoutError) as error:
            raise errors.TimedOutError(
                f"{service} gave no answer within {timeout_s:g} s; asking again is safe"
            ) from error
        except (nats.errors.Error, OSError) as error:
            raise errors.UnreachableError(
                f"{self._where}: the connection was lost: {error or type(error).__name__}; asking again is safe"
            ) from error
        finally:
            self._forbidden.discard(forbidden)
            forbidden.cancel()
            lost.cancel()
            request.cancel()
            await asyncio.gather(request, lost, return_exceptions=True)
        try:
            return codec.decode(kind, reply.data, reply.headers)
        except codec.CodecError as error:
            raise errors.PermanentError(
                f"the answer of {service} cannot be read ({error}): it is of another version than this command"
            ) from error
