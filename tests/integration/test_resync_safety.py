"""What a resync must not conclude from absence (design rules 3, 11, 12): nothing is deleted, and it says why."""

import base64
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import compare, pipeline, resyncs, servers, site

from spur_events import errors, jetstream, postgres, resync_command, services, settings
from spur_events.consumers.plan import marks
from spur_events.local.nats import Nats
from spur_events.schemas import names, subjects
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.resync import Action, Checkpoint, ResyncReport, RunState
from spur_events.schemas.status import Phase, RelayStatus

Running = Callable[..., AbstractAsyncContextManager[site.Site]]
_RESYNC = {"prune_grace_s": 0}
_WITHOUT_TRIGGERS = (
    "BEGIN; ALTER TABLE users DISABLE TRIGGER ALL; ALTER TABLE accounts DISABLE TRIGGER ALL;"
    " DELETE FROM users WHERE {0}; DELETE FROM accounts WHERE {1}; COMMIT"
)


@pytest.fixture
def given(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> settings.Settings:
    """No grace, and only the resyncs that a test asks for."""
    return site.config(database_url, nats_server, control_plane, unique, resync=_RESYNC)


@pytest.fixture
async def here(given: settings.Settings, unique: str) -> AsyncIterator[site.Site]:
    async with resyncs.running(given, unique) as made:
        yield made


def with_database(given: settings.Settings, url: str) -> settings.Settings:
    return given.model_copy(update={"database": settings.Database.model_validate({"url": url})})


async def five(here: site.Site) -> None:
    here.sql("INSERT INTO accounts (name, grp_tres) SELECT '$a' || n, 'cpu=4' FROM generate_series(1, 5) n")
    here.sql("INSERT INTO users (name, account) SELECT 'alice', '$a' || n FROM generate_series(1, 5) n")
    await compare.whole(here.bus, here.config, here.cluster)


async def one_to_prune(here: site.Site) -> None:
    """Two accounts and a deleted one, whose namespace the next resync would delete."""
    for account in ("bio", "chem", "old"):
        await here.add(account, "alice")
    await here.delete("old")
    await compare.whole(here.bus, here.config, here.cluster)


async def refused(here: site.Site, *, prune_unexplained: bool = False) -> ResyncReport:
    """Resync; it is refused, and no object of ours has changed."""
    before = await resyncs.versions(here)
    asked = await resyncs.ask(here.bus, here.cluster.name, prune_unexplained=prune_unexplained)
    found = await resyncs.ended(here.bus, here.cluster.name, asked)
    assert found.state is RunState.REFUSED, found
    assert "nothing was deleted" in found.message
    assert await resyncs.versions(here) == before
    return found


async def command(given: settings.Settings, *, yes: bool = True, unexplained: bool = False) -> int:
    """Run `spur-events resync` in this process; returns the exit code."""
    wish = resync_command.Wish(dry_run=False, yes=yes, prune_unexplained=unexplained, as_json=False)
    return await resync_command.resync(given, wish, None)


async def write_heartbeat(bus: jetstream.Bus, age_s: float) -> None:
    entry = await bus.get(subjects.STATUS_BUCKET, subjects.RELAY_KEY, RelayStatus)
    assert entry is not None
    old = entry.value.model_copy(update={"at": datetime.now(UTC) - timedelta(seconds=age_s)})
    await bus.put(subjects.STATUS_BUCKET, subjects.RELAY_KEY, old)


async def test_a_fresh_database_behind_the_same_nats(
    given: settings.Settings, unique: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C01: its relay refuses to start, and a resync without a relay deletes nothing."""
    async with resyncs.running(given, unique) as here:
        await five(here)
        before = await resyncs.versions(here)
    with servers.database(migrated=True) as url:
        fresh = with_database(given, url)
        with pytest.raises(errors.MisconfiguredError, match="installation"):
            await services.relay(fresh)
        async with site.without_relay(fresh, unique) as here:
            for unexplained in (False, True):
                assert await command(fresh, unexplained=unexplained) == 3
                assert "no relay leads" in capsys.readouterr().out
            await write_heartbeat(here.bus, age_s=120)
            found = await refused(here)
            assert re.search(r"last heard of 1[2-9]\d", found.message)
            assert "5 accounts in the bucket" in found.message
            await refused(here, prune_unexplained=True)
            assert await resyncs.versions(here) == before


async def test_a_fresh_database_and_a_fresh_nats(
    given: settings.Settings, unique: str, control_plane: servers.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C01: another installation by all that it can know, and the cluster is full."""
    async with resyncs.running(given, unique) as here:
        await five(here)
        before = await resyncs.versions(here)
        with servers.database(migrated=True) as url, servers.own_nats() as bus_server:
            fresh = site.config(url, bus_server, control_plane, unique, resync=_RESYNC)
            async with resyncs.running(fresh, unique) as there:
                found = await refused(there)
                assert "source has 0 accounts" in found.message
                assert "--prune-unexplained" in found.message
                told = int(found.message.partition("cluster has ")[2].split()[0])
                assert told >= 5  # the cluster is shared with other tests
                assert await command(fresh) == 3
                assert "source has 0 accounts" in capsys.readouterr().out
                # Not even then: they carry the mark of the other installation.
                await command(fresh, unexplained=True)
        assert await resyncs.versions(here) == before
        await compare.whole(here.bus, here.config, here.cluster)


async def test_all_rows_vanish_without_a_recorded_deletion(
    here: site.Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C01: in the same database; the flag that is named does close and remove them."""
    await five(here)
    here.sql(_WITHOUT_TRIGGERS.format("true", "true"))
    checkpoint = await resyncs.audit(here.bus)
    assert (checkpoint.database_accounts, checkpoint.bucket_accounts) == (0, 5)
    found = await refused(here)
    assert "source has 0 accounts" in found.message
    assert "--prune-unexplained" in found.message
    items = resyncs.items(found, here)
    assert {item.action for item in items.values()} == {Action.UNEXPLAINED}
    assert len(items) == 5
    assert await command(here.config) == 3
    # Nobody said yes: closing them ends in their deletion.
    before = await resyncs.versions(here)
    assert await command(here.config, yes=False, unexplained=True) == 3
    assert await resyncs.versions(here) == before
    assert await command(here.config, unexplained=True) == 0
    capsys.readouterr()
    for number in range(1, 6):
        await here.in_phase(f"a{number}", Phase.CLOSED)
    await compare.whole(here.bus, here.config, here.cluster)
    assert await command(here.config) == 0
    for number in range(1, 6):
        await here.in_phase(f"a{number}", Phase.PRUNED)
    await compare.whole(here.bus, here.config, here.cluster)


async def test_some_rows_vanish_without_a_recorded_deletion(here: site.Site) -> None:
    """The explained deletion waits as well: the source is in doubt."""
    await five(here)
    await here.delete("a5")
    some = f"IN ('{here.name('a1')}', '{here.name('a2')}')"
    here.sql(_WITHOUT_TRIGGERS.format(f"account {some}", f"name {some}"))
    await resyncs.audit(here.bus)
    found = await refused(here)
    assert "source has 2 accounts, the bucket has 4" in found.message
    assert "2 accounts are gone without a recorded deletion" in found.message
    assert names.slug(here.name("a1")) in found.message
    items = resyncs.items(found, here)
    assert "source is in doubt" in items["a5"].outcome
    # Back again, as after an aborted import: nothing has been lost.
    here.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$a1', 'cpu=4'), ('$a2', 'cpu=4')")
    await here.settled("a1")
    await here.settled("a2")
    assert await command(here.config) == 0
    await here.in_phase("a5", Phase.PRUNED)
    await compare.whole(here.bus, here.config, here.cluster)


@pytest.fixture
def restricted(given: settings.Settings, unique: str) -> Iterator[settings.Settings]:
    """The relay as a role that row security lets see one account of ten."""
    role, url = f"relay_{unique}", given.database.url.get_secret_value()
    pipeline.execute(
        given,
        f"CREATE ROLE {role} LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA spur_events TO {role};"
        f" GRANT ALL ON ALL TABLES IN SCHEMA spur_events, public TO {role};"
        f" GRANT ALL ON ALL SEQUENCES IN SCHEMA spur_events TO {role};"
        f" CREATE POLICY one ON accounts FOR SELECT TO {role} USING (name = '{unique}a1')",
    )
    yield with_database(given, f"postgresql://{role}:x@{url.partition('@')[2]}")
    pipeline.execute(given, f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_row_security_hides_nine_of_ten_accounts(
    given: settings.Settings, restricted: settings.Settings, unique: str
) -> None:
    """Case C02: the one is still followed, and nothing of the nine is lost."""
    async with resyncs.running(restricted, unique) as made:
        here = site.Site(config=given, bus=made.bus, cluster=made.cluster, prefix=unique)
        here.sql(
            "INSERT INTO accounts (name, grp_tres) SELECT '$a' || n, 'cpu=4' FROM generate_series(1, 10) n"
        )
        here.sql("INSERT INTO users (name, account) SELECT 'alice', '$a' || n FROM generate_series(1, 10) n")
        await compare.whole(here.bus, given, here.cluster)
        pipeline.execute(given, "ALTER TABLE accounts ENABLE ROW LEVEL SECURITY")
        checkpoint = await resyncs.audit(here.bus)
        assert (checkpoint.database_accounts, checkpoint.bucket_accounts) == (1, 10)
        found = await refused(here)
        assert "source has 1 accounts, the bucket has 10" in found.message
        assert "9 accounts are gone without a recorded deletion" in found.message
        before = await resyncs.versions(here)
        here.sql("UPDATE accounts SET grp_tres = 'cpu=5'")
        await here.settled("a1")
        await here.edit("ResourceQuota", "a1", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "5"}}})
        await here.edit("ResourceQuota", "a2", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "5"}}})
        found = await resyncs.run(here)
        assert found.state is RunState.REFUSED
        assert await here.cluster.hard(here.name("a1")) == {"requests.cpu": "5"}
        assert await here.cluster.hard(here.name("a2")) == {"requests.cpu": "4"}
        after = await resyncs.versions(here)
        assert before.keys() == after.keys()
        pipeline.execute(given, "ALTER TABLE accounts DISABLE ROW LEVEL SECURITY")
        await resyncs.audit(here.bus)
        await compare.whole(here.bus, given, here.cluster)
        found = await resyncs.run(here)
        assert (found.state, resyncs.items(found, here)) == (RunState.DONE, {})


async def test_two_installations_share_a_cluster(
    here: site.Site, control_plane: servers.Cluster, unique: str
) -> None:
    """Case C03: with namespaces that nobody marked, and an account of the same name in both."""
    await five(here)
    with servers.database(migrated=True) as url, servers.own_nats() as bus_server:
        other = site.config(url, bus_server, control_plane, unique, resync=_RESYNC)
        async with resyncs.running(other, unique) as there:
            await there.add("b1", "bob")
            await there.add("b2", "bob")
            await there.delete("b2")
            there.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$a1', 'cpu=9')")
            await there.in_phase("a1", Phase.CONFLICT)
            unmarked = {}
            for account, labels in (("legacy", {"team": "x"}), ("x", {})):
                metadata = {"name": here.namespace(account), "labels": labels}
                await here.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
                unmarked[account] = await here.live("Namespace", account)
            theirs = await resyncs.versions(there)
            await here.delete("a5")
            found = await resyncs.run(here, prune_unexplained=True)
            assert found.state is RunState.DONE
            actions = {name: item.action for name, item in resyncs.items(found, here).items()}
            assert actions == {"a5": Action.PRUNE, "legacy": Action.FOREIGN, "x": Action.FOREIGN}
            await here.gone("a5")
            assert await resyncs.versions(there) == theirs
            ours = await resyncs.versions(here)
            found = await resyncs.run(there, prune_unexplained=True)
            actions = {name: item.action for name, item in resyncs.items(found, here).items()}
            assert actions["a1"] is Action.CONFLICT
            assert actions["b2"] is Action.PRUNE
            await there.gone("b2")
            assert await resyncs.versions(here) == ours
            for account, before in unmarked.items():
                assert await here.live("Namespace", account) == before
    await compare.whole(here.bus, here.config, here.cluster)


async def test_marks_that_were_changed_by_hand_are_restored(here: site.Site) -> None:
    """Case C06: the account label binds a namespace to nobody else."""
    await here.add("physics", "alice")
    await here.add("bio", "bob")
    wrong = {
        marks.MANAGED_BY: None,
        marks.INSTALLATION: None,
        marks.ACCOUNT: names.slug(here.name("bio")),
    }
    await here.edit("Namespace", "physics", "", {"metadata": {"labels": wrong}})
    found = await resyncs.run(here)
    assert found.state is RunState.DONE
    items = resyncs.items(found, here)
    assert list(items) == ["physics"]
    assert items["physics"].action is Action.CHANGE
    assert any(marks.ACCOUNT in detail for detail in items["physics"].details), items
    await compare.whole(here.bus, here.config, here.cluster)
    assert await here.cluster.subjects(here.name("physics")) == ["spur-user-alice"]
    assert await here.cluster.subjects(here.name("bio")) == ["spur-user-bob"]
    await here.delete("physics")
    await resyncs.run(here)
    await here.gone("physics")
    assert await here.cluster.subjects(here.name("bio")) == ["spur-user-bob"]


async def test_marks_taken_off_a_deleted_accounts_namespace(here: site.Site) -> None:
    """Case C06: it is not deleted while it says of itself that it is another account's."""
    await here.add("physics", "alice")
    await here.add("bio", "bob")
    await here.delete("physics")
    wrong = {marks.ACCOUNT: names.slug(here.name("bio"))}
    await here.edit("Namespace", "physics", "", {"metadata": {"labels": wrong}})
    found = await resyncs.run(here)
    assert resyncs.items(found, here)["physics"].action is Action.CLOSE
    await resyncs.run(here)
    await here.gone("physics")
    await compare.whole(here.bus, here.config, here.cluster)


async def test_a_missing_checkpoint(given: settings.Settings, unique: str) -> None:
    """A relay that runs writes it again within a heartbeat."""
    async with resyncs.running(given, unique) as here:
        await one_to_prune(here)
    async with jetstream.connect(given.nats, "test", "test") as bus:
        entry = await bus.get(subjects.STATUS_BUCKET, subjects.CHECKPOINT_KEY, Checkpoint, newest=True)
        assert entry is not None
        await bus.delete(subjects.STATUS_BUCKET, subjects.CHECKPOINT_KEY, last=entry.sequence)
    async with site.without_relay(given, unique) as here:
        assert "no checkpoint" in (await refused(here)).message
        await here.edit("ResourceQuota", "bio", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "5"}}})
        found = await resyncs.run(here)
        assert found.state is RunState.REFUSED
        items = resyncs.items(found, here)
        assert items["bio"].carried_out  # what is there is still followed
        assert not items["old"].carried_out
        assert "deletionTimestamp" not in (await here.live("Namespace", "old"))["metadata"]
    async with site.running(given, unique) as here:
        assert await command(here.config) == 0
        await here.gone("old")


async def test_a_torn_bucket(given: settings.Settings, unique: str) -> None:
    async with resyncs.running(given, unique) as here:
        await one_to_prune(here)
    async with site.without_relay(given, unique) as here:
        slug = names.slug(here.name("bio"))
        entry = await here.bus.get(subjects.ACCOUNTS_BUCKET, slug, AccountState)
        assert entry is not None
        await here.bus.delete(subjects.ACCOUNTS_BUCKET, slug, last=entry.sequence)
        found = await refused(here)
        assert "holds 1 accounts and 1 deleted ones" in found.message
        assert "left 2 and 1 there" in found.message
        assert resyncs.items(found, here)["bio"].action is Action.UNEXPLAINED
        await refused(here, prune_unexplained=True)
    async with resyncs.running(given, unique) as here:
        await compare.whole(here.bus, here.config, here.cluster)
        found = await resyncs.run(here)
        assert found.state is RunState.DONE
        await here.gone("old")
        assert await here.cluster.subjects(here.name("bio")) == ["spur-user-alice"]


async def test_a_silent_relay(given: settings.Settings, unique: str) -> None:
    async with resyncs.running(given, unique) as here:
        await one_to_prune(here)
    async with site.without_relay(given, unique) as here:
        await write_heartbeat(here.bus, age_s=120)
        found = await refused(here)
        assert re.search(r"last heard of 1[2-9]\d", found.message)
        assert "start it, or look at its log" in found.message
        await refused(here, prune_unexplained=True)


async def test_no_right_to_list(given: settings.Settings, unique: str, tmp_path: Path) -> None:
    async with (
        pipeline.relay(given),
        pipeline.background(services.apply(given)),
        jetstream.connect(given.nats, "test", "test") as bus,
        pipeline.cluster(given) as cluster,
    ):
        here = site.Site(config=given, bus=bus, cluster=cluster, prefix=unique)
        await one_to_prune(here)
        assert given.kubernetes.kubeconfig is not None
        kubeconfig = tmp_path / "kubeconfig"
        admins = given.kubernetes.kubeconfig / "admin.kubeconfig"
        write_kubeconfig(admins, kubeconfig, await nobodys_token(cluster, unique))
        place = given.kubernetes.model_copy(update={"kubeconfig": kubeconfig})
        async with pipeline.background(services.resync(given.model_copy(update={"kubernetes": place}))):
            found = await refused(here)
            assert "a right is missing" in found.message
            assert unique in found.message
            assert "cannot list" in found.message


async def nobodys_token(cluster: pipeline.Cluster, name: str) -> str:
    """Return a token of a ServiceAccount that may do nothing."""
    path = "/api/v1/namespaces/default/serviceaccounts"
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    await cluster.client.request("POST", path, body=body)
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    made = await cluster.client.request("POST", f"{path}/{name}/token", body=asked)
    return str(made["status"]["token"])


def write_kubeconfig(admins: Path, target: Path, token: str) -> None:
    found = yaml.safe_load(admins.read_text("utf-8"))
    server = dict(found["clusters"][0]["cluster"])
    if authority := server.pop("certificate-authority", None):
        content = (admins.parent / authority).read_bytes()
        server["certificate-authority-data"] = base64.b64encode(content).decode("ascii")
    target.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "x",
                "clusters": [{"name": "x", "cluster": server}],
                "users": [{"name": "x", "user": {"token": token}}],
                "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
            }
        ),
        "utf-8",
    )


async def test_a_restored_database(given: settings.Settings, unique: str) -> None:
    """Design rule 3: a new epoch; what it does not know is not pruned, and new changes are applied."""
    async with resyncs.running(given, unique) as here:
        await here.add("bio", "alice")
        await here.add("chem", "bob")
    with copied(given) as url:
        async with resyncs.running(given, unique) as here:
            for step in range(5, 10):
                here.sql(f"UPDATE accounts SET grp_tres = 'cpu={step}' WHERE name = '$bio'")
            await here.settled("bio")
            await here.add("new", "carol")
            await here.delete("chem")
            assert await here.cluster.hard(here.name("bio")) == {"requests.cpu": "9"}
        restored = with_database(given, url)
        async with resyncs.running(restored, unique) as here:
            await here.settled("bio")
            assert await here.cluster.hard(here.name("bio")) == {"requests.cpu": "4"}
            assert (await here.settled("chem")).phase is Phase.APPLIED
            state = await pipeline.state(here.bus, here.name("bio"))
            assert state is not None
            assert state.revision.epoch == 2
            found = await refused(here)
            assert names.slug(here.name("new")) in found.message
            assert resyncs.items(found, here)["new"].action is Action.UNEXPLAINED
            assert await here.cluster.subjects(here.name("new")) == ["spur-user-carol"]
            here.sql("UPDATE accounts SET grp_tres = 'cpu=7' WHERE name = '$bio'")
            await here.settled("bio")
            assert await here.cluster.hard(here.name("bio")) == {"requests.cpu": "7"}
            # Added again by hand, as somebody does who reads the message.
            here.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$new', 'cpu=4')")
            await here.settled("new")
            await compare.whole(here.bus, here.config, here.cluster)
            found = await resyncs.run(here)
            assert (found.state, resyncs.items(found, here)) == (RunState.DONE, {})


@contextlib.contextmanager
def copied(given: settings.Settings) -> Iterator[str]:
    """Yield the URL of a copy of a database as it is now."""
    url = given.database.url.get_secret_value()
    source, copy = url.rpartition("/")[2].partition("?")[0], servers.unique()
    shared = with_database(given, servers.shared_postgres().url).database
    with postgres.connect(shared) as connection:
        connection.execute(f"CREATE DATABASE {copy} TEMPLATE {source}".encode())
    try:
        yield url.replace(source, copy)
    finally:
        with postgres.connect(shared) as connection:
            connection.execute(f"DROP DATABASE {copy} WITH (FORCE)".encode())


@pytest.mark.parametrize("how", ["purged", "deleted", "everything deleted"])
async def test_a_bucket_that_is_harmed_while_everything_runs(here: site.Site, how: str) -> None:
    await one_to_prune(here)
    bucket = f"KV_{subjects.ACCOUNTS_BUCKET}"
    if how == "purged":
        await here.bus._js.purge_stream(bucket)
    else:
        await here.bus._js.delete_stream(bucket)
    if how == "everything deleted":
        for stream in (subjects.EVENTS_STREAM, f"KV_{subjects.STATUS_BUCKET}"):
            await here.bus._js.delete_stream(stream)

    async def resynced() -> bool:
        try:
            return await command(here.config) == 0
        except errors.TemporaryError:
            return False  # the relay makes it again

    # An event that was in hand as its stream went may be waited for, and the first resync with it.
    await pipeline.eventually(resynced, "a resync succeeds", 240.0)
    await compare.whole(here.bus, here.config, here.cluster)
    # Where the first one had to bring everything to the new revisions, the next one prunes.
    assert await command(here.config) == 0
    await here.gone("old")
    assert await here.cluster.subjects(here.name("bio")) == ["spur-user-alice"]
