"""The relay on a real PostgreSQL and a real nats-server: design rules 1 and 2."""

import asyncio
import contextlib
import functools
import itertools

import pytest
from support import pipeline, servers, tcp

from spur_events import errors, jetstream, postgres
from spur_events.local.nats import Nats
from spur_events.local.postgres import Postgres
from spur_events.producers import migrate
from spur_events.producers.relay import Relay
from spur_events.schemas import subjects
from spur_events.schemas.accounts import AccountState, Revision
from spur_events.schemas.events import AuditRequest, ChangeKind
from spur_events.schemas.resync import Checkpoint, Contents
from spur_events.schemas.status import RelayStatus


async def test_a_change_by_plain_sql_reaches_bucket_and_stream(database_url: str, nats_server: Nats) -> None:
    config = pipeline.config(database_url, nats_server)
    async with pipeline.relay(config) as (_, bus):
        pipeline.execute(
            config,
            "INSERT INTO accounts (name, description, grp_tres) VALUES ('bio', 'Biology', 'cpu=4,gres/gpu=0');"
            "INSERT INTO users (name, account, default_account) VALUES ('ada', 'bio', 'bio')",
        )
        state = await pipeline.eventually(lambda: pipeline.state(bus, "bio"), "bio is in the bucket")
        assert state.description == "Biology"
        assert state.allocation is not None
        assert state.allocation.limits == {"cpu": 4, "gres/gpu": 0}
        assert [(m.name, m.is_default) for m in state.members] == [("ada", True)]
        await pipeline.published(config)  # the event comes after the state
        found = await pipeline.changes(bus, "bio")
        assert [change.kind for _, change in found] == [ChangeKind.ACCOUNT_ADDED, ChangeKind.MEMBER_ADDED]
        assert {event.revision for event, _ in found} == {state.revision}
        assert found[0][1].actor.database_user == "postgres"
        assert found[0][1].actor.application == "psql"


async def test_a_row_that_commits_late_with_a_lower_id_is_published(
    database_url: str, nats_server: Nats
) -> None:
    """Case C40, with a rolled-back id in between."""
    config = pipeline.config(database_url, nats_server)
    async with pipeline.relay(config) as (_, bus):
        with (
            postgres.connect(config.database) as late,
            postgres.connect(config.database) as undone,
        ):
            late.execute("BEGIN")
            late.execute("INSERT INTO accounts (name) VALUES ('late')")
            undone.execute("BEGIN")
            undone.execute("INSERT INTO accounts (name) VALUES ('undone')")
            pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('early')")
            await pipeline.eventually(lambda: pipeline.state(bus, "early"), "early is published")
            undone.execute("ROLLBACK")
            late.execute("COMMIT")
        await pipeline.eventually(lambda: pipeline.state(bus, "late"), "late is published")
        assert await pipeline.state(bus, "undone") is None


async def test_two_relays_publish_each_change_once_and_in_order(database_url: str, nats_server: Nats) -> None:
    """Case C42: 500 changes over 5 accounts."""
    config = pipeline.config(database_url, nats_server, relay={"batch_rows": 7})
    for number in range(5):
        pipeline.execute(config, f"INSERT INTO accounts (name) VALUES ('a{number}')")
    async with (
        pipeline.relay(config) as (_, bus),
        pipeline.background(Relay(config, bus).run()),
    ):
        with postgres.connect(config.database) as connection:
            for step in range(100):
                for number in range(5):
                    connection.execute(
                        "UPDATE accounts SET grp_tres = %s WHERE name = %s", (f"cpu={step}", f"a{number}")
                    )

        async def all_there() -> bool:
            return len(await pipeline.changes(bus)) >= 505

        await pipeline.eventually(all_there, "505 changes are in the stream")
        found = await pipeline.changes(bus)
        ids = [change.id for _, change in found]
        assert len(ids) == len(set(ids)) == 505
        for number in range(5):
            own = [(event, change) for event, change in found if event.name == f"a{number}"]
            assert [change.id for _, change in own] == sorted(change.id for _, change in own)
            assert [event.revision for event, _ in own] == sorted(event.revision for event, _ in own)
            state = await pipeline.state(bus, f"a{number}")
            assert state is not None
            assert state.revision == own[-1][0].revision
            assert state.allocation is not None
            assert state.allocation.limits == {"cpu": 99}


async def test_the_standby_takes_over_when_the_leader_dies(database_url: str, nats_server: Nats) -> None:
    config = pipeline.config(database_url, nats_server)
    async with jetstream.connect(config.nats, "standby", "relay") as bus:
        async with pipeline.relay(config):
            standby = Relay(config, bus)
            task = asyncio.create_task(standby.run())
            await asyncio.sleep(0)
            assert not standby.leading.is_set()
        try:
            pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio')")
            await pipeline.eventually(lambda: pipeline.state(bus, "bio"), "the standby publishes")
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_a_change_made_while_the_listener_was_cut_off_is_published(
    database_url: str, nats_server: Nats
) -> None:
    """Case C41: kill the listening backend, change in the gap, then silence."""
    config = pipeline.config(database_url, nats_server)
    async with pipeline.relay(config) as (_, bus):
        for number in range(3):
            pipeline.execute(
                config,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'spur-events relay%'"
                " AND pid <> pg_backend_pid()",
            )
            pipeline.execute(config, f"INSERT INTO accounts (name) VALUES ('gap{number}')")
            await pipeline.eventually(
                functools.partial(pipeline.state, bus, f"gap{number}"), "the change is published"
            )


async def test_added_removed_and_added_again_are_three_changes(database_url: str, nats_server: Nats) -> None:
    """Case C31: no update is taken for a duplicate of an earlier one."""
    config = pipeline.config(database_url, nats_server)
    async with pipeline.relay(config) as (_, bus):
        pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio')")
        add = "INSERT INTO users (name, account) VALUES ('ada', 'bio')"
        for statement in (add, "DELETE FROM users WHERE name = 'ada'", add):
            pipeline.execute(config, statement)
        for cpus in (8, 4, 8):
            pipeline.execute(config, f"UPDATE accounts SET grp_tres = 'cpu={cpus}' WHERE name = 'bio'")

        async def all_there() -> bool:
            return len(await pipeline.changes(bus, "bio")) == 7

        await pipeline.eventually(all_there, "all changes are stored")
        state = await pipeline.state(bus, "bio")
        assert state is not None
        assert [member.name for member in state.members] == ["ada"]
        assert state.allocation is not None
        assert state.allocation.limits == {"cpu": 8}


async def test_the_relay_makes_streams_and_refills_a_lost_bucket(
    database_url: str, nats_server: Nats
) -> None:
    """Case C33, and a bucket that somebody deleted while everything runs."""
    config = pipeline.config(database_url, nats_server)
    pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio'), ('chem')")
    async with pipeline.relay(config) as (_, bus):
        await pipeline.eventually(lambda: pipeline.state(bus, "chem"), "chem is in the bucket")
        for stream in ("KV_spur-accounts", "SPUR_EVENTS"):
            await bus._js.delete_stream(stream)
        pipeline.execute(config, "UPDATE accounts SET description = 'new' WHERE name = 'bio'")

        async def refilled() -> bool:
            try:
                return (await pipeline.state(bus, "bio")) is not None and (
                    await pipeline.state(bus, "chem")
                ) is not None
            except jetstream.MissingError:
                return False

        await pipeline.eventually(refilled, "both accounts are in the new bucket")


async def test_the_row_stays_until_nats_is_back(database_url: str, nats_server: Nats) -> None:
    config = pipeline.config(database_url, nats_server)
    async with pipeline.relay(config) as (_, bus):
        nats_server.kill()
        pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio')")
        nats_server.start()

        async def published() -> object:
            try:
                return await pipeline.state(bus, "bio")
            except errors.TemporaryError:
                return None

        await pipeline.eventually(published, "the change is published after the restart")


async def test_a_killed_database_comes_back_without_a_hand(
    postgres_server: Postgres, nats_server: Nats
) -> None:
    config = pipeline.config(postgres_server.url, nats_server)
    migrate.migrate(config.database)
    async with pipeline.relay(config) as (_, bus):
        postgres_server.kill()
        postgres_server.start()
        pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio')")
        await pipeline.eventually(lambda: pipeline.state(bus, "bio"), "the change is published")


async def test_a_malformed_allocation_keeps_the_last_good_one(database_url: str, nats_server: Nats) -> None:
    config = pipeline.config(database_url, nats_server)
    async with pipeline.relay(config) as (_, bus):
        pipeline.execute(config, "INSERT INTO accounts (name, grp_tres) VALUES ('bio', 'cpu=4')")
        await pipeline.eventually(lambda: pipeline.state(bus, "bio"), "bio is published")
        pipeline.execute(config, "UPDATE accounts SET grp_tres = 'cpu=lots' WHERE name = 'bio'")

        async def with_problem() -> object:
            state = await pipeline.state(bus, "bio")
            return state and state.allocation and state.allocation.problem and state

        state = await pipeline.eventually(with_problem, "the problem is published")
        assert state.allocation.limits == {"cpu": 4}  # type: ignore[attr-defined]
        assert "lots" in state.allocation.problem  # type: ignore[attr-defined]


async def test_a_restored_database_opens_a_new_epoch(database_url: str, nats_server: Nats) -> None:
    config = pipeline.config(database_url, nats_server)
    pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio')")
    async with pipeline.relay(config) as (_, bus):
        before = await pipeline.eventually(lambda: pipeline.state(bus, "bio"), "bio is published")
    # What a restore does, as far as the bus can see: the revisions lag.
    pipeline.execute(config, "SELECT setval('spur_events.revision', 1, false)")
    async with pipeline.relay(config) as (_, bus):
        pipeline.execute(config, "UPDATE accounts SET description = 'after the restore' WHERE name = 'bio'")

        async def newer() -> bool:
            state = await pipeline.state(bus, "bio")
            return state is not None and state.description == "after the restore"

        await pipeline.eventually(newer, "the change after the restore is published")
        state = await pipeline.state(bus, "bio")
        assert state is not None
        assert state.revision.epoch == before.revision.epoch + 1


async def test_a_relay_of_another_database_is_refused(database_url: str, nats_server: Nats) -> None:
    async with pipeline.relay(pipeline.config(database_url, nats_server)):
        pass
    with servers.database(migrated=False) as other:
        config = pipeline.config(other, nats_server)
        migrate.migrate(config.database)
        with pytest.raises(errors.MisconfiguredError, match="installation"):
            async with pipeline.relay(config):
                pass


async def test_a_setting_that_cannot_be_changed_in_place_is_refused_by_name(
    database_url: str, nats_server: Nats
) -> None:
    config = pipeline.config(database_url, nats_server)
    async with jetstream.connect(config.nats, "test", "test") as bus:
        await bus._js.add_stream(name="SPUR_PARKED", subjects=["spur.parked.>"], storage="memory")
        with pytest.raises(errors.MisconfiguredError, match=r"SPUR_PARKED: storage is 'memory'"):
            await bus.ensure_topology("x")


async def test_settings_that_can_be_changed_are_brought_up_to_date(nats_server: Nats) -> None:
    config = pipeline.config("postgresql://unused", nats_server)
    async with jetstream.connect(config.nats, "test", "test") as bus:
        await bus._js.add_stream(name="SPUR_PARKED", subjects=["spur.parked.>"], max_age=10.0)
        await bus.ensure_topology("x")
        live = (await bus._js.stream_info(subjects.PARKED_STREAM)).config
        assert live.max_age == 90 * 24 * 3600


async def test_another_number_of_partitions_is_refused(nats_server: Nats) -> None:
    config = pipeline.config("postgresql://unused", nats_server)
    async with jetstream.connect(config.nats, "test", "test") as bus:
        await bus.ensure_topology("x")
    other = pipeline.config("postgresql://unused", nats_server, nats={"partitions": 8})
    async with jetstream.connect(other.nats, "test", "test") as bus:
        with pytest.raises(errors.MisconfiguredError, match="16 partitions, not 8"):
            await bus.ensure_topology("x")


async def test_an_account_with_many_members_is_compressed_and_one_too_large_holds_nobody_up(
    database_url: str, nats_server: Nats
) -> None:
    config = pipeline.config(database_url, nats_server)
    async with pipeline.relay(config) as (_, bus):
        pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('large'), ('toolarge'), ('small')")
        pipeline.execute(
            config,
            "INSERT INTO users (name, account) SELECT 'user' || n, 'large' FROM generate_series(1, 20000) n",
        )
        pipeline.execute(
            config,
            "INSERT INTO users (name, account) SELECT 'user' || n, 'toolarge' FROM generate_series(1, 80000) n",
        )
        pipeline.execute(config, "UPDATE accounts SET description = 'last' WHERE name = 'small'")

        async def small() -> bool:
            state = await pipeline.state(bus, "small")
            return state is not None and state.description == "last"

        await pipeline.eventually(small, "the change behind it is published", 300)
        state = await pipeline.state(bus, "large")
        assert state is not None
        assert len(state.members) == 20000

        async def told() -> bool:
            entry = await bus.get(subjects.STATUS_BUCKET, subjects.RELAY_KEY, RelayStatus)
            return entry is not None and "max_payload" in entry.value.refused.get("toolarge", "")

        await pipeline.eventually(told, "the relay's status names the account", 300)


async def test_a_lost_acknowledgement_does_not_store_the_event_twice(
    database_url: str, nats_server: Nats
) -> None:
    """Case C32: the publish looks timed out, but the message is stored."""
    direct = pipeline.config(database_url, nats_server)
    lost: list[bytes] = []

    def drop_first_acknowledgement(data: bytes) -> bytes:
        if not lost and b'"stream":"SPUR_EVENTS"' in data and b'"seq"' in data:
            lost.append(data)
            return b""
        return data

    async with tcp.between("127.0.0.1", nats_server.port, drop_first_acknowledgement) as port:
        config = pipeline.config(database_url, nats_server, nats={"url": f"nats://127.0.0.1:{port}"})
        async with pipeline.relay(config):
            pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio')")
            await pipeline.published(config)
    assert lost
    async with jetstream.connect(direct.nats, "test", "test") as bus:
        assert len(await pipeline.changes(bus, "bio")) == 1


async def checkpoint(bus: jetstream.Bus) -> Checkpoint | None:
    entry = await bus.get(subjects.STATUS_BUCKET, subjects.CHECKPOINT_KEY, Checkpoint)
    return entry.value if entry else None


async def contents(bus: jetstream.Bus) -> Contents:
    entries = await bus.read_all(subjects.ACCOUNTS_BUCKET, AccountState)
    return Contents(entry.value for entry in entries.values() if isinstance(entry, jetstream.Entry))


async def test_the_checkpoint_tells_what_the_bucket_holds(database_url: str, nats_server: Nats) -> None:
    config = pipeline.config(database_url, nats_server)
    async with pipeline.relay(config) as (_, bus):
        pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio'), ('chem'), ('phys')")
        pipeline.execute(config, "UPDATE accounts SET description = 'x' WHERE name = 'bio'")
        pipeline.execute(config, "DELETE FROM accounts WHERE name = 'chem'")

        async def agrees() -> bool:
            said, held = await checkpoint(bus), await contents(bus)
            return said is not None and said.tombstones == 1 and said.digest == held.digest

        await pipeline.eventually(agrees, "checkpoint and bucket agree")
        said = await checkpoint(bus)
        assert said is not None
        assert (said.database_accounts, said.bucket_accounts) == (2, 2)


@pytest.mark.parametrize("harm", ["purge", "delete", "one key"])
async def test_a_harmed_bucket_is_noticed_and_filled_without_a_change(
    database_url: str, nats_server: Nats, harm: str
) -> None:
    config = pipeline.config(database_url, nats_server)
    pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio'), ('chem')")
    async with pipeline.relay(config) as (_, bus):
        if harm == "purge":
            await bus._js.purge_stream("KV_spur-accounts")
        elif harm == "delete":
            await bus._js.delete_stream("KV_spur-accounts")
        else:
            await bus._js.purge_stream("KV_spur-accounts", subject="$KV.spur-accounts.bio")

        async def filled() -> bool:
            try:
                return (await contents(bus)).accounts == 2
            except errors.TemporaryError:
                return False

        await pipeline.eventually(filled, "both accounts are back")


@pytest.mark.parametrize("stream", [subjects.EVENTS_STREAM, subjects.PARKED_STREAM, "KV_spur-status"])
async def test_a_deleted_stream_is_made_again(database_url: str, nats_server: Nats, stream: str) -> None:
    config = pipeline.config(database_url, nats_server)
    async with pipeline.relay(config) as (_, bus):
        await bus._js.delete_stream(stream)

        async def there() -> bool:
            try:
                return bool(await bus.extent(stream))
            except errors.TemporaryError:
                return False

        await pipeline.eventually(there, "the stream is there again")


async def test_an_account_that_only_the_bucket_knows_stays_and_is_named(
    database_url: str, nats_server: Nats
) -> None:
    """Design rule 11: absence never deletes. Rows that vanish without a trigger, as a restore does."""
    config = pipeline.config(database_url, nats_server)
    pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio'), ('chem')")
    async with pipeline.relay(config):
        pass
    pipeline.execute(
        config,
        "ALTER TABLE accounts DISABLE TRIGGER ALL; DELETE FROM accounts WHERE name = 'chem';"
        "ALTER TABLE accounts ENABLE TRIGGER ALL",
    )
    async with pipeline.relay(config) as (_, bus):
        state = await pipeline.state(bus, "chem")
        assert state is not None
        assert state.deletion is None
        said = await checkpoint(bus)
        assert said is not None
        assert said.unexplained == ("chem",)
        assert (said.database_accounts, said.bucket_accounts) == (1, 2)
        installation = said.installation
        request = AuditRequest(installation=installation, forget=("chem", "bio"), requested_by="root")
        answer = await bus.ask(subjects.AUDIT_REQUEST, request, Checkpoint, 30)
        assert answer.unexplained == ()
        forgotten, kept = await pipeline.state(bus, "chem"), await pipeline.state(bus, "bio")
        assert forgotten is not None
        assert kept is not None
        assert forgotten.deletion is not None
        assert kept.deletion is None


async def test_an_audit_on_request_finds_a_change_that_no_trigger_saw(
    database_url: str, nats_server: Nats
) -> None:
    config = pipeline.config(database_url, nats_server)
    pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio')")
    async with pipeline.relay(config) as (_, bus):
        pipeline.execute(
            config,
            "ALTER TABLE accounts DISABLE TRIGGER ALL; UPDATE accounts SET description = 'unseen';"
            "ALTER TABLE accounts ENABLE TRIGGER ALL",
        )
        said = await checkpoint(bus)
        assert said is not None
        await bus.ask(subjects.AUDIT_REQUEST, AuditRequest(installation=said.installation), Checkpoint, 30)
        state = await pipeline.state(bus, "bio")
        assert state is not None
        assert state.description == "unseen"


async def test_a_restored_tombstone_does_not_delete_the_account_that_was_created_since(
    database_url: str, nats_server: Nats
) -> None:
    """Design rule 3: nothing is pruned on a restored database's account."""
    config = pipeline.config(database_url, nats_server)
    add = "INSERT INTO accounts (name) VALUES ('bio')"
    async with pipeline.relay(config):
        pipeline.execute(config, add)
        pipeline.execute(config, "DELETE FROM accounts")
        await pipeline.published(config)
    with servers.copy_of(database_url) as restored:
        async with pipeline.relay(config) as (_, bus):
            pipeline.execute(config, add)
            await pipeline.published(config)
            before = await pipeline.state(bus, "bio")
        config = pipeline.config(restored, nats_server)
        async with pipeline.relay(config) as (_, bus):
            await pipeline.published(config)
            after = await pipeline.state(bus, "bio")
            said = await checkpoint(bus)
        assert before is not None
        assert before.deletion is None
        assert after == before
        assert said is not None
        assert said.unexplained == ("bio",)


async def test_reading_a_bucket_under_constant_writes_misses_no_key(nats_server: Nats) -> None:
    """A key that is replaced while the bucket is read must not look absent: absence means something here."""
    config = pipeline.config("postgresql://unused", nats_server)

    def state(name: str, number: int) -> AccountState:
        return AccountState(installation="x", revision=Revision(1, number), name=name, incarnation="i")

    async with (
        jetstream.connect(config.nats, "reader", "test") as bus,
        jetstream.connect(config.nats, "writer", "test") as writing,
    ):
        await bus.ensure_topology("x")
        every = [f"a{number}" for number in range(1500)]
        await asyncio.gather(*(bus.put(subjects.ACCOUNTS_BUCKET, name, state(name, 1)) for name in every))

        async def write() -> None:
            for number in itertools.count(2):
                some = [every[(number * 40 + step * 7) % 1500] for step in range(40)]
                await asyncio.gather(
                    *(writing.put(subjects.ACCOUNTS_BUCKET, name, state(name, number)) for name in some)
                )

        async with pipeline.background(write()):
            for _ in range(5):
                assert set(await bus.read_all(subjects.ACCOUNTS_BUCKET, AccountState)) == set(every)


async def test_members_that_row_security_hides_from_the_relay_stay_members(
    database_url: str, nats_server: Nats, unique: str
) -> None:
    """A partial source: absence never takes access away."""
    config = pipeline.config(database_url, nats_server)
    pipeline.execute(config, "INSERT INTO accounts (name) VALUES ('bio')")
    pipeline.execute(config, "INSERT INTO users (name, account) VALUES ('ada', 'bio'), ('bob', 'bio')")
    async with pipeline.relay(config):
        pass
    pipeline.execute(
        config,
        f"CREATE ROLE {unique} LOGIN PASSWORD 'x';"
        f"GRANT ALL ON ALL TABLES IN SCHEMA public, spur_events TO {unique};"
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public, spur_events TO {unique};"
        f"GRANT USAGE ON SCHEMA spur_events TO {unique};"
        "ALTER TABLE users ENABLE ROW LEVEL SECURITY;"
        f"CREATE POLICY only_ada ON users TO {unique} USING (name = 'ada')",
    )
    try:
        where = database_url.rpartition("@")[2]
        restricted = pipeline.config(f"postgresql://{unique}:x@{where}", nats_server)
        async with pipeline.relay(restricted) as (_, bus):
            pipeline.execute(config, "UPDATE accounts SET description = 'x'")
            await pipeline.published(config)
            state = await pipeline.state(bus, "bio")
            assert state is not None
            assert state.description == "x"
            assert [member.name for member in state.members] == ["ada", "bob"]
    finally:
        pipeline.execute(config, f"DROP OWNED BY {unique}; DROP ROLE {unique}")


async def test_a_lost_checkpoint_is_written_again(database_url: str, nats_server: Nats) -> None:
    config = pipeline.config(database_url, nats_server)
    async with pipeline.relay(config) as (_, bus):
        entry = await bus.get(subjects.STATUS_BUCKET, subjects.CHECKPOINT_KEY, Checkpoint)
        assert entry is not None
        await bus.delete(subjects.STATUS_BUCKET, subjects.CHECKPOINT_KEY, last=entry.sequence)
        await pipeline.eventually(lambda: checkpoint(bus), "the checkpoint is there again")


async def test_an_audit_asked_for_while_the_lead_ends_is_refused_at_once(
    database_url: str, nats_server: Nats
) -> None:
    """Nobody would ever answer it, and the relay would wait for that before it leads again."""
    config = pipeline.config(database_url, nats_server)
    async with jetstream.connect(config.nats, "asks", "test") as asker, contextlib.AsyncExitStack() as stack:
        part, bus = await stack.enter_async_context(pipeline.relay(config))
        question = AuditRequest(installation=await bus.check_topology())
        with postgres.connect(config.database) as connection, connection.transaction():
            connection.execute("LOCK TABLE accounts IN ACCESS EXCLUSIVE MODE")  # its audit waits
            asked = asyncio.create_task(asker.ask(subjects.AUDIT_REQUEST, question, Checkpoint, 30.0))

            async def taken() -> bool:
                return bool(part._requests)

            await pipeline.eventually(taken, "the relay has the request")
            await stack.aclose()
        with pytest.raises(errors.TemporaryError, match="does not lead any more"):
            await asked
        assert part._requests == []
