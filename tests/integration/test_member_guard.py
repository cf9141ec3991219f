"""The member guard in a running pipeline: it comes by itself, drift is undone, others' objects are left alone."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support import pipeline, resyncs, servers, site

from spur_events import jetstream, services
from spur_events.consumers import guard, rights
from spur_events.consumers.kube import apply, kinds
from spur_events.consumers.kube import client as kube
from spur_events.consumers.plan import guard as plan
from spur_events.local.nats import Nats
from spur_events.schemas import subjects
from spur_events.schemas.access import GuardRequest, GuardState, PartReport
from spur_events.schemas.resync import Action, Item, RunState


@pytest.fixture
async def here(
    database_url: str,
    nats_server: Nats,
    control_plane: servers.Cluster,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[site.Site]:
    monkeypatch.setattr(rights, "_SOON_S", 0.2)
    async with resyncs.running(site.config(database_url, nats_server, control_plane, unique), unique) as made:
        await made.add("lab", "alice")
        await made.guarded()
        yield made


async def edit(here: site.Site, kind: str, patch: dict[str, Any]) -> None:
    name = plan.name(await here.bus.check_topology())
    await here.cluster.patch(kinds.one(kind, name), patch)


async def remove(here: site.Site, kind: str) -> None:
    name = plan.name(await here.bus.check_topology())
    await here.cluster.client.request("DELETE", kinds.one(kind, name))


async def stands(here: site.Site) -> tuple[GuardState, str]:
    return await guard.state(here.cluster.client, await here.bus.check_topology())


async def ask(here: site.Site) -> PartReport:
    request = GuardRequest(installation=await here.bus.check_topology())
    return await here.bus.ask(subjects.guard(here.cluster.name), request, PartReport, 30.0)


async def reported(here: site.Site, part: str = "apply") -> PartReport | None:
    key = subjects.part_key(here.cluster.name, part)
    entry = await here.bus.get(subjects.STATUS_BUCKET, key, PartReport)
    return entry.value if entry else None


async def test_it_is_there_when_apply_is_ready(here: site.Site) -> None:
    assert await stands(here) == (GuardState.IN_FORCE, "")
    report = await reported(here)
    assert report is not None
    assert report.guard is GuardState.IN_FORCE
    assert report.missing_rights == ()
    answer = await ask(here)
    assert (answer.guard, answer.message) == (GuardState.IN_FORCE, "")


WEAKENED: list[tuple[str, dict[str, Any]]] = [
    (plan.BINDING, {"validationActions": ["Warn"]}),
    (plan.BINDING, {"validationActions": ["Warn", "Audit"]}),
    (plan.BINDING, {"matchResources": {"namespaceSelector": {"matchLabels": {"no": "where"}}}}),
    (plan.BINDING, {"matchResources": {"objectSelector": {"matchLabels": {"no": "thing"}}}}),
    (plan.BINDING, {"policyName": "another"}),
    (plan.POLICY, {"failurePolicy": "Ignore"}),
    (plan.POLICY, {"matchConditions": [{"name": "never", "expression": "false"}]}),
    (plan.POLICY, {"validations": [{"expression": "true"}]}),
]


async def test_what_somebody_weakens_is_undone(here: site.Site) -> None:
    for kind, spec in WEAKENED:
        await edit(here, kind, {"spec": spec})
        state, message = await stands(here)
        assert state is GuardState.MISSING, spec
        assert next(iter(spec)) in message
        answer = await ask(here)
        assert (answer.guard, answer.message) == (GuardState.IN_FORCE, ""), spec
        assert await stands(here) == (GuardState.IN_FORCE, "")


async def test_what_somebody_deletes_is_made_again(here: site.Site) -> None:
    for kind in (plan.POLICY, plan.BINDING):
        await remove(here, kind)
        assert (await stands(here))[0] is GuardState.MISSING
        assert (await ask(here)).guard is GuardState.IN_FORCE
        assert await stands(here) == (GuardState.IN_FORCE, "")


async def test_a_foreign_object_of_the_name_is_told_and_left_alone(here: site.Site) -> None:
    mark = {"metadata": {"labels": {"spur.amd.com/installation": None}}, "spec": {"failurePolicy": "Ignore"}}
    await edit(here, plan.POLICY, mark)
    answer = await ask(here)
    assert answer.guard is GuardState.MISSING
    assert "does not carry this installation's mark" in answer.message
    name = plan.name(await here.bus.check_topology())
    found = await here.cluster.get(plan.POLICY, name)
    assert found is not None
    assert found["spec"]["failurePolicy"] == "Ignore"


async def test_what_was_in_the_way_at_the_start_is_looked_at_again_soon(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> None:
    """Until then no kubeconfig is given: nobody should wait for the look of the next minute, or have to ask."""
    given = site.config(database_url, nats_server, control_plane, unique)
    foreign = plan.manifests(pipeline.installation(given))[0]
    del foreign["metadata"]["labels"]
    async with kube.Client(given.kubernetes) as client:
        await apply.apply(client, foreign)
        async with site.running(given, unique) as here:
            assert (await reported(here)) is not None
            assert (await stands(here))[0] is GuardState.MISSING
            await client.request("DELETE", kinds.of(foreign))

            async def mended() -> bool:
                return await stands(here) == (GuardState.IN_FORCE, "")

            await pipeline.eventually(mended, "the guard is written", 30.0)


async def test_a_request_of_another_installation_is_refused(here: site.Site) -> None:
    with pytest.raises(Exception, match="asked by installation other"):
        await here.bus.ask(
            subjects.guard(here.cluster.name), GuardRequest(installation="other"), PartReport, 30.0
        )


def about_the_guard(found: list[Item]) -> list[Item]:
    return [item for item in found if not item.namespace]


async def test_a_resync_plans_and_has_it_mended(here: site.Site) -> None:
    assert about_the_guard(list((await resyncs.run(here)).items)) == []
    await edit(here, plan.BINDING, {"spec": {"validationActions": ["Audit"]}})
    await remove(here, plan.POLICY)
    dry = await resyncs.run(here, dry_run=True)
    actions = {item.action: item for item in about_the_guard(list(dry.items))}
    assert set(actions) == {Action.CHANGE, Action.CREATE}
    assert "validationActions" in actions[Action.CHANGE].details[0]
    assert plan.POLICY in actions[Action.CREATE].details[0]
    assert (await stands(here))[0] is GuardState.MISSING, "a dry run changes nothing"
    done = await resyncs.run(here)
    assert done.state is RunState.DONE
    assert all(item.carried_out and item.outcome == "in force" for item in about_the_guard(list(done.items)))
    assert await stands(here) == (GuardState.IN_FORCE, "")


async def test_apply_may_come_a_little_later_than_the_resync_that_asks_it(
    database_url: str,
    nats_server: Nats,
    control_plane: servers.Cluster,
    unique: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As at a start of all parts together."""
    given = site.config(database_url, nats_server, control_plane, unique)
    await pipeline.may_guard(given)
    caplog.set_level(logging.DEBUG, logger="spur_events.retrying")
    async with (
        pipeline.part(services.relay, given),
        jetstream.connect(given.nats, "test", "test") as bus,
        kube.Client(given.kubernetes) as client,
    ):
        installation = await bus.check_topology()
        planned = await guard.items(client, installation)
        asked = asyncio.create_task(guard.mended(bus, given.kubernetes.cluster, installation, planned))

        async def waiting() -> bool:
            return any(getattr(one, "policy", "") == "have the member guard mended" for one in caplog.records)

        await pipeline.eventually(waiting, "nobody is there to be asked yet")
        async with pipeline.part(services.apply, given):
            done = await asked
    assert len(done) == 2
    assert all(item.carried_out for item in done.values())


async def test_two_installations_keep_apart(here: site.Site) -> None:
    other = f"{await here.bus.check_topology()}-2"
    for manifest in plan.manifests(other):
        await apply.apply(here.cluster.client, manifest)
    assert about_the_guard(list((await resyncs.run(here)).items)) == []
    await remove(here, plan.BINDING)
    assert (await ask(here)).guard is GuardState.IN_FORCE
    assert await guard.state(here.cluster.client, other) == (GuardState.IN_FORCE, "")
    for manifest in plan.manifests(other):
        await here.cluster.client.request("DELETE", kinds.of(manifest))


async def test_a_cluster_that_does_not_enforce_it_is_found_out(here: site.Site) -> None:
    """As where the admission plugin is off: the objects are there and refuse nothing."""
    namespace = kinds.one("Namespace", here.namespace("lab"))
    label = {"metadata": {"labels": {"spur.amd.com/installation": "elsewhere"}}}
    await here.cluster.patch(namespace, label)

    async def found_out() -> bool:
        answer = await ask(here)
        return answer.guard is GuardState.MISSING and "does not enforce it" in answer.message

    await pipeline.eventually(found_out, "the guard is found to be without effect")
    own = await here.bus.check_topology()
    await here.cluster.patch(namespace, {"metadata": {"labels": {"spur.amd.com/installation": own}}})

    async def again() -> bool:
        return (await ask(here)).guard is GuardState.IN_FORCE

    await pipeline.eventually(again, "the guard is proven again")


async def test_the_services_have_all_rights_and_no_more(here: site.Site) -> None:
    for part in ("apply", "resync"):
        report = await reported(here, part)
        assert report is not None
        assert report.missing_rights == ()
    async with kube.Client(here.config.kubernetes, "apply") as client:
        assert await guard.state(client, await here.bus.check_topology()) == (GuardState.IN_FORCE, "")
