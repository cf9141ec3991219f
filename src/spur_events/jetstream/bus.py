"""The connection, and what can be done over it: models go in, models come out, driver errors leave in our tree."""

import asyncio
import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext, api

from spur_events import errors, process
from spur_events.jetstream import opening, signin, topology
from spur_events.schemas import codec, subjects
from spur_events.schemas.accounts import Frozen
from spur_events.settings import Nats

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Frozen)

REASON_HEADER = "Spur-Reason"
ORIGIN_HEADER = "Spur-Origin"
TRUNCATED_HEADER = "Spur-Truncated"

_WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
#: Seconds that one request to the server may take; also how long a lost acknowledgement goes unnoticed.
REQUEST_TIMEOUT_S = 5.0
_READ_BATCH = 256


class StaleError(errors.TemporaryError):
    """A conditional write lost: somebody else wrote the key since it was read."""


class MissingError(errors.TemporaryError):
    """A stream, bucket or consumer does not exist (yet, or any more)."""


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[M]):
    """A value of a bucket and the bucket's revision of it (for conditional writes)."""

    value: M
    sequence: int


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A value of a bucket that cannot be read, and why."""

    problem: str
    sequence: int


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What tells a stream from one that was written to, purged, restored or made anew since."""

    messages: int
    last: int
    made_at: datetime | None


@asynccontextmanager
async def connect(settings: Nats, name: str, part: str = signin.ADMIN) -> AsyncIterator["Bus"]:
    """Connect as a part, and reconnect for ever afterwards; the first connection must succeed.

    Raises:
        UnreachableError: if no server answers in time; it names the address.
        MisconfiguredError: if the server refuses the credentials.
    """
    client = opening.Client()
    bus = Bus(client, settings)
    options: dict[str, Any] = {
        "servers": settings.url.split(","),
        "name": name,
        "connect_timeout": settings.connect_timeout_s,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": 0.25,
        "ping_interval": 5,
        "max_outstanding_pings": 2,
        "error_cb": bus.told,
        "disconnected_cb": bus.cut,
        # A request that cannot be sent now must fail now: a stale write sent after a reconnect helps nobody.
        "pending_size": 0,
    }
    options |= signin.options(settings, part) | opening.tls(settings)
    where = f"NATS at {settings.url}"
    # The driver tries for ever; one round over the servers is enough to tell a person.
    first = {**options, "max_reconnect_attempts": 1, "allow_reconnect": False}
    try:
        probe, _ = await opening.opened(**{**first, "disconnected_cb": None, "error_cb": _ignore})
        await opening.discard(probe)
        ended = await opening.connect(client, **options)
    except (nats.errors.Error, OSError) as error:
        raise opening.refused(settings, error) from error
    try:
        async with opening.until_ended(client, ended, where):
            yield bus
    finally:
        await opening.discard(client)


async def _ignore(_error: Exception) -> None:
    """Swallow what the driver reports on the side: every failed request raises at its caller as well."""


class Bus:
    """Streams and buckets over one connection."""

    def __init__(self, client: Client, settings: Nats) -> None:
        self._client = client
        self._settings = settings
        self._js: JetStreamContext = client.jetstream(timeout=REQUEST_TIMEOUT_S)
        self._in_flight: set[asyncio.Timeout] = set()
        self._refusal, self._refused_at = "", -math.inf

    @property
    def connected(self) -> bool:
        """Whether the connection is up at this moment."""
        return self._client.is_connected

    @property
    def partitions(self) -> int:
        """The number of partitions, as configured; `ensure_topology` and `check_topology` compare it."""
        return self._settings.partitions

    async def ensure_topology(self, installation: str) -> None:
        """Create the streams and buckets that are missing, and bring the settings of the others up to date.

        Raises:
            MisconfiguredError: naming the setting that cannot be changed in place, or a stream that belongs
                to another installation or has another number of partitions.
        """
        # The event stream last: a part that finds it (check_topology) finds the buckets as well.
        for declared in sorted(
            topology.declared()["streams"], key=lambda one: bool(one["name"] == subjects.EVENTS_STREAM)
        ):
            wanted = {**declared, "num_replicas": self._settings.replicas}
            if wanted["name"] == subjects.EVENTS_STREAM:
                wanted["metadata"] = {
                    subjects.PARTITIONS_METADATA: str(self._settings.partitions),
                    subjects.INSTALLATION_METADATA: installation,
                }
            async with self._asking():
                await topology.ensure_stream(self._js, wanted)

    async def check_topology(self) -> str:
        """Return the installation that the streams belong to.

        Raises:
            MissingError: if the relay has not made the streams yet.
            MisconfiguredError: if the number of partitions differs.
        """
        async with self._asking():
            info = await self._js.stream_info(subjects.EVENTS_STREAM)
        return topology.check_metadata(info.config.metadata or {}, str(self.partitions), None)

    async def publish(
        self, subject: str, model: Frozen, *, message_id: str, headers: Mapping[str, str] | None = None
    ) -> int:
        """Publish to a stream and wait for the acknowledgement; returns the message's sequence.

        The same `message_id` within the stream's duplicate window is stored once.
        """
        data, own = codec.encode(model, self._client.max_payload)
        async with self._asking():
            ack = await self._js.publish(
                subject, data, headers={**(headers or {}), **own, api.Header.MSG_ID: message_id}
            )
        return int(ack.seq)

    async def park(self, message: "Message", subject: str, detail: str) -> None:
        """Store a copy of an event as it is, with where it came from and why, and wait for the acknowledgement."""
        room = self._client.max_payload - 8192
        headers = {
            **message.headers,
            REASON_HEADER: " ".join(detail.split())[:1024],
            ORIGIN_HEADER: message.subject,
            api.Header.MSG_ID: f"{subjects.EVENTS_STREAM}.{message.sequence}",
        }
        if len(message.data) > room:
            headers[TRUNCATED_HEADER] = str(len(message.data))
        async with self._asking():
            await self._js.publish(subject, message.data[: max(room, 0)], headers=headers)

    async def get(self, bucket: str, key: str, kind: type[M], *, newest: bool = False) -> Entry[M] | None:
        """Return the value of a key, or None where there is none.

        Any replica of the accounts may answer and be a moment behind; with `newest` the bucket's leader does.

        Raises:
            CodecError: if the value is not what it should be.
        """
        # A direct answer is the message as it is, wherever the asker wants it: also in another bucket. So nobody
        # may ask for one where he may write himself (deploy/nats/accounts.json), and only the relay writes accounts.
        direct = not newest and bucket == subjects.ACCOUNTS_BUCKET
        async with self._asking():
            try:
                raw = await self._js.get_msg(f"KV_{bucket}", subject=f"$KV.{bucket}.{key}", direct=direct)
            except nats.js.errors.NotFoundError as error:
                if isinstance(error, nats.js.errors.APIError) and error.err_code == _STREAM_NOT_FOUND:
                    raise
                return None
        if _is_marker(raw.headers):
            return None
        return Entry(value=_decoded(kind, key, raw.data or b"", raw.headers), sequence=int(raw.seq or 0))

    async def put(self, bucket: str, key: str, model: Frozen, *, last: int | None = None) -> int:
        """Write a key and return the bucket's new revision of it.

        With `last` only if the key's revision still is `last` (0: there is none).

        Raises:
            StaleError: if it is not.
            TooLargeError: if the value exceeds the server's max payload even when compressed.
        """
        data, headers = codec.encode(model, self._client.max_payload)
        try:
            return await self._put(bucket, key, data, headers, last)
        except StaleError:
            marker = await self._deletion_marker(bucket, key) if last == 0 else 0
            if not marker:
                raise
            # A deleted key has a marker as its last message: to a reader there is none, as `last` says.
            return await self._put(bucket, key, data, headers, marker)

    async def _put(self, bucket: str, key: str, data: bytes, headers: codec.Headers, last: int | None) -> int:
        if last is not None:
            headers = {**headers, api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(last)}
        async with self._asking():
            ack = await self._js.publish(f"$KV.{bucket}.{key}", data, headers=headers)
        return int(ack.seq)

    async def _deletion_marker(self, bucket: str, key: str) -> int:
        """Return the sequence of a key's deletion marker, or 0 where its last message is none."""
        async with self._asking():
            raw = await self._js.get_msg(f"KV_{bucket}", subject=f"$KV.{bucket}.{key}")
        return int(raw.seq or 0) if _is_marker(raw.headers) else 0

    async def delete(self, bucket: str, key: str, *, last: int) -> None:
        """Delete a key if its revision still is `last`."""
        async with self._asking():
            await self._js.publish(
                f"$KV.{bucket}.{key}",
                b"",
                headers={"KV-Operation": "DEL", api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(last)},
            )

    async def read_all(self, bucket: str, kind: type[M], prefix: str = "") -> dict[str, Entry[M] | Damaged]:
        """Return every value of a bucket whose key begins with `prefix`."""
        return {key: entry async for key, entry in self.each(bucket, kind, prefix)}

    async def each(
        self, bucket: str, kind: type[M], prefix: str = ""
    ) -> AsyncIterator[tuple[str, Entry[M] | Damaged]]:
        """Yield every key of a bucket that begins with `prefix`, with its value: never all of them in memory.

        No key that is there all the time is missed, however often it is written meanwhile: absence means
        something to our callers.
        """
        stream, start = f"KV_{bucket}", f"$KV.{bucket}."
        before = await self.last_sequence(stream)
        seen = set()
        async for message in self._replay(stream, f"{start}{prefix}>", before, newest_only=True):
            seen.add(message.subject)
            sequence = message.metadata.sequence.stream
            key = message.subject.removeprefix(start)
            if (entry := _entry(kind, key, message.data, message.headers, sequence)) is not None:
                yield key, entry
        async with self._asking():
            info = await self._js.stream_info(stream, subjects_filter=f"{start}{prefix}>")
        if info.state.last_seq == before:
            return
        for subject in sorted(set(info.state.subjects or {}) - seen):  # replaced while we read
            async with self._asking():
                raw = await self._js.get_msg(stream, subject=subject)
            key = subject.removeprefix(start)
            if (entry := _entry(kind, key, raw.data or b"", raw.headers, int(raw.seq or 0))) is not None:
                yield key, entry

    async def since(
        self, bucket: str, kind: type[M], sequence: int
    ) -> AsyncIterator[tuple[str, int, Entry[M] | Damaged | None]]:
        """Yield what was written to a bucket after a sequence: key, sequence and value, None for a deletion.

        Ends when there is nothing more, so what is written meanwhile is there as well; with 0 the bucket is read
        whole.
        """
        stream, start = f"KV_{bucket}", f"$KV.{bucket}."
        async for message in self._replay(
            stream, f"{start}>", sys.maxsize, newest_only=False, after=sequence
        ):
            at = message.metadata.sequence.stream
            key = message.subject.removeprefix(start)
            yield key, at, _entry(kind, key, message.data, message.headers, at)

    async def keys(self, bucket: str, pattern: str) -> set[str]:
        """Return the keys of a bucket that match a pattern (`*` for one token), deleted ones included."""
        start = f"$KV.{bucket}."
        async with self._asking():
            info = await self._js.stream_info(f"KV_{bucket}", subjects_filter=f"{start}{pattern}")
        return {subject.removeprefix(start) for subject in info.state.subjects or {}}

    async def read_stream(self, stream: str, subject: str, kind: type[M]) -> list[M]:
        """Return all readable messages of one type that a stream holds on a subject, oldest first."""
        found = []
        last = await self.last_sequence(stream)
        async for message in self._replay(stream, subject, last, newest_only=False):
            with contextlib.suppress(codec.CodecError):
                found.append(codec.decode(kind, message.data, message.headers))
        return found

    async def _replay(
        self, stream: str, subject: str, last: int, *, newest_only: bool, after: int = 0
    ) -> AsyncIterator[Msg]:
        """Read what a stream holds behind `after` and up to sequence `last`, through one short-lived consumer."""
        policy = api.DeliverPolicy.LAST_PER_SUBJECT if newest_only else api.DeliverPolicy.ALL
        if after:
            policy = api.DeliverPolicy.BY_START_SEQUENCE
        async with self._asking():
            subscription = await self._js.pull_subscribe(
                subject,
                stream=stream,
                config=api.ConsumerConfig(
                    deliver_policy=policy,
                    opt_start_seq=after + 1 if after else None,
                    ack_policy=api.AckPolicy.NONE,
                    inactive_threshold=30.0,
                    mem_storage=True,
                    num_replicas=1,
                ),
            )
        try:
            # Not one wait around all: whoever reads may wait for something else between two messages.
            async with self._asking():
                pending = int((await subscription.consumer_info()).num_pending or 0)
            while pending > 0:
                async with self._asking():
                    messages = await subscription.fetch(min(pending, _READ_BATCH), timeout=REQUEST_TIMEOUT_S)
                for message in messages:
                    if message.metadata.sequence.stream > last:
                        return
                    yield message
                # By the server's count: what was replaced or purged meanwhile does not come any more.
                pending = int(messages[-1].metadata.num_pending or 0)
        finally:
            await unsubscribe(subscription)

    async def extent(self, stream: str) -> tuple[int, int]:
        """Return how many messages a stream holds, and the sequence of the newest.

        They tell a stream that was purged, restored or made anew from the one that its writer knows.
        """
        found = await self.mark(stream)
        return found.messages, found.last

    async def mark(self, stream: str) -> Mark:
        """Return how far a stream is, and which one it is."""
        async with self._asking():
            info = await self._js.stream_info(stream)
        return Mark(messages=int(info.state.messages), last=int(info.state.last_seq), made_at=info.created)

    async def last_sequence(self, stream: str) -> int:
        """Return the sequence of the newest message of a stream (of a bucket: stream `KV_<bucket>`)."""
        async with self._asking():
            return int((await self._js.stream_info(stream)).state.last_seq)

    async def listeners(self, consumer: str) -> int:
        """Return how many processes wait for events of a durable consumer at this moment.

        Raises:
            MissingError: if the consumer does not exist.
        """
        async with self._asking():
            info = await self._js.consumer_info(subjects.EVENTS_STREAM, consumer)
        return int(info.num_waiting or 0) + int(info.num_ack_pending or 0)

    async def ensure_consumer(self, name: str, filters: list[str], ack_wait_s: float) -> None:
        """Create a durable pull consumer of the event stream, or bring its settings up to date.

        Raises:
            MisconfiguredError: naming the setting that cannot be changed in place.
        """
        async with self._asking():
            await topology.ensure_consumer(self._js, name, filters, ack_wait_s)

    async def waiting(self, consumer: str) -> int:
        """Return how many events a durable consumer has not handed out or not got an answer to.

        Raises:
            MissingError: if the consumer does not exist.
        """
        async with self._asking():
            info = await self._js.consumer_info(subjects.EVENTS_STREAM, consumer)
        return int(info.num_pending or 0) + int(info.num_ack_pending or 0)

    @asynccontextmanager
    async def pull(self, consumer: str) -> AsyncIterator["Pull"]:
        """Take events from a durable consumer, one at a time."""
        pull = Pull(self, consumer)
        try:
            yield pull
        finally:
            await pull.end()

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Send a request and return the reply's bytes."""
        async with self._asking():
            reply = await self._client.request(subject, data, timeout=timeout_s)
        return bytes(reply.data)

    async def ask(self, subject: str, model: Frozen, kind: type[M], timeout_s: float) -> M:
        """Send a request to whoever answers there, and return the answer.

        Raises:
            MissingError: if nobody listens.
            UnreachableError: if nobody answered in time.
            TemporaryError: if it could not be done now.
        """
        data, headers = codec.encode(model, self._client.max_payload)
        async with self._asking():
            reply = await self._client.request(subject, data, timeout=timeout_s, headers=headers)
        if reply.headers and REASON_HEADER in reply.headers:
            raise errors.TemporaryError(reply.headers[REASON_HEADER])
        return codec.decode(kind, reply.data, reply.headers)

    @asynccontextmanager
    async def answering(
        self, subject: str, kind: type[M], answer: Callable[[M], Awaitable[Frozen]], *, queue: str = ""
    ) -> AsyncIterator[None]:
        """Answer requests for as long as the block lasts; what cannot be read is ignored.

        Of all that answer in the same `queue`, one gets a request; without one, each.

        At its end what is in hand is cancelled: whoever asked is told, and does not wait for nothing.
        """
        answering: set[asyncio.Task[None]] = set()

        async def respond(message: Msg) -> None:
            with contextlib.suppress(codec.CodecError, nats.errors.Error):
                try:
                    reply = await answer(codec.decode(kind, message.data, message.headers))
                    data, headers = codec.encode(reply, self._client.max_payload)
                except errors.TemporaryError as error:
                    data, headers = b"", {REASON_HEADER: " ".join(str(error).split())}
                except asyncio.CancelledError:
                    data, headers = b"", {REASON_HEADER: _ENDING}
                await self._client.publish(message.reply, data, headers=headers)

        async def handle(message: Msg) -> None:
            if not message.reply.startswith(signin.INBOX):
                # The answer would go there with our rights: into a bucket, for example.
                log.warning("no inbox", extra={"subject": message.subject, "reply": message.reply})
                return
            task = asyncio.create_task(respond(message))
            answering.add(task)
            task.add_done_callback(answering.discard)

        async with self._asking():
            subscription = await self._client.subscribe(subject, queue=queue, cb=handle)
        try:
            yield
        finally:
            await unsubscribe(subscription)
            try:
                await asyncio.sleep(0)  # so that each has begun: only then it can tell
            finally:
                for task in answering:
                    task.cancel()
                await asyncio.gather(*answering, return_exceptions=True)

    def check_permitted(self) -> None:
        """Complain if the server refused us a subject, as far as it has answered by now (after a flush).

        Raises:
            MisconfiguredError: with what it said.
        """
        if self._refusal:
            raise errors.MisconfiguredError(
                f"NATS at {self._settings.url} said: {self._refusal}; check SPUR_EVENTS_NATS_CREDENTIALS"
            )

    async def told(self, error: Exception) -> None:
        """Hear what the driver reports on the side: every failed request raises at its caller as well.

        But a request that the server does not permit is answered by silence: this says why.
        """
        refusal = str(error)
        if "permissions violation" in refusal.lower():
            if refusal != self._refusal:
                log.error("NATS does not permit this part a subject", extra={"reason": refusal})
            self._refusal, self._refused_at = refusal, time.monotonic()

    async def cut(self) -> None:
        """End all requests in flight: their answers were lost with the connection."""
        for scope in self._in_flight:
            if not scope.expired():  # by an earlier cut, if what it waits for is slow to end
                scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Wait for answers; driver errors leave in our tree, and a lost connection ends the wait at once."""
        with process.cancellable():
            async with self._waiting():
                yield

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        where = f"NATS at {self._settings.url}"
        if not self._client.is_connected:
            raise errors.UnreachableError(f"{where} is not connected; check that the server runs")
        try:
            async with asyncio.timeout(None) as scope:
                self._in_flight.add(scope)
                try:
                    yield
                finally:
                    self._in_flight.discard(scope)
        except nats.js.errors.NoStreamResponseError as error:
            raise MissingError(f"{where}: no stream listens there; is the relay running?") from error
        except nats.js.errors.NotFoundError as error:
            raise MissingError(f"{where}: {_said(error)}") from error
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                raise StaleError(f"{where}: {error.description}") from error
            raise errors.TemporaryError(f"{where}: {_said(error)}") from error
        except nats.errors.NoRespondersError as error:
            raise MissingError(f"{where}: nobody answers; is JetStream enabled?") from error
        except nats.errors.TimeoutError as error:
            refused = time.monotonic() - self._refused_at < 2 * REQUEST_TIMEOUT_S
            hint = f"it said: {self._refusal}" if refused else "check SPUR_EVENTS_NATS_URL and the server"
            raise errors.UnreachableError(
                f"{where} did not answer within {REQUEST_TIMEOUT_S:.0f} s; {hint}"
            ) from error
        except TimeoutError as error:
            raise errors.UnreachableError(f"{where}: the connection was lost while waiting") from error
        except (nats.errors.Error, OSError) as error:
            raise errors.UnreachableError(f"{where}: {error or type(error).__name__}") from error


async def unsubscribe(subscription: Subscription | JetStreamContext.PullSubscription) -> None:
    """End a subscription, whatever the connection's state: one that is left is made again at the reconnect."""
    with contextlib.suppress(nats.errors.Error):
        await subscription.unsubscribe()


_STREAM_NOT_FOUND = 10059
#: How a pull ends without an event: its time is over; or the consumer is moved, deleted or asked by too many.
_OVER = "408"
_TRY_AGAIN = frozenset({"404", "409"})
#: Seconds that the server's word on a pull that has ended may take, or our own time to read it.
_LAST_WORD_S = 5.0
_ENDING = "who was asked has just ended, or does not lead any more; ask again"


def _said(error: nats.js.errors.APIError) -> str:
    """Return what the server said; a status message, as to a pull, has only a code."""
    return error.description or f"status {error.code}, for example a consumer or stream that was deleted"


class Message:
    """One event, and the ways to answer it. Only consumers.worker answers."""

    def __init__(self, message: Msg, bus: Bus) -> None:
        self._message = message
        self._bus = bus
        self.subject: str = message.subject
        self.data: bytes = message.data
        self.headers: Mapping[str, str] = message.headers or {}
        self.sequence: int = message.metadata.sequence.stream
        self.deliveries: int = message.metadata.num_delivered or 1

    async def done(self) -> None:
        """Acknowledge: never hand this event out again."""
        async with self._bus._asking():  # noqa: SLF001 - one module, one border
            await self._message.ack()

    async def again(self, after_s: float) -> None:
        """Hand this event out again later. It keeps the partition waiting for that long."""
        async with self._bus._asking():  # noqa: SLF001
            await self._message.nak(delay=after_s)

    async def working(self, timeout_s: float) -> None:
        """Ask for another whole ack wait, and return once the server granted it."""
        await self._bus.request(self._message.reply, b"+WPI", timeout_s)


class Pull:
    """Hands out one event at a time."""

    def __init__(self, bus: Bus, consumer: str) -> None:
        self._bus = bus
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.EVENTS_STREAM}.{consumer}"
        self._inbox: Subscription | None = None

    async def next(self, wait_s: float) -> Message | None:
        """Return the next event, or None if none came within `wait_s` or the server asked to try again.

        The event is one that the server handed out because of this call: a lease on it counts from here. One for
        an earlier call may lie about for as long as this process was frozen, and be another worker's by now. (The
        library's `fetch` takes what it finds; and its wait ends a moment before the server's, so that an event
        which comes in between would have to be told from one that is late.)
        """
        client = self._bus._client  # noqa: SLF001 - one module, one border
        async with self._bus._asking():  # noqa: SLF001
            inbox, self._inbox = self._inbox, None
            if inbox is None:
                inbox = await client.subscribe(client.new_inbox())
            try:
                request = {"batch": 1, "expires": int(wait_s * 1e9)}
                await client.publish(self._subject, json.dumps(request).encode(), reply=inbox.subject)
                # The server ends each request, with an event or a status.
                message = await inbox.next_msg(timeout=wait_s + _LAST_WORD_S)
            except nats.errors.TimeoutError:
                await unsubscribe(inbox)
                return None
            except BaseException:
                await unsubscribe(inbox)
                raise
            status = JetStreamContext.is_status_msg(message)
            if status in (None, _OVER):
                self._inbox = inbox
                return Message(message, self._bus) if status is None else None
            await unsubscribe(inbox)  # where a consumer is gone, more than one word may come
            if status not in _TRY_AGAIN:
                raise nats.js.errors.APIError.from_msg(message)
            return None

    async def end(self) -> None:
        """Take no more events."""
        if self._inbox is not None:
            await unsubscribe(self._inbox)


def _decoded(kind: type[M], key: str, data: bytes, headers: Mapping[str, str] | None) -> M:
    """Return a bucket's value. One about another account than its key says was copied there by somebody."""
    value = codec.decode(kind, data, headers)
    slug = getattr(value, "slug", None)
    if isinstance(slug, str) and slug != subjects.slug_of(key):
        raise codec.CodecError(f"key {key} has a value about another account: {slug}")
    return value


def _entry(
    kind: type[M], key: str, data: bytes, headers: Mapping[str, str] | None, sequence: int
) -> Entry[M] | Damaged | None:
    """Return a bucket's message as an entry, or None where it marks a deletion."""
    if _is_marker(headers):
        return None
    try:
        return Entry(value=_decoded(kind, key, data, headers), sequence=sequence)
    except codec.CodecError as error:
        return Damaged(problem=str(error), sequence=sequence)


def _is_marker(headers: Mapping[str, str] | None) -> bool:
    """Whether a bucket's message says that the key was deleted (by a client, or by the server's limits)."""
    return headers is not None and ("KV-Operation" in headers or "Nats-Marker-Reason" in headers)
