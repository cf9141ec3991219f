"""Deleted accounts: closed at once, pruned after the grace and never by mistake (design rules 11 to 13); adoption."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from support import compare, pipeline, resyncs, servers, site

from spur_events import settings
from spur_events.consumers.kube import kinds
from spur_events.consumers.plan import desired, marks, steps
from spur_events.local.nats import Nats
from spur_events.schemas import names, subjects
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.events import RecheckReason
from spur_events.schemas.status import Phase

Start = Callable[..., AbstractAsyncContextManager[site.Site]]


@pytest.fixture
def start(database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str) -> Start:
    def running(**resync: Any) -> AbstractAsyncContextManager[site.Site]:
        given = site.config(database_url, nats_server, control_plane, unique, resync=resync)
        return resyncs.running(given, unique)

    return running


@pytest.fixture
def given(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> settings.Settings:
    """No grace: what is closed may be deleted at once."""
    return site.config(database_url, nats_server, control_plane, unique, resync={"prune_grace_s": 0})


@pytest.fixture
async def here(start: Start) -> AsyncIterator[site.Site]:
    """No grace: what is closed may be deleted at once."""
    async with start(prune_grace_s=0) as made:
        yield made


async def test_a_deleted_account_is_closed_then_pruned(here: site.Site) -> None:
    await here.add("bio", "alice")
    closed = await here.delete("bio")
    assert closed.phase is Phase.CLOSED
    uid = (await here.live("Namespace", "bio"))["metadata"]["uid"]
    status = await here.prune("bio")
    assert status.phase in {Phase.TERMINATING, Phase.PRUNED}
    assert status.namespace_uid == uid
    await here.gone("bio")
    status = await here.in_phase("bio", Phase.PRUNED)
    assert status.settled
    await compare.whole(here.bus, here.config, here.cluster)


async def test_within_the_grace_nothing_is_pruned(start: Start) -> None:
    async with start(prune_grace_s=3600) as here:
        await here.add("bio", "alice")
        await here.delete("bio")
        status = await here.prune("bio")
        assert (status.phase, status.reason) == (Phase.CLOSED, "Kept")
        assert "grace ends at" in status.message
        await compare.whole(here.bus, here.config, here.cluster)


async def test_a_retained_namespace_is_closed_and_kept(here: site.Site) -> None:
    await here.add("bio", "alice")
    await here.edit("Namespace", "bio", "", {"metadata": {"labels": {marks.RETAIN: "true"}}})
    closed = await here.delete("bio")
    assert closed.retained
    status = await here.prune("bio")
    assert (status.phase, status.retained) == (Phase.CLOSED, True)
    assert marks.RETAIN in status.message
    assert await here.cluster.subjects(here.name("bio")) is None


async def test_a_plan_about_another_namespace_or_account_deletes_nothing(here: site.Site) -> None:
    await here.add("bio")
    await here.delete("bio")
    for plan in ({"uid": "another"}, {"incarnation": "another"}):
        status = await here.prune("bio", **plan)
        assert (status.phase, status.reason) == (Phase.CLOSED, "Kept")
    assert "deletionTimestamp" not in (await here.live("Namespace", "bio"))["metadata"]


async def test_an_account_that_returns_between_plan_and_prune_keeps_its_data(here: site.Site) -> None:
    await here.add("bio", "alice")
    await here.delete("bio")
    state = await pipeline.state(here.bus, here.name("bio"))
    uid = (await here.live("Namespace", "bio"))["metadata"]["uid"]
    assert state is not None
    here.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    status = await here.recheck("bio", RecheckReason.PRUNE, uid=uid, incarnation=state.incarnation)
    assert status.phase is Phase.APPLIED
    # Deleted again: the old plan is about an account that is no more.
    await here.delete("bio")
    status = await here.recheck("bio", RecheckReason.PRUNE, uid=uid, incarnation=state.incarnation)
    assert status.reason == "Kept"
    assert "earlier account" in status.message
    assert (await here.live("Namespace", "bio"))["metadata"]["uid"] == uid


async def test_a_namespace_with_drift_is_closed_first(here: site.Site) -> None:
    await here.add("bio")
    await here.delete("bio")
    await here.edit("Namespace", "bio", "", {"metadata": {"annotations": {marks.ORPHANED_AT: None}}})
    status = await here.prune("bio")
    assert (status.phase, status.reason) == (Phase.CLOSED, "Kept")
    await compare.whole(here.bus, here.config, here.cluster)
    await here.prune("bio")
    await here.gone("bio")


async def test_a_namespace_that_something_holds_is_waited_for_and_never_forced(here: site.Site) -> None:
    """Case C05: asked twice; no errors are counted, and its end is noticed."""
    await here.add("bio", "alice")
    pin = await here.pin("bio")
    await here.delete("bio")
    for _ in range(2):
        status = await here.prune("bio")
        assert (status.phase, status.attempts) == (Phase.TERMINATING, 0)
        assert "being deleted since" in status.message

    async def names_it() -> bool:
        status = await here.recheck("bio")
        return "example.org/pin" in status.message and status.attempts == 0

    await pipeline.eventually(names_it, "the finalizer is named")
    await here.cluster.patch(pin, {"metadata": {"finalizers": None}})
    await here.in_phase("bio", Phase.PRUNED)


async def test_an_account_that_returns_while_its_namespace_goes_is_made_anew(here: site.Site) -> None:
    """Case C10."""
    await here.add("bio", "alice")
    pin = await here.pin("bio")
    await here.delete("bio")
    await here.prune("bio")
    here.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=5')")
    status = await here.recheck("bio")
    assert (status.phase, status.attempts) == (Phase.TERMINATING, 0)
    await here.cluster.patch(pin, {"metadata": {"finalizers": None}})
    await here.in_phase("bio", Phase.APPLIED)
    await compare.whole(here.bus, here.config, here.cluster)


async def test_a_missing_right_to_delete_is_told_and_the_namespace_stays(here: site.Site) -> None:
    """The API server refuses the deletion, here by a policy."""
    await here.add("bio")
    await here.delete("bio")
    policies = "/apis/admissionregistration.k8s.io/v1"
    name = here.namespace("bio")
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["DELETE"],
                        "resources": ["namespaces"],
                    }
                ]
            },
            "validations": [{"expression": f"request.name != '{name}'", "message": "not this one"}],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    client = here.cluster.client
    await client.request("POST", f"{policies}/validatingadmissionpolicies", body=policy)
    await client.request("POST", f"{policies}/validatingadmissionpolicybindings", body=binding)
    try:

        async def refused() -> bool:
            try:
                path = kinds.one("Namespace", name)
                await client.request("DELETE", path, query={"dryRun": "All"})
            except Exception as error:  # noqa: BLE001 - whatever the server says
                return "not this one" in str(error)
            return False

        await pipeline.eventually(refused, "the policy is in force")
        status = await here.prune("bio")
        assert (status.phase, status.reason) == (Phase.CLOSED, "NotPruned")
        assert "not this one" in status.message
    finally:
        await client.request("DELETE", f"{policies}/validatingadmissionpolicybindings/{name}")
        await client.request("DELETE", f"{policies}/validatingadmissionpolicies/{name}")


async def test_an_unexplained_namespace_goes_only_when_it_is_meant(here: site.Site) -> None:
    slug = names.slug(here.name("left"))
    installation = await here.bus.check_topology()
    labels = marks.labels(installation, slug)
    annotations = {marks.ACCOUNT_NAME: here.name("left")}
    metadata = {"name": here.namespace("left"), "labels": labels, "annotations": annotations}
    await here.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    uid = (await here.live("Namespace", "left"))["metadata"]["uid"]
    for reason, wrong in (
        (RecheckReason.RESYNC, uid),
        (RecheckReason.PRUNE, uid),
        (RecheckReason.PRUNE_UNEXPLAINED, "another"),
    ):
        status = await here.recheck("left", reason, uid=wrong)
        assert (status.phase, status.reason) == (Phase.CONFLICT, "Unexplained")
        assert (status.name, status.retry_at) == (here.name("left"), None)
    await here.edit("Namespace", "left", "", {"metadata": {"annotations": {marks.RETAIN: "true"}}})
    status = await here.recheck("left", RecheckReason.PRUNE_UNEXPLAINED, uid=uid)
    assert marks.RETAIN in status.message
    await here.edit("Namespace", "left", "", {"metadata": {"annotations": {marks.RETAIN: None}}})
    await here.recheck("left", RecheckReason.PRUNE_UNEXPLAINED, uid=uid)
    await here.gone("left")
    await here.in_phase("left", Phase.PRUNED)


async def test_a_foreign_namespace_is_never_unexplained(here: site.Site) -> None:
    """Case C03: another installation's, and one without any mark."""
    other = marks.labels("another", names.slug(here.name("theirs")))
    for account, labels in (("theirs", other), ("legacy", {})):
        metadata = {"name": here.namespace(account), "labels": labels}
        await here.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        before = await here.live("Namespace", account)
        await here.recheck(account, RecheckReason.PRUNE_UNEXPLAINED, uid=before["metadata"]["uid"])
        assert await here.live("Namespace", account) == before


async def test_an_account_that_exists_is_not_pruned_as_unexplained(here: site.Site) -> None:
    await here.add("bio", "alice")
    uid = (await here.live("Namespace", "bio"))["metadata"]["uid"]
    status = await here.recheck("bio", RecheckReason.PRUNE_UNEXPLAINED, uid=uid)
    assert status.phase is Phase.APPLIED
    await compare.whole(here.bus, here.config, here.cluster)


async def test_an_emptied_bucket_deletes_nothing(given: settings.Settings, unique: str) -> None:
    async with site.running(given, unique) as here:
        await here.add("bio", "alice")
        before = await here.live("Namespace", "bio")
    async with site.without_relay(given, unique) as here:  # a relay would fill it again
        slug = names.slug(here.name("bio"))
        entry = await here.bus.get(subjects.ACCOUNTS_BUCKET, slug, AccountState)
        assert entry is not None
        await here.bus.delete(subjects.ACCOUNTS_BUCKET, slug, last=entry.sequence)
        uid, incarnation = before["metadata"]["uid"], entry.value.incarnation
        for reason in (RecheckReason.RESYNC, RecheckReason.PRUNE):
            await here.recheck("bio", reason, uid=uid, incarnation=incarnation)
        assert await here.cluster.subjects(here.name("bio")) == ["spur-user-alice"]
        assert (await here.live("Namespace", "bio"))["metadata"]["uid"] == uid
    async with site.running(given, unique) as here:
        await compare.whole(here.bus, here.config, here.cluster)
        assert (await here.live("Namespace", "bio"))["metadata"]["uid"] == uid


async def spurs_own(here: site.Site, account: str, *users: str) -> None:
    """Leave what spur's own reconciler leaves: no installation, no original names, no generations."""
    slug = names.slug(here.name(account))
    labels = {marks.MANAGED_BY: marks.FIELD_MANAGER, marks.ACCOUNT: slug}
    place = here.namespace(account)
    inside = {"namespace": place, "labels": labels}
    rbac = "rbac.authorization.k8s.io"
    namespace = {"name": place, "labels": labels | marks.POD_SECURITY}
    made: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": namespace},
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": marks.QUOTA_NAME, **inside},
            "spec": {"hard": {"requests.cpu": "2", "limits.cpu": "2"}},
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": marks.BINDING_NAME, **inside},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": marks.ROLE_NAME},
            "subjects": [
                {"kind": "ServiceAccount", "name": f"spur-user-{user}", "namespace": place} for user in users
            ],
        },
    ]
    for user in users:
        metadata = {"name": f"spur-user-{user}", **inside}
        made.append({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    for manifest in made:
        await here.force(manifest, manager=marks.FIELD_MANAGER)


async def test_spurs_own_namespace_is_adopted_and_none_of_its_tokens_lives_on(here: site.Site) -> None:
    await spurs_own(here, "bio", "alice", "mallory")
    before = await here.live("Namespace", "bio")
    old = await here.live("ServiceAccount", "bio", "spur-user-alice")
    here.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    here.sql("INSERT INTO users (name, account) VALUES ('alice', '$bio')")
    assert (await here.in_phase("bio", Phase.CONFLICT)).reason == "ForeignNamespace"
    assert await here.live("Namespace", "bio") == before
    status = await here.recheck("bio", RecheckReason.ADOPT)
    assert status.phase is Phase.APPLIED
    await compare.whole(here.bus, here.config, here.cluster)
    assert (await here.live("Namespace", "bio"))["metadata"]["uid"] == before["metadata"]["uid"]
    new = await here.live("ServiceAccount", "bio", "spur-user-alice")
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert await here.cluster.service_accounts(here.name("bio")) == ["spur-user-alice"]


async def test_another_installations_namespace_is_not_adopted(here: site.Site) -> None:
    theirs = AccountState(
        installation="another", revision=(1, 1), name=here.name("bio"), incarnation="i", members=()
    )
    plan = desired.objects(theirs, here.config.quota)
    for manifest in (plan.namespace, *steps.members_of(plan)):
        await here.force(manifest, manager=marks.FIELD_MANAGER)
    before = await here.live("Namespace", "bio")
    here.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    await here.in_phase("bio", Phase.CONFLICT)
    status = await here.recheck("bio", RecheckReason.ADOPT)
    assert (status.phase, status.reason) == (Phase.CONFLICT, "ForeignInstallation")
    assert "another" in status.message
    assert await here.live("Namespace", "bio") == before


async def test_every_recheck_of_a_resync_is_answered_even_when_nothing_changed(here: site.Site) -> None:
    await here.add("bio", "alice")
    versions = [
        (await here.live(kind, "bio", name))["metadata"]["resourceVersion"]
        for kind, name in (("Namespace", ""), ("RoleBinding", marks.BINDING_NAME))
    ]
    first = await here.recheck("bio")
    again = await here.recheck("bio", RecheckReason.REQUEST)
    assert again.handled_sequence > first.handled_sequence
    assert versions == [
        (await here.live(kind, "bio", name))["metadata"]["resourceVersion"]
        for kind, name in (("Namespace", ""), ("RoleBinding", marks.BINDING_NAME))
    ]
