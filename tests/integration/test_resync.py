"""A resync on real parts: what it finds, that the account's writer carries it out, and what is left alone."""

import functools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support import compare, pipeline, proxy, resyncs, servers, site

from spur_events import jetstream, services
from spur_events.consumers.plan import marks
from spur_events.local.nats import Nats
from spur_events.schemas import names
from spur_events.schemas.resync import Action, ResyncReport, RunState
from spur_events.schemas.status import Phase

Start = Callable[..., AbstractAsyncContextManager[site.Site]]


@pytest.fixture
def start(database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str) -> Start:
    def running(kubeconfig: Path | None = None, **resync: Any) -> AbstractAsyncContextManager[site.Site]:
        place: dict[str, Any] = {"cluster": unique, "kubeconfig": kubeconfig or control_plane.kubeconfigs}
        if kubeconfig is not None:  # through a proxy, which may hold a request
            place["timeout_s"] = 60.0
        given = site.config(
            database_url,
            nats_server,
            control_plane,
            unique,
            kubernetes=place,
            resync=resync,
        )
        return resyncs.running(given, unique)

    return running


@pytest.fixture
async def here(start: Start) -> AsyncIterator[site.Site]:
    """No grace: what is closed may be deleted at once."""
    async with start(prune_grace_s=0) as made:
        yield made


def summary(found: ResyncReport, here: site.Site) -> dict[str, tuple[Action, bool]]:
    """Return what was done about each account, and whether it was carried out."""
    return {name: (item.action, item.carried_out) for name, item in resyncs.items(found, here).items()}


async def test_unchanged_accounts_cost_lists_only(
    start: Start, control_plane: servers.Cluster, tmp_path: Path
) -> None:
    """Case C51: no write, no event, and at most ten requests for 30 accounts."""
    made: list[tuple[str, str]] = []
    pages = 0

    async def count(request: web.Request) -> web.Response | None:
        # Not apply's look at the guard now and then, nor resync's at its own rights.
        nonlocal pages
        if request.headers["Authorization"] == own and "selfsubjectaccessreviews" not in request.path:
            made.append((request.method, request.path))
            pages += "continue" in request.query  # other tests' objects are listed as well
        return None

    async with (
        proxy.before(control_plane.kubeconfigs, tmp_path) as before,
        start(before.kubeconfig) as here,
    ):
        own = before.credentials("resync")
        here.sql(
            "INSERT INTO accounts (name, grp_tres) SELECT '$a' || n, 'cpu=4' FROM generate_series(1, 30) n"
        )
        here.sql(
            "INSERT INTO users (name, account) SELECT 'u' || m, '$a' || n"
            " FROM generate_series(1, 3) m, generate_series(1, 30) n"
        )
        await compare.whole(here.bus, here.config, here.cluster)
        objects = await resyncs.versions(here)
        events = len(await resyncs.rechecks(here.bus, here.cluster.name))
        before.rule = count
        found = await resyncs.run(here)
        before.let_through()
        assert (found.state, found.accounts, found.unchanged) == (RunState.DONE, 30, 30), found
        assert resyncs.items(found, here) == {}
        assert {method for method, _ in made} == {"GET"}
        assert not any(here.prefix in path for _, path in made)
        assert found.reads == len(made)
        assert len(made) - pages <= 10
        assert await resyncs.versions(here) == objects
        assert len(await resyncs.rechecks(here.bus, here.cluster.name)) == events


async def test_a_dry_run_changes_nothing(here: site.Site) -> None:
    for account in ("bio", "chem", "phys"):
        await here.add(account, "alice")
    await here.delete("chem")
    await here.edit("ResourceQuota", "bio", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "500"}}})
    await here.remove("RoleBinding", "phys", marks.BINDING_NAME)
    before = await resyncs.versions(here)
    events = await resyncs.rechecks(here.bus, here.cluster.name)
    found = await resyncs.run(here, dry_run=True)
    assert (found.state, found.dry_run) == (RunState.DONE, True)
    assert summary(found, here) == {
        "bio": (Action.CHANGE, False),
        "chem": (Action.PRUNE, False),
        "phys": (Action.CHANGE, False),
    }
    assert await resyncs.versions(here) == before
    assert await resyncs.rechecks(here.bus, here.cluster.name) == events
    # The same plan carried out, and then there is nothing left to plan.
    found = await resyncs.run(here)
    assert found.state is RunState.DONE
    assert all(carried_out for _, carried_out in summary(found, here).values())
    await here.gone("chem")
    await here.in_phase("chem", Phase.PRUNED)
    found = await resyncs.run(here)
    assert (found.state, resyncs.items(found, here), found.unchanged) == (RunState.DONE, {}, 3)
    await compare.whole(here.bus, here.config, here.cluster)


async def test_a_deleted_namespace_is_created_again(here: site.Site) -> None:
    await here.add("bio", "alice")
    await here.remove("Namespace", "bio")
    await here.gone("bio")
    found = await resyncs.run(here)
    assert summary(found, here) == {"bio": (Action.CREATE, True)}
    assert found.state is RunState.DONE
    await compare.whole(here.bus, here.config, here.cluster)


async def test_an_account_that_was_never_written_is_created(here: site.Site) -> None:
    """A namespace emptied of everything of ours counts as new; it stays the same one."""
    await here.add("bio", "alice")
    uid = (await here.live("Namespace", "bio"))["metadata"]["uid"]
    for kind, name in (
        ("ResourceQuota", marks.QUOTA_NAME),
        ("LimitRange", marks.LIMITS_NAME),
        ("RoleBinding", marks.BINDING_NAME),
        ("Role", marks.ROLE_NAME),
        ("ServiceAccount", "spur-user-alice"),
    ):
        await here.remove(kind, "bio", name)
    found = await resyncs.run(here)
    assert summary(found, here) == {"bio": (Action.CREATE, True)}
    assert (await here.live("Namespace", "bio"))["metadata"]["uid"] == uid
    await compare.whole(here.bus, here.config, here.cluster)


async def test_hand_edits_are_named_and_taken_back(here: site.Site) -> None:
    """Case C13."""
    await here.add("bio", "alice")
    await here.edit("ResourceQuota", "bio", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "500"}}})
    found = await resyncs.run(here)
    item = resyncs.items(found, here)["bio"]
    assert (item.action, item.carried_out, item.account) == (Action.CHANGE, True, here.name("bio"))
    assert any("ResourceQuota" in detail and "pods" in detail for detail in item.details), item.details
    assert "applied" in item.outcome
    await compare.whole(here.bus, here.config, here.cluster)


async def test_access_that_somebody_gave_is_revoked(here: site.Site) -> None:
    """A hand-added subject, and ServiceAccounts that somebody made anew, as a restored backup does."""
    for account in ("bio", "chem", "phys"):
        await here.add(account, "bob")
    binding = await here.live("RoleBinding", "bio", marks.BINDING_NAME)
    mallory = {"kind": "ServiceAccount", "name": "spur-user-mallory", "namespace": here.namespace("bio")}
    subjects = [*binding["subjects"], mallory]
    await here.edit("RoleBinding", "bio", marks.BINDING_NAME, {"subjects": subjects})
    made = {}
    for account, copied in (("chem", ("name", "namespace", "labels")), ("phys", ("name", "namespace"))):
        live = await here.live("ServiceAccount", account, "spur-user-bob")
        await here.remove("ServiceAccount", account, "spur-user-bob")
        metadata = {key: live["metadata"][key] for key in copied}
        await here.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        made[account] = await here.live("ServiceAccount", account, "spur-user-bob")
    found = await resyncs.run(here)
    assert summary(found, here) == {
        "bio": (Action.REVOKE, True),
        "chem": (Action.REVOKE, True),
        # Without marks the lists do not show it: it is absent to the plan, and the writer replaces it all the same.
        "phys": (Action.CHANGE, True),
    }
    assert "access of spur-user-mallory" in resyncs.items(found, here)["bio"].details
    assert await here.cluster.subjects(here.name("bio")) == ["spur-user-bob"]
    for account, before in made.items():
        after = await here.live("ServiceAccount", account, "spur-user-bob")
        assert after["metadata"]["uid"] != before["metadata"]["uid"]
    await compare.whole(here.bus, here.config, here.cluster)


async def test_a_deleted_account_that_was_opened_by_hand_is_closed_again(start: Start) -> None:
    async with start(prune_grace_s=3600) as here:
        await here.add("bio", "alice")
        await here.delete("bio")
        await here.edit("ResourceQuota", "bio", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "7"}}})
        found = await resyncs.run(here)
        assert summary(found, here) == {"bio": (Action.CLOSE, True)}
        await compare.whole(here.bus, here.config, here.cluster)


async def test_the_last_account_of_an_installation_is_pruned(here: site.Site) -> None:
    """Nothing but a recorded deletion is left, and the cluster holds the namespaces of other installations."""
    other = marks.labels("another", names.slug(here.name("theirs")))
    for number in range(3):
        metadata = {"name": here.namespace(f"theirs{number}"), "labels": other}
        await here.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    await here.add("bio", "alice")
    await here.delete("bio")
    found = await resyncs.run(here)
    assert (found.state, found.message) == (RunState.DONE, "")
    assert summary(found, here) == {"bio": (Action.PRUNE, True)}
    await here.gone("bio")
    assert await here.get("Namespace", "theirs0") is not None


async def test_within_the_grace_a_namespace_is_kept(start: Start) -> None:
    async with start(prune_grace_s=3600) as here:
        await here.add("bio", "alice")
        await here.add("chem")
        await here.delete("bio")
        before = await resyncs.versions(here)
        found = await resyncs.run(here)
        assert summary(found, here) == {"bio": (Action.ORPHANED, False)}
        assert "grace ends at" in resyncs.items(found, here)["bio"].details[0]
        assert found.state is RunState.DONE
        assert await resyncs.versions(here) == before


async def test_without_the_wish_to_prune_nothing_is_deleted(here: site.Site) -> None:
    await here.add("bio", "alice")
    await here.add("chem")
    await here.delete("bio")
    found = await resyncs.run(here, prune=False)
    assert (found.state, summary(found, here)) == (RunState.DONE, {"bio": (Action.PRUNE, False)})
    assert "not asked for" in resyncs.items(found, here)["bio"].outcome
    assert "deletionTimestamp" not in (await here.live("Namespace", "bio"))["metadata"]


async def test_retained_and_paused_namespaces_are_told_and_left(here: site.Site) -> None:
    for account in ("kept", "still", "chem"):
        await here.add(account, "alice")
    await here.edit("Namespace", "kept", "", {"metadata": {"labels": {marks.RETAIN: "true"}}})
    await here.delete("kept")
    await here.edit("Namespace", "still", "", {"metadata": {"annotations": {marks.RECONCILE: marks.PAUSED}}})
    await here.edit("ResourceQuota", "still", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "7"}}})
    before = await resyncs.versions(here)
    found = await resyncs.run(here)
    assert found.state is RunState.DONE
    assert summary(found, here) == {"kept": (Action.RETAINED, False), "still": (Action.PAUSED, False)}
    assert await resyncs.versions(here) == before


async def test_a_namespace_that_something_holds_is_waited_for(here: site.Site) -> None:
    """Case C05: resynced twice; both succeed, and no error is counted."""
    await here.add("bio", "alice")
    await here.add("chem")
    pin = await here.pin("bio")
    await here.delete("bio")
    first = await resyncs.run(here)
    assert (first.state, summary(first, here)) == (RunState.DONE, {"bio": (Action.PRUNE, True)})
    assert "being deleted since" in resyncs.items(first, here)["bio"].outcome

    async def told() -> bool:
        found = await resyncs.run(here)
        assert (found.state, summary(found, here)) == (RunState.DONE, {"bio": (Action.TERMINATING, False)})
        details = " ".join(resyncs.items(found, here)["bio"].details)
        return "since" in details and "example.org/pin" in details

    await pipeline.eventually(told, "age and finalizer are told")
    status = await here.in_phase("bio", Phase.TERMINATING)
    assert status.attempts == 0
    held = await here.cluster.client.request("GET", pin)
    assert held["metadata"]["finalizers"] == ["example.org/pin"]
    await here.cluster.patch(pin, {"metadata": {"finalizers": None}})
    await here.in_phase("bio", Phase.PRUNED)
    found = await resyncs.run(here)
    assert (found.state, resyncs.items(found, here)) == (RunState.DONE, {})


async def test_namespaces_of_others_are_reported_and_untouched(here: site.Site) -> None:
    """Case C03: without any mark, of another installation, and spur's own."""
    await here.add("bio", "alice")
    spurs = {marks.MANAGED_BY: marks.FIELD_MANAGER, marks.ACCOUNT: names.slug(here.name("spurs"))}
    theirs = marks.labels("another", names.slug(here.name("theirs")))
    before = {}
    for account, labels in (("legacy", {}), ("spurs", spurs), ("theirs", theirs), ("wanted", {})):
        metadata = {"name": here.namespace(account), "labels": labels}
        await here.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        before[account] = await here.live("Namespace", account)
    here.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$wanted', 'cpu=4')")
    await here.in_phase("wanted", Phase.CONFLICT)
    found = await resyncs.run(here, prune_unexplained=True)
    assert {name: item.action for name, item in resyncs.items(found, here).items()} == {
        "legacy": Action.FOREIGN,
        "spurs": Action.FOREIGN,
        "wanted": Action.CONFLICT,
    }
    for account, namespace in before.items():
        assert await here.live("Namespace", account) == namespace


async def test_an_unexplained_namespace_is_told_and_goes_only_when_it_is_meant(here: site.Site) -> None:
    await here.add("bio", "alice")
    installation = await here.bus.check_topology()
    labels = marks.labels(installation, names.slug(here.name("left")))
    metadata = {"name": here.namespace("left"), "labels": labels}
    await here.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    found = await resyncs.run(here)
    assert summary(found, here) == {"left": (Action.UNEXPLAINED, False)}
    assert "deletionTimestamp" not in (await here.live("Namespace", "left"))["metadata"]
    found = await resyncs.run(here, prune_unexplained=True)
    assert summary(found, here) == {"left": (Action.PRUNE_UNEXPLAINED, True)}
    await here.gone("left")
    assert await here.cluster.subjects(here.name("bio")) == ["spur-user-alice"]


async def test_one_account_that_cannot_be_written_does_not_stop_the_others(
    start: Start, control_plane: servers.Cluster, tmp_path: Path
) -> None:
    """Cases C07 and C08: it fails by name; afterwards it heals."""

    async def refuse(namespace: str, request: web.Request) -> web.Response | None:
        if request.method != "GET" and namespace in request.path:
            return proxy.refusal(403, "Forbidden", "not in this one")
        return None

    async with (
        proxy.before(control_plane.kubeconfigs, tmp_path) as before,
        start(before.kubeconfig, prune_grace_s=0) as here,
    ):
        for account in ("a", "b", "c", "d"):
            await here.add(account, "alice")
            await here.edit("ResourceQuota", account, marks.QUOTA_NAME, {"spec": {"hard": {"pods": "5"}}})
        await here.delete("d")
        await here.edit("ResourceQuota", "d", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "0"}}})
        before.rule = functools.partial(refuse, here.namespace("b"))
        found = await resyncs.run(here)
        assert found.state is RunState.FAILED
        items = resyncs.items(found, here)
        assert [name for name, item in items.items() if item.failed] == ["b"]
        assert "not in this one" in items["b"].outcome
        assert all(items[name].carried_out for name in ("a", "c", "d")), items
        assert found.message == ""
        status = await here.in_phase("b", Phase.DEGRADED)
        assert "ResourceQuota" in status.reason
        before.let_through()
        await compare.whole(here.bus, here.config, here.cluster)
        found = await resyncs.run(here)
        assert (found.state, resyncs.work(found)) == (RunState.DONE, [])


async def test_a_namespace_that_vanishes_during_a_resync_fails_nobody_else(
    start: Start, control_plane: servers.Cluster, tmp_path: Path
) -> None:
    """Case C07: between the lists and the writes."""
    async with (
        proxy.before(control_plane.kubeconfigs, tmp_path) as before,
        start(before.kubeconfig) as here,
    ):
        for account in ("a", "b", "c", "d", "e"):
            await here.add(account, "alice")
            await here.edit("ResourceQuota", account, marks.QUOTA_NAME, {"spec": {"hard": {"pods": "5"}}})
        removed = False

        async def vanish(request: web.Request) -> web.Response | None:
            nonlocal removed
            if not removed and request.method == "GET" and here.namespace("") in request.path:
                removed = True  # the first look of a writer: the lists are done
                await here.remove("Namespace", "c")
                await here.gone("c")
            return None

        before.rule = vanish
        found = await resyncs.run(here)
        before.let_through()
        assert removed
        items = resyncs.items(found, here)
        assert all(items[name].carried_out for name in ("a", "b", "d", "e")), items
        # Where c's own writer had been there before it vanished, the next resync makes it again.
        found = await resyncs.run(here)
        assert found.state is RunState.DONE, found
        await compare.whole(here.bus, here.config, here.cluster)


async def test_a_throttled_resync_waits_as_it_is_told(
    start: Start, control_plane: servers.Cluster, tmp_path: Path
) -> None:
    """Case C50: the server refuses everything for a while, lists and writes alike."""
    async with (
        proxy.before(control_plane.kubeconfigs, tmp_path) as before,
        start(before.kubeconfig) as here,
    ):
        accounts = [f"a{number}" for number in range(10)]
        here.sql(
            "INSERT INTO accounts (name, grp_tres) SELECT '$a' || n, 'cpu=4' FROM generate_series(0, 9) n"
        )
        await compare.whole(here.bus, here.config, here.cluster)
        for account in accounts:
            await here.edit("ResourceQuota", account, marks.QUOTA_NAME, {"spec": {"hard": {"pods": "5"}}})
        until_s = 0.0

        async def throttle(_request: web.Request) -> web.Response | None:
            nonlocal until_s
            until_s = until_s or time.monotonic() + 4
            if time.monotonic() > until_s:
                return None
            return proxy.refusal(429, "TooManyRequests", "slow down", Retry_After="1")

        before.rule = throttle
        found = await resyncs.run(here)
        assert found.state is RunState.DONE, found
        assert all(item.carried_out for item in resyncs.items(found, here).values())
        assert len(resyncs.items(found, here)) == len(accounts)
        # Told to wait a second each time: a handful of lists, not a hot loop.
        assert 0 < len(before.refused) <= 6 * 6
        await compare.whole(here.bus, here.config, here.cluster)


async def test_a_request_is_carried_out_once_however_many_listen(here: site.Site) -> None:
    await here.add("bio", "alice")
    async with (
        pipeline.background(services.resync(here.config)),
        pipeline.background(services.resync(here.config)),
    ):
        for number in range(4):
            await here.edit("ResourceQuota", "bio", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "5"}}})
            found = await resyncs.run(here)
            assert summary(found, here) == {"bio": (Action.CHANGE, True)}
            assert len(await resyncs.rechecks(here.bus, here.cluster.name)) == number + 1
    await compare.whole(here.bus, here.config, here.cluster)


async def test_a_request_outlives_the_process_that_should_have_taken_it(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> None:
    given = site.config(database_url, nats_server, control_plane, unique, resync={"prune_grace_s": 0})
    async with resyncs.running(given, unique) as here:
        await here.add("bio", "alice")
        await resyncs.run(here)
    async with jetstream.connect(given.nats, "test", "test") as bus:
        asked = await resyncs.ask(bus, unique)
    async with resyncs.running(given, unique) as here:
        found = await resyncs.ended(here.bus, unique, asked)
        assert found.state is RunState.DONE


async def test_a_request_of_another_installation_is_refused(here: site.Site) -> None:
    await here.add("bio", "alice")
    asked = await resyncs.ask(here.bus, here.cluster.name, installation="another")
    found = await resyncs.ended(here.bus, here.cluster.name, asked)
    assert (found.state, found.items) == (RunState.REFUSED, ())
    assert "another" in found.message


async def test_the_interval_runs_by_itself(start: Start) -> None:
    async with start(interval_s=1, prune_grace_s=0) as here:
        await here.add("bio", "alice")
        await here.add("chem", "bob")
        await here.delete("bio")
        await here.gone("bio")
        await here.edit("ResourceQuota", "chem", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "5"}}})

        async def undone() -> bool:
            quota = await here.live("ResourceQuota", "chem", marks.QUOTA_NAME)
            return "pods" not in quota["spec"]["hard"]

        await pipeline.eventually(undone, "the hand edit is undone")
        found = await resyncs.report(here.bus, here.cluster.name)
        assert found is not None
        assert found.requested_by == "interval"
        await compare.whole(here.bus, here.config, here.cluster)


async def test_the_report_stays(here: site.Site) -> None:
    await here.add("bio", "alice")
    ended = await resyncs.run(here)
    kept = await resyncs.report(here.bus, here.cluster.name)
    assert kept == ended
