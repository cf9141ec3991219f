"""Who is in which accounts, kept up to date from a real bucket: whatever happens to it, the next answer is right."""

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import nats
import pytest
from support import pipeline, servers

from spur_events import jetstream, settings
from spur_events.consumers.memberships import Memberships
from spur_events.jetstream import signin
from spur_events.local.nats import Nats
from spur_events.schemas import names, subjects
from spur_events.schemas.accounts import AccountState, Deletion, Member, Revision
from spur_events.schemas.resync import Checkpoint


@pytest.fixture
def config(nats_server: Nats) -> settings.Nats:
    return pipeline.config("postgresql://nobody", nats_server).nats


@contextlib.asynccontextmanager
async def connected(config: settings.Nats) -> AsyncIterator[jetstream.Bus]:
    async with jetstream.connect(config, "test", "test") as bus:
        await bus.ensure_topology("installation")
        yield bus


async def put(
    bus: jetstream.Bus, account: str, *users: str, default: bool = False, deleted: bool = False
) -> None:
    state = AccountState(
        installation="installation",
        revision=Revision(1, 1),
        name=account,
        incarnation=servers.unique(),
        deletion=Deletion(at=datetime.now(UTC), by="root") if deleted else None,
        members=tuple(Member(name=user, generation="g", is_default=default) for user in users),
    )
    await bus.put(subjects.ACCOUNTS_BUCKET, names.slug(account), state)


async def of(found: Memberships, user: str) -> list[str]:
    return sorted(one.name for one in await found.of(names.slug(user)))


async def test_every_change_is_seen_by_the_next_question(config: settings.Nats) -> None:
    async with connected(config) as bus:
        found = Memberships(bus)
        assert await of(found, "alice") == []
        await put(bus, "bio", "alice", "bob")
        await put(bus, "Phys Lab", "alice", default=True)
        assert await of(found, "alice") == ["Phys Lab", "bio"]
        assert {one.name: one.is_default for one in await found.of("alice")} == {
            "bio": False,
            "Phys Lab": True,
        }
        await put(bus, "bio", "bob")
        assert await of(found, "alice") == ["Phys Lab"]
        assert await of(found, "bob") == ["bio"]
        await put(bus, "Phys Lab", deleted=True)
        assert await of(found, "alice") == []
        entry = await bus.get(subjects.ACCOUNTS_BUCKET, "bio", AccountState)
        assert entry is not None
        await bus.delete(subjects.ACCOUNTS_BUCKET, "bio", last=entry.sequence)
        assert await of(found, "bob") == []


async def test_an_unreadable_state_names_nobody(config: settings.Nats) -> None:
    async with connected(config) as bus:
        found = Memberships(bus)
        await put(bus, "bio", "alice")
        await put(bus, "lab", "alice")
        assert await of(found, "alice") == ["bio", "lab"]
        other = Checkpoint(
            installation="i",
            epoch=1,
            revision=1,
            database_accounts=0,
            bucket_accounts=0,
            tombstones=0,
            digest="",
            at=datetime.now(UTC),
            audited_at=datetime.now(UTC),
        )
        await bus.put(subjects.ACCOUNTS_BUCKET, "bio", other)
        assert await of(found, "alice") == ["lab"]


async def test_a_bucket_that_was_purged_or_made_anew(config: settings.Nats) -> None:
    stream = f"KV_{subjects.ACCOUNTS_BUCKET}"
    client = await nats.connect(config.url, **signin.options(config, "test"))
    try:
        async with connected(config) as bus:
            found = Memberships(bus)
            for account in ("a", "b", "c"):
                await put(bus, account, "alice")
            assert await of(found, "alice") == ["a", "b", "c"]
            js = client.jetstream()
            await js.purge_stream(stream, subject=f"$KV.{subjects.ACCOUNTS_BUCKET}.b")
            assert await of(found, "alice") == ["a", "c"]
            await js.purge_stream(stream)
            assert await of(found, "alice") == []
            assert await of(found, "alice") == []
            await put(bus, "d", "alice")
            assert await of(found, "alice") == ["d"]
            # Made anew, and longer than the old one by the time somebody asks.
            await js.delete_stream(stream)
            await bus.ensure_topology("installation")
            await put(bus, "x", "alice")
            for number in range(10):
                await put(bus, f"n{number}", "bob")
            assert await of(found, "alice") == ["x"]
            assert len(await of(found, "bob")) == 10
    finally:
        await client.close()
