"""A request/reply service that can be found, pinged and asked for its statistics (NATS micro, `nats micro ls`).

`consumers.kubeconfig` runs one. The protocol is the client library's
(https://github.com/nats-io/nats-architecture-and-design/blob/main/adr/ADR-32.md); added here: many requests at once
and askers in turns, since the library handles one after the other, and answers to inboxes alone. Whoever may ask could
otherwise name a stream's or bucket's subject as the place for the answer, and have the service write there with its
own rights.
Tried on nats-server 2.15: a request that came in by a service import of another account has a reply subject that
begins with `_R_.`, whatever its sender named.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import nats.errors
import nats.micro
import nats.micro.service
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.micro.request import Request

from spur_events.jetstream import bus as buses
from spur_events.jetstream import handling
from spur_events.schemas import codec
from spur_events.schemas.accounts import Frozen

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Frozen)

#: What the reply subjects of our own clients begin with (signin.inbox_prefix), and those of a service import.
INBOXES = ("_INBOX_", "_R_.")
_MAX_REQUEST_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A reply; with a status and a word for it where it is a refusal, for clients that know only the protocol."""

    reply: Frozen
    status: int = 200
    word: str = ""


@dataclass(frozen=True, kw_only=True)
class Service(Generic[M]):
    """What is offered: `answer` gets the last token of the request's subject, and the request or why it is none.

    It must not raise. `stats` returns numbers for whoever asks for statistics.
    """

    name: str
    endpoint: str
    version: str
    description: str
    metadata: Mapping[str, str]
    subject: str
    kind: type[M]
    answer: Callable[[str, M | codec.CodecError], Awaitable[Answer]]
    stats: Callable[[], dict[str, int]]
    #: Requests in hand at a time; of one asker (the last token of the subject), in hand and waiting for a turn.
    at_once: int = 32
    each: int = 8
    waiting: int = 256


@asynccontextmanager
async def serving(bus: buses.Bus, service: Service[M]) -> AsyncIterator[None]:
    """Answer requests for as long as the block lasts; several processes share them (a queue group)."""
    client: Client = bus._client  # noqa: SLF001 - one package, one border

    async def respond(request: Request) -> None:
        # The connection may be lost by now: whoever asked asks again.
        with contextlib.suppress(nats.errors.Error):
            answer = await service.answer(_asker(request), _decoded(service, request))
            data, headers = codec.encode(answer.reply, client.max_payload)
            if answer.word:
                await request.respond_error(str(answer.status), answer.word, data, headers)
            else:
                await request.respond(data, headers)

    config = nats.micro.service.ServiceConfig(
        name=service.name,
        version=service.version,
        description=service.description,
        metadata=dict(service.metadata),
        stats_handler=lambda _endpoint: service.stats(),
    )
    async with handling.at_once(
        service.at_once, respond, whose=_asker, each=service.each, waiting=service.waiting
    ) as handle:
        inboxes = _InboxesOnly(client)
        try:
            async with bus._asking():  # noqa: SLF001
                running = await nats.micro.add_service(inboxes, config)  # type: ignore[arg-type]
                await running.add_endpoint(name=service.endpoint, subject=service.subject, handler=handle)
                await client.flush()
                bus.check_permitted()
            try:
                yield
            finally:
                if client.is_connected:
                    with contextlib.suppress(nats.errors.Error):
                        await running.stop()
        finally:
            for subscription in inboxes.subscriptions:  # also those of a start that was cut off
                await buses.unsubscribe(subscription)


def _asker(request: Request) -> str:
    return str(request.subject.rpartition(".")[2])


def _decoded(service: Service[M], request: Request) -> M | codec.CodecError:
    if len(request.data) > _MAX_REQUEST_BYTES or codec.ENCODING_HEADER in (request.headers or {}):
        # A compressed one could fill our memory, and no request of ours is so large.
        return codec.CodecError(f"a request has at most {_MAX_REQUEST_BYTES} bytes, not compressed")
    try:
        return codec.decode(service.kind, request.data, request.headers)
    except codec.CodecError as error:
        return error


class _InboxesOnly:
    """A connection as the library sees it: what does not ask for an answer in an inbox never reaches it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.subscriptions: list[Subscription] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def subscribe(self, subject: str, *, cb: Callable[[Msg], Awaitable[None]], queue: str = "") -> Any:
        async def checked(message: Msg) -> None:
            if message.reply.startswith(INBOXES):
                await cb(message)
            else:
                log.warning("no inbox", extra={"subject": message.subject, "reply": message.reply})

        made = await self._client.subscribe(subject, queue=queue, cb=checked)
        self.subscriptions.append(made)
        return made
