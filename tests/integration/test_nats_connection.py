"""How a connection of ours behaves while a real nats-server goes, comes back, or limits it."""

import asyncio
import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support import pipeline, servers, tcp

from spur_events import errors, jetstream
from spur_events.jetstream import caller, opening, service
from spur_events.local.nats import Nats
from spur_events.schemas import subjects
from spur_events.schemas.events import AuditRequest, Recheck, RecheckReason
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


async def test_an_event_that_comes_late_is_no_answer_to_a_later_question(nats_server: Nats) -> None:
    """As after a freeze: with the later question's lease it would hold what another worker has by now."""
    given = pipeline.config("", nats_server).nats
    held, holding, questions = b"", False, 0

    def to_server(data: bytes) -> bytes:
        nonlocal questions
        questions += data.count(b"PUB $JS.API.CONSUMER.MSG.NEXT.")
        return data

    def to_client(data: bytes) -> bytes:
        nonlocal held, holding
        holding = holding or b"spur.recheck." in data
        if not holding:
            return data
        held += data
        if questions < 3:
            return b""
        late, held = held, b""
        return late

    async with (
        jetstream.connect(given, "test", "test") as bus,
        tcp.between("127.0.0.1", nats_server.port, to_client, to_server=to_server) as port,
    ):
        await bus.ensure_topology("x")
        durable = subjects.durable("c", 0)
        await bus.ensure_consumer(durable, ["spur.recheck.c.>"], 4.0)
        there = given.model_copy(update={"url": f"nats://127.0.0.1:{port}"})
        async with jetstream.connect(there, "test", "test") as late, late.pull(durable) as pull:
            assert await pull.next(0.2) is None
            waiting = asyncio.create_task(pull.next(1.0))

            async def asked() -> bool:
                info = await bus._js.consumer_info(subjects.EVENTS_STREAM, durable)
                return bool(info.num_waiting)

            await pipeline.eventually(asked, "the server has the question")
            event = Recheck(installation="x", slug="a", reason=RecheckReason.RESYNC)
            await bus.publish(subjects.recheck("c", "a", bus.partitions), event, message_id="x")
            assert await waiting is None, "the process was frozen for so long"
            assert questions == 2
            message = await pull.next(60.0)
            assert message is not None
            assert message.deliveries == 2
            await message.done()


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "is cancelled as it fails"])
async def test_a_part_that_ends_tells_those_whose_requests_it_has(nats_server: Nats, fails: bool) -> None:
    given = pipeline.config("", nats_server).nats
    listening, taken = asyncio.Event(), asyncio.Event()

    async def never(_request: AuditRequest) -> Checkpoint:
        taken.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        jetstream.connect(given, "test", "test") as bus,
        jetstream.connect(given, "asks", "test") as asker,
    ):

        async def part() -> None:
            with contextlib.suppress(LookupError):
                async with bus.answering(subjects.AUDIT_REQUEST, AuditRequest, never):
                    await bus._client.flush()
                    listening.set()
                    await taken.wait()
                    if fails:
                        task.cancel()
                        raise LookupError

        task = asyncio.create_task(part())
        await listening.wait()
        question = AuditRequest(installation="x")
        asked = asyncio.create_task(asker.ask(subjects.AUDIT_REQUEST, question, Checkpoint, 60.0))
        with pytest.raises(errors.TemporaryError, match="has just ended"):
            await asked
        await asyncio.wait({task})


async def test_a_service_whose_start_was_cut_off_leaves_nothing_behind(
    nats_server: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would answer beside the next one, from the reconnect on."""
    given = pipeline.config("", nats_server).nats

    async def answer(_user: str, _request: object) -> service.Answer:
        raise AssertionError

    offer = service.Service(
        name="s",
        endpoint="e",
        version="1.0.0",
        description="",
        metadata={},
        subject=subjects.kubeconfig("c", "*"),
        kind=AuditRequest,
        answer=answer,
        stats=dict,
    )
    async with jetstream.connect(given, "test", "test") as bus:
        real, before = bus._client.flush, len(bus._client._subs)
        flushes = 0

        async def cut() -> None:
            nonlocal flushes
            flushes += 1
            if flushes == 2:  # the first is the library's own
                nats_server.kill()
            await real()

        monkeypatch.setattr(bus._client, "flush", cut)
        with pytest.raises(errors.UnreachableError):
            async with service.serving(bus, offer):
                pass
        assert flushes == 2
        assert len(bus._client._subs) == before
        nats_server.start()


async def test_who_asks_over_a_connection_that_is_lost_is_told_so_at_once(nats_server: Nats) -> None:
    given = pipeline.config("", nats_server).nats
    asked = asyncio.Event()

    async def silent(_message: object) -> None:
        asked.set()

    async with jetstream.connect(given, "test", "test") as bus:
        await bus._client.subscribe(subjects.kubeconfig("c", "a"), cb=silent)
        await bus._client.flush()
        async with caller.caller(given, "asks", "test") as calling:
            asking = asyncio.create_task(
                calling.ask(
                    subjects.kubeconfig("c", "a"), AuditRequest(installation="x"), Checkpoint, 3600.0, "it"
                )
            )
            await asked.wait()
            nats_server.kill()
            with pytest.raises(errors.UnreachableError, match="connection was lost"):
                await asyncio.wait_for(asking, pipeline.PATIENCE_S)
    nats_server.start()


@pytest.mark.parametrize("refused", [1, 2])
async def test_who_was_too_slow_to_sign_in_tries_again(nats_server: Nats, refused: int) -> None:
    """The server gives it less than two seconds, which a busy machine may need; twice fits into the time."""
    given = pipeline.config("", nats_server, nats={"url": nats_server.url, "connect_timeout_s": 5}).nats
    tries = 0

    def to_server(data: bytes) -> bytes:
        nonlocal tries
        tries += b"CONNECT" in data
        return b"" if tries <= refused else data

    async with tcp.between("127.0.0.1", nats_server.port, to_server=to_server) as port:
        there = given.model_copy(update={"url": f"nats://127.0.0.1:{port}"})
        with contextlib.ExitStack() as stack:
            if refused == 2:
                stack.enter_context(pytest.raises(errors.UnreachableError, match="Authentication Timeout"))
            async with jetstream.connect(there, "test", "test") as bus:
                assert bus.connected
    assert tries == (2 if refused == 2 else 3), "one more for the connection that stays"
