"""kill -9 of every part at random moments while changes go on: the end state is compared whole (design rule 20)."""

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support import changes, compare, pipeline, processes, servers

from spur_events import errors, jetstream, postgres, settings
from spur_events.local.nats import Nats
from spur_events.local.postgres import Postgres
from spur_events.producers import migrate
from spur_events.schemas import subjects
from spur_events.schemas.accounts import AccountState, Revision

#: Stands in each test's name. It repeats the changes; the moments of the kills vary with the machine all the same.
SEED = int(os.environ.get("SPUR_EVENTS_TEST_SEED", "20260804"))

seeded = pytest.mark.parametrize("seed", [SEED])


def configured(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str, ack_wait_s: float = 5.0
) -> settings.Settings:
    return pipeline.config(
        database_url,
        nats_server,
        kubernetes={"cluster": unique, "kubeconfig": control_plane.kubeconfigs},
        apply={
            "sweep_interval_s": 1.0,
            "retry_min_s": 0.2,
            "retry_max_s": 1.0,
            "ack_wait_s": ack_wait_s,
        },
        relay={"batch_rows": 20, "changes_per_event": 3},
    )


async def under_load(
    given: settings.Settings,
    seed: int,
    unique: str,
    count: int,
    strike: Callable[[random.Random], Awaitable[None]],
    pause_s: float = 0.04,
) -> int:
    """Make `count` changes from two writers and strike at random moments while they go on; return how often."""
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    writers = [
        asyncio.create_task(
            asyncio.to_thread(changes.make, given, f"{seed}.{number}", unique, count // 2, pause_s)
        )
        for number in range(2)
    ]
    strikes = 0
    while strikes < 2 or not all(writer.done() for writer in writers):
        await asyncio.sleep(rng.uniform(0.0, 0.6))
        await strike(rng)
        strikes += 1
    await asyncio.gather(*writers)
    return strikes


@seeded
async def test_nats_is_killed_during_200_changes(
    seed: int, database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> None:
    given = configured(database_url, nats_server, control_plane, unique)

    async def strike(rng: random.Random) -> None:
        nats_server.kill()
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        await asyncio.to_thread(nats_server.start)

    async with pipeline.everything(given), pipeline.cluster(given) as cluster:
        assert await under_load(given, seed, unique, 200, strike) > 1
        async with jetstream.connect(given.nats, "test", "test") as bus:
            await compare.whole(bus, given, cluster, hint=f"seed {seed}")


@seeded
async def test_the_database_is_killed_during_200_changes(
    seed: int, postgres_server: Postgres, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> None:
    given = configured(postgres_server.url, nats_server, control_plane, unique)
    migrate.migrate(given.database)

    async def strike(rng: random.Random) -> None:
        await asyncio.to_thread(postgres_server.kill)
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        await asyncio.to_thread(postgres_server.start)

    async with (
        pipeline.everything(given),
        jetstream.connect(given.nats, "test", "test") as bus,
        pipeline.cluster(given) as cluster,
    ):
        assert await under_load(given, seed, unique, 200, strike) > 1
        await compare.whole(bus, given, cluster, hint=f"seed {seed}")


@seeded
async def test_the_services_are_killed_during_200_changes(
    seed: int,
    database_url: str,
    nats_server: Nats,
    control_plane: servers.Cluster,
    unique: str,
    tmp_path: Path,
) -> None:
    given = configured(database_url, nats_server, control_plane, unique, ack_wait_s=2.0)
    with processes.Service("all", given, tmp_path / "all.log") as service:

        async def strike(rng: random.Random) -> None:
            # Long enough to have started, often in the middle of work.
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            assert service.running
            service.kill()
            service.start()

        assert await under_load(given, seed, unique, 200, strike, 0.08) > 2
        async with jetstream.connect(given.nats, "test", "test") as bus, pipeline.cluster(given) as cluster:
            await compare.whole(bus, given, cluster, hint=f"seed {seed}")


@seeded
async def test_a_worker_that_sleeps_past_its_ack_wait_brings_no_account_back(
    seed: int,
    database_url: str,
    nats_server: Nats,
    control_plane: servers.Cluster,
    unique: str,
    tmp_path: Path,
) -> None:
    """SIGSTOP, 50 changes, SIGCONT, several times; the revision on a namespace only grows (case C36)."""
    given = configured(database_url, nats_server, control_plane, unique, ack_wait_s=1.0)
    newest: dict[str, Revision] = {}
    went_back: list[str] = []

    async def look(cluster: pipeline.Cluster, installation: str) -> None:
        while True:
            for key, live in (await compare.objects(cluster, installation, ["Namespace"])).items():
                text = live["metadata"]["annotations"]["spur.amd.com/revision"]
                revision = Revision.parse(text)
                assert revision is not None
                if revision < newest.get(key[2], revision):
                    went_back.append(f"{key[2]}: {newest[key[2]]} -> {revision}")
                newest[key[2]] = revision
            await asyncio.sleep(0.05)

    async with (
        pipeline.relay(given) as (_, bus),
        pipeline.cluster(given) as cluster,
    ):
        installation = await bus.check_topology()
        with (
            processes.Service("apply", given, tmp_path / "steady.log") as steady,
            processes.Service("apply", given, tmp_path / "sleeper.log") as sleeper,
        ):
            async with pipeline.background(look(cluster, installation)):
                await asyncio.to_thread(changes.make, given, f"{seed}.first", unique, 50)
                await compare.whole(bus, given, cluster, hint=f"seed {seed}, both awake")
                for number in range(4):
                    writer = asyncio.create_task(
                        asyncio.to_thread(changes.make, given, f"{seed}.{number}", unique, 50, 0.01)
                    )
                    await asyncio.sleep(0.1 * (number + 1))
                    sleeper.pause()
                    try:
                        await writer
                        # Longer than the ack wait: everything that the sleeper held was done by the other.
                        await compare.whole(bus, given, cluster, hint=f"seed {seed}, one asleep")
                        await asyncio.sleep(given.apply.ack_wait_s)
                    finally:
                        sleeper.resume()
                    await asyncio.to_thread(changes.make, given, f"{seed}.{number}.awake", unique, 20)
                    await compare.whole(bus, given, cluster, hint=f"seed {seed}, awake again", healing_s=20)
            assert steady.running
            assert sleeper.running
    assert not went_back


@seeded
async def test_a_relay_that_is_killed_between_put_and_commit_publishes_everything_and_never_goes_back(
    seed: int, database_url: str, nats_server: Nats, tmp_path: Path
) -> None:
    """Cases C32 and C43 in spirit: 20 kills while changes go on."""
    given = pipeline.config(database_url, nats_server, relay={"batch_rows": 5, "changes_per_event": 2})
    # What was ever committed to the outbox, noted by the database itself.
    pipeline.execute(
        given,
        "CREATE TABLE noted (id bigint PRIMARY KEY);"
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO public.noted VALUES (NEW.id); RETURN NULL; END $$;"
        "CREATE TRIGGER note AFTER INSERT ON spur_events.outbox FOR EACH ROW EXECUTE FUNCTION note()",
    )
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    stop = asyncio.Event()

    async def write() -> None:
        number = 0
        while not stop.is_set():
            await asyncio.to_thread(changes.make, given, f"{seed}.{number}", "x", 20, 0.005)
            number += 1
            # Not more than a relay that is killed all the time can ever carry.
            while _waiting(given) > 200 and not stop.is_set():
                await asyncio.sleep(0.05)

    async with jetstream.connect(given.nats, "test", "test") as bus:
        writer = asyncio.create_task(write())
        with processes.Service("relay", given, tmp_path / "relay.log") as relay:
            for _ in range(20):
                await _published_more(bus)
                await asyncio.sleep(rng.uniform(0.0, 0.2))
                relay.kill()
                relay.start()
            stop.set()
            await writer
            await pipeline.published(given)
        stored = await compare.states(given)
        assert await compare.unpublished(bus, stored) == []
        found = await pipeline.changes(bus)
    with postgres.connect(given.database) as connection:
        noted = {row["id"] for row in connection.execute("SELECT id FROM noted").fetchall()}
    assert {change.id for _, change in found} == noted
    newest: dict[str, Revision] = {}
    for event, _ in found:
        assert event.revision >= newest.get(event.name, event.revision), f"{event.name} went back"
        newest[event.name] = event.revision


async def test_a_batch_whose_relay_died_before_the_commit_is_published_again_as_a_newer_revision(
    database_url: str, nats_server: Nats, tmp_path: Path
) -> None:
    """The one moment that matters, held open by a lock."""
    given = pipeline.config(database_url, nats_server)
    async with jetstream.connect(given.nats, "test", "test") as bus:
        with processes.Service("relay", given, tmp_path / "relay.log") as relay:
            pipeline.execute(given, "INSERT INTO accounts (name, grp_tres) VALUES ('bio', 'cpu=4')")
            first = await pipeline.eventually(lambda: _limit(bus, 4), "bio is published")
            await pipeline.published(given)
            with postgres.connect(given.database) as writer:
                with writer.transaction():
                    writer.execute("SELECT FROM spur_events.allocations WHERE account = 'bio' FOR UPDATE")
                    pipeline.execute(given, "UPDATE accounts SET grp_tres = 'cpu=5' WHERE name = 'bio'")
                    second = await pipeline.eventually(lambda: _limit(bus, 5), "the new state is put")
                    await pipeline.eventually(lambda: _events(bus, 2), "its event is published")
                    relay.kill()
                assert writer.execute("SELECT count(*) AS n FROM spur_events.outbox").fetchone() == {"n": 1}
            relay.start()
            await pipeline.published(given)
            third = await _limit(bus, 5)
            assert third is not None
            assert first.revision < second.revision < third.revision
            found = await pipeline.changes(bus, "bio")
            assert [event.revision for event, _ in found] == [first.revision, second.revision, third.revision]
            assert found[1][1] == found[2][1]


async def _limit(bus: jetstream.Bus, cpus: int) -> AccountState | None:
    with contextlib.suppress(errors.TemporaryError):  # until the relay has made the bucket
        state = await pipeline.state(bus, "bio")
        if state is not None and state.allocation is not None and state.allocation.limits == {"cpu": cpus}:
            return state
    return None


async def _events(bus: jetstream.Bus, count: int) -> bool:
    return len(await pipeline.changes(bus, "bio")) == count


def _waiting(given: settings.Settings) -> int:
    with postgres.connect(given.database) as connection:
        row = connection.execute("SELECT count(*) AS n FROM spur_events.outbox").fetchone()
    assert row is not None
    return int(row["n"])


async def _published_more(bus: jetstream.Bus) -> None:
    """Wait until the relay writes: it leads, and is in the middle of work."""

    async def last() -> int:
        with contextlib.suppress(errors.TemporaryError):
            return await bus.last_sequence(f"KV_{subjects.ACCOUNTS_BUCKET}")
        return 0

    before = await last()

    async def more() -> bool:
        return await last() > before

    await pipeline.eventually(more, "the relay publishes")
