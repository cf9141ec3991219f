"""A connection from its first byte to its last: opened for sure, and ended for good where the driver does so.

`bus` and `caller` open theirs here. What nats-py 2.16 leaves to do:
- `connect` returns at the server's first line. That may be a ping while the auth callout still thinks; such a
  connection never works.
- A connection that was refused, or that gave no answer, stays open, and one whose TLS failed never finishes to close.
- `close` does not always end an attempt to reconnect: it could go on and connect, with nobody left to use or close it.
- Where TLS is wanted and the server offers none, it goes on in clear text: whoever sits between could ask for that.
- A server that ends a connection with an error ends it for good: the driver does not connect again, even if it was
  told to for ever, and whoever waits for an answer waits for nothing. That is right for credentials that were revoked
  or expired. But nats-server 2.15 also says "maximum subscriptions exceeded" to a connection whose signing key is just
  being rotated, and a limit of the server may be lifted: after any other error the connection is made again.
- A flush writes its ping at once, before what waits to be written: its answer says nothing of what was sent before it.
- The answer to a flush that was given up (cancelled, or timed out) ends the reading of all that comes behind it.
- Where a cancellation comes together with what was waited for, it is lost: the task would go on for ever.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats.errors
from nats.aio import client as aio

from spur_events import errors, process
from spur_events.jetstream import signin
from spur_events.settings import Nats

log = logging.getLogger(__name__)

_CLOSE_S = 2.0
#: Seconds that a try counts at least, so that a server which hangs up at once is not asked in a hot loop.
_HANGS_UP_S = 1.0
#: Errors of the server about who we are and what we may (nats-server's errors.go): not mended by connecting again, or,
#: the permissions, without an end of the connection.
_ABOUT_US = ("auth", "revoked", "expired", "permissions")
# At the end of each TLS connection, for a thing of its own that asyncio's streams do: nobody could act on it.
logging.getLogger("asyncio").addFilter(
    lambda record: "eof_received() has no effect" not in record.getMessage()
)


class Client(aio.Client):
    """The driver's client, less what the module's first lines tell."""

    async def _connect_to_server(self, s: Any) -> None:
        # The driver forgets a connection that failed after it was opened (refused, no answer to the first ping): it
        # would stay open until somebody collects garbage.
        _abort(self._transport)
        await super()._connect_to_server(s)

    async def _attempt_reconnect(self) -> None:
        try:
            await super()._attempt_reconnect()
        except Exception as error:
            # Nobody waits for this task: the connection would be neither there nor ended.
            log.exception("NATS: cannot connect again")
            self._err = error
            self._disconnected_cb = None  # was called; or it is what failed
            self._closing = asyncio.create_task(self._close(aio.Client.CLOSED))

    async def _process_err(self, err_msg: str) -> None:
        said = err_msg.lower()
        if not self.is_connected or any(word in said for word in _ABOUT_US):
            await super()._process_err(err_msg)
            return
        if self._current_server is not None:
            self._current_server.last_attempt = time.monotonic()  # so that it waits before it connects
        await self._process_op_err(nats.errors.Error(f"nats: {err_msg.strip(chr(39))}"))

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        if self.is_connected and self._transport is not None and self._pending:
            self._transport.writelines(self._pending)
            self._pending, self._pending_data_size = [], 0
        await super()._send_ping(future)

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def _connect_command(self) -> bytes:
        # `wss` is TLS before the server says anything.
        server = self._current_server
        over_tls = self._server_info.get("tls_required") or (
            server is not None and server.uri.scheme == "wss"
        )
        if self.options.get("tls") is not None and not over_tls:
            raise nats.errors.Error("nats: the server offers no TLS, and the settings ask for it")
        return super()._connect_command()


def tls(settings: Nats) -> dict[str, ssl.SSLContext]:
    """Return the driver's option that turns TLS on, where a CA or an address like `tls://host` is configured.

    Without a CA those of the operating system are trusted.

    Raises:
        MisconfiguredError: if it cannot be read.
    """
    asked = any(url.strip().lower().startswith("tls:") for url in settings.url.split(","))
    if settings.ca is None and not asked:
        return {}
    try:
        return {"tls": ssl.create_default_context(cafile=str(settings.ca) if settings.ca else None)}
    except (OSError, ssl.SSLError) as error:
        raise errors.MisconfiguredError(
            f"the CA bundle {settings.ca} cannot be used: {error.strerror or error}; check SPUR_EVENTS_NATS_CA"
        ) from error


async def opened(**options: Any) -> tuple[Client, asyncio.Event]:
    """Connect a new client; return it, and what is set when the connection has ended for good.

    A server gives a client less than two seconds to sign in (identity.serverconf). Where one of us was too busy for
    that, it is tried again, if that fits into `connect_timeout`.
    """
    begun_s = time.monotonic()
    while True:
        client, tried_s = Client(), time.monotonic()
        try:
            return client, await connect(client, **options)
        except (nats.errors.Error, OSError) as error:
            hung_up = isinstance(error, ConnectionResetError | BrokenPipeError | nats.errors.UnexpectedEOF)
            if not (hung_up or "authentication timeout" in str(error).lower()):
                raise
            now_s = time.monotonic()
            if now_s - begun_s + max(now_s - tried_s, _HANGS_UP_S) > options["connect_timeout"]:
                raise


async def connect(client: Client, **options: Any) -> asyncio.Event:
    """Connect, and return what is set when the connection has ended for good."""
    ended = asyncio.Event()

    async def end() -> None:
        ended.set()

    try:
        with process.cancellable():
            await client.connect(**{**options, "closed_cb": end})
    except BaseException:
        await discard(client)
        raise
    if not client.is_connected:
        await discard(client)
        raise nats.errors.TimeoutError
    return ended


def refused(settings: Nats, error: Exception) -> errors.SpurEventsError:
    """Return why a connection could not be opened, as an error of our tree with what to check."""
    timed_out = isinstance(error, TimeoutError | nats.errors.TimeoutError)
    text = "no answer in time" if timed_out else str(error) or type(error).__name__
    where = f"NATS at {settings.url}"
    if isinstance(error, ssl.SSLError) or "offers no TLS" in text:
        return errors.MisconfiguredError(
            f"{where} is not trusted: {text}; check that SPUR_EVENTS_NATS_CA is the CA of the"
            " server's certificate, and that SPUR_EVENTS_NATS_URL has a name that is in it"
        )
    if "authorization" in text.lower():
        return errors.MisconfiguredError(
            f"{where} refuses the credentials: {text}; check {signin.hint(settings)}"
        )
    return errors.UnreachableError(
        f"no connection to {where}: {text}; check SPUR_EVENTS_NATS_URL and that the server runs"
    )


async def discard(client: Client) -> None:
    """Close a connection, whatever state it is in."""
    try:
        with process.cancellable():
            await _stop_reconnecting(client)
            if not client.is_connected:
                _abort(client._transport)  # noqa: SLF001
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CLOSE_S):
                    await client.close()
    finally:
        _abort(client._transport)  # noqa: SLF001
    await asyncio.sleep(0)  # asyncio closes it in its next round


async def _stop_reconnecting(client: Client) -> None:
    task = client._reconnection_task  # noqa: SLF001
    while task is not None and not task.done():
        task.cancel()
        # It loses a cancellation that comes at the moment at which it gets connected, and would go on for ever.
        await asyncio.wait({task}, timeout=0.1)


def _abort(transport: Any) -> None:
    for name in ("_io_writer", "_bare_io_writer"):
        writer = getattr(transport, name, None)
        if writer is not None:
            process.abort(writer.transport)


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
