"""How a connection of ours behaves while a real nats-server goes, comes back, or limits it."""

import asyncio
import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support import pipeline, servers, tcp

from spur_events import errors, jetstream
from spur_events.jetstream import opening
from spur_events.local.nats import Nats
from spur_events.schemas import subjects
from spur_events.schemas.events import AuditRequest
from spur_events.schemas.resync import Checkpoint


@pytest.fixture
def limited_server() -> Iterator[Nats]:
    """Yield a server that takes three subscriptions a connection."""
    with servers.own_nats(extra=["max_subscriptions: 3"]) as server:
        yield server


def others() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


async def test_a_limit_of_the_server_ends_no_connection(limited_server: Nats) -> None:
    """As at a rotation of keys: nats-server says the same to a connection that is about to get its new ones."""
    given = pipeline.config("", limited_server).nats
    async with jetstream.connect(given, "test", "test") as bus:
        heard = asyncio.Event()

        async def hear(_message: object) -> None:
            heard.set()

        for number in range(6):
            await bus._client.subscribe(f"test.{number}", cb=hear)

        async def made_again() -> bool:
            return bus._client.stats["reconnects"] > 0

        await pipeline.eventually(made_again, "the connection is made again")
        limited_server.kill()
        limited_server._extra = ()
        limited_server.start()

        async def answers() -> bool:
            with contextlib.suppress(Exception):
                await bus._client.publish("test.5", b"")
                await bus._client.flush(1)
            return heard.is_set()

        await pipeline.eventually(answers, "without the limit all subscriptions are there")


class Deaf(opening.Client):
    """Loses a cancellation while it connects, as Python 3.11's `wait_for` does if the connection is just there."""

    connecting: asyncio.Event

    async def _connect_to_server(self, s: Any) -> None:
        attempt = asyncio.ensure_future(super()._connect_to_server(s))
        self.connecting.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(attempt)
        await attempt


async def test_a_connection_that_is_closed_while_it_is_made_again_is_gone(nats_server: Nats) -> None:
    client = Deaf()
    client.connecting = asyncio.Event()
    before = others()
    credentials = pipeline.config("", nats_server).nats.credentials
    assert credentials is not None
    await opening.connect(
        client,
        servers=nats_server.url,
        user_credentials=str(credentials / "test.creds"),
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.01,
    )
    nats_server.kill()
    nats_server.start()
    client.connecting.clear()
    await client.connecting.wait()
    await opening.discard(client)
    assert not client.is_connected
    assert others() <= before


async def test_a_driver_that_fails_while_it_connects_again_ends_the_connection(nats_server: Nats) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    client = opening.Client()
    credentials = pipeline.config("", nats_server).nats.credentials
    assert credentials is not None
    ended = await opening.connect(
        client,
        servers=nats_server.url,
        user_credentials=str(credentials / "test.creds"),
        disconnected_cb=fail,
    )
    nats_server.kill()
    async with asyncio.timeout(pipeline.PATIENCE_S):
        await ended.wait()
    assert "a bug" in str(client.last_error)
    await opening.discard(client)


async def test_an_event_stream_that_is_there_means_that_the_buckets_are(nats_server: Nats) -> None:
    """Parts begin when they find it; what they then miss would keep them from being ready for a while."""
    given = pipeline.config("", nats_server).nats
    async with (
        jetstream.connect(given, "test relay", "relay") as relay,
        jetstream.connect(given, "test", "test") as bus,
    ):
        making = asyncio.create_task(relay.ensure_topology("x"))
        async with asyncio.timeout(pipeline.PATIENCE_S):
            while True:
                with contextlib.suppress(jetstream.MissingError):
                    await bus.check_topology()
                    break
        assert await bus.last_sequence(f"KV_{subjects.STATUS_BUCKET}") == 0
        assert await bus.last_sequence(f"KV_{subjects.ACCOUNTS_BUCKET}") == 0
        await making


async def test_who_stops_answering_while_nats_is_away_does_not_begin_again_when_it_is_back(
    nats_server: Nats,
) -> None:
    """As a relay that loses its lead in an outage: it must not answer beside the new one."""
    given = pipeline.config("", nats_server).nats

    async def refuse(_request: AuditRequest) -> Checkpoint:
        raise errors.TemporaryError("not I")

    async with (
        jetstream.connect(given, "test relay", "relay") as relay,
        jetstream.connect(given, "test", "test") as bus,
    ):

        async def away() -> bool:
            return not relay.connected

        async def back() -> bool:
            return relay.connected and bus.connected

        async with relay.answering(subjects.AUDIT_REQUEST, AuditRequest, refuse):
            nats_server.kill()
            await pipeline.eventually(away, "the relay noticed")
        nats_server.start()
        await pipeline.eventually(back, "both are connected again")
        await relay._client.flush()
        with pytest.raises(jetstream.MissingError):
            await bus.ask(subjects.AUDIT_REQUEST, AuditRequest(installation="x"), Checkpoint, 5.0)


async def test_a_flush_is_answered_behind_all_that_was_sent_before_it(nats_server: Nats) -> None:
    """A part that was refused its subject would be ready, and hear nothing."""
    given = pipeline.config("", nats_server).nats
    sent: list[bytes] = []

    def note(data: bytes) -> bytes:
        sent.append(data)
        return data

    async with tcp.between("127.0.0.1", nats_server.port, to_server=note) as port:
        there = given.model_copy(update={"url": f"nats://127.0.0.1:{port}"})
        async with jetstream.connect(there, "test", "test") as bus:
            sent.clear()
            await bus._client.subscribe("_INBOX_test.here")
            await bus._client.flush()
    assert re.findall(rb"^(SUB|PING)", b"".join(sent), re.MULTILINE)[:2] == [b"SUB", b"PING"]


async def test_a_flush_that_was_given_up_takes_no_answer_from_others(nats_server: Nats) -> None:
    given = pipeline.config("", nats_server).nats
    async with jetstream.connect(given, "test", "test") as bus:
        for rounds in range(1, 6):
            given_up = asyncio.create_task(bus._client.flush())
            for _ in range(rounds):
                await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.wait({given_up})
            await bus._client.flush(5)
        assert bus._client.stats["reconnects"] == 0


async def test_a_part_that_is_stopped_while_it_connects_stops(nats_server: Nats) -> None:
    """Whatever it waits for at that moment, also where the answer and the end come together."""
    given = pipeline.config("", nats_server).nats
    connected = asyncio.Event()

    async def part() -> None:
        async with jetstream.connect(given, "test", "test"):
            connected.set()
            await asyncio.Event().wait()

    for rounds in range(400):
        task = asyncio.create_task(part())
        for _ in range(rounds):
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(pipeline.PATIENCE_S):
            await asyncio.wait({task})
        assert task.cancelled()
        if connected.is_set():
            break
    assert connected.is_set(), "every moment of connecting was tried"
