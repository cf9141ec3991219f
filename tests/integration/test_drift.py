"""Hand edits and other managers' writes are taken back by a recheck; a pause keeps them (design rules 9 and 10)."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support import compare, resyncs, servers, site

from spur_events.consumers.plan import marks
from spur_events.local.nats import Nats
from spur_events.schemas.events import RecheckReason
from spur_events.schemas.status import Phase

RBAC = "rbac.authorization.k8s.io"
EVE = {"kind": "User", "name": "eve", "apiGroup": RBAC}


@pytest.fixture
async def here(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> AsyncIterator[site.Site]:
    async with resyncs.running(site.config(database_url, nats_server, control_plane, unique), unique) as made:
        yield made


def edited(kind: str, name: str, patch: dict[str, Any]) -> Callable[[site.Site], Awaitable[None]]:
    async def edit(here: site.Site) -> None:
        await here.edit(kind, "bio", name, patch)

    return edit


def removed(kind: str, name: str) -> Callable[[site.Site], Awaitable[None]]:
    async def remove(here: site.Site) -> None:
        await here.remove(kind, "bio", name)

    return remove


def marked(part: str, key: str, value: str | None) -> Callable[[site.Site], Awaitable[None]]:
    return edited("Namespace", "", {"metadata": {part: {key: value}}})


async def forced_quota(here: site.Site) -> None:
    """Case C14."""
    metadata = {"name": marks.QUOTA_NAME, "namespace": here.namespace("bio")}
    hard = {"requests.cpu": "99", "pods": "500"}
    await here.force(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}}
    )


async def other_role(here: site.Site) -> None:
    """Case C12."""
    await here.remove("RoleBinding", "bio", marks.BINDING_NAME)
    await here.create(
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": marks.BINDING_NAME, "namespace": here.namespace("bio")},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": "edit"},
            "subjects": [EVE],
        }
    )


async def made_by_plain_create(here: site.Site) -> None:
    """Objects of an older version that did not use server-side apply."""
    for kind, name in (
        ("ResourceQuota", marks.QUOTA_NAME),
        ("LimitRange", marks.LIMITS_NAME),
        ("Role", marks.ROLE_NAME),
        ("RoleBinding", marks.BINDING_NAME),
        ("ServiceAccount", "spur-user-alice"),
    ):
        live = await here.live(kind, "bio", name)
        await here.remove(kind, "bio", name)
        kept = {key: live["metadata"][key] for key in ("name", "namespace", "labels")}
        made = {key: value for key, value in live.items() if key != "status"} | {"metadata": kept}
        if kind == "ResourceQuota":
            made["spec"] = {"hard": {"requests.cpu": "1", "count/pods": "7"}}
        await here.create(made)


LIMIT = {"type": "Container", "default": {"cpu": "2"}, "defaultRequest": {"cpu": "1"}}
EDITS: dict[str, Callable[[site.Site], Awaitable[None]]] = {
    "quota key added": edited("ResourceQuota", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "500"}}}),
    "quota value": edited("ResourceQuota", marks.QUOTA_NAME, {"spec": {"hard": {"requests.cpu": "500"}}}),
    "quota forced by another manager": forced_quota,
    "quota deleted": removed("ResourceQuota", marks.QUOTA_NAME),
    "limits": edited("LimitRange", marks.LIMITS_NAME, {"spec": {"limits": [LIMIT]}}),
    "limits deleted": removed("LimitRange", marks.LIMITS_NAME),
    "rules": edited(
        "Role", marks.ROLE_NAME, {"rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}
    ),
    "role deleted": removed("Role", marks.ROLE_NAME),
    "subjects": edited("RoleBinding", marks.BINDING_NAME, {"subjects": [EVE]}),
    "binding to another role": other_role,
    "binding deleted": removed("RoleBinding", marks.BINDING_NAME),
    "account deleted": removed("ServiceAccount", "spur-user-alice"),
    "account without generation": edited(
        "ServiceAccount", "spur-user-alice", {"metadata": {"annotations": {marks.GENERATION: None}}}
    ),
    "account's token mounted": edited(
        "ServiceAccount", "spur-user-alice", {"automountServiceAccountToken": True}
    ),
    "account's labels": edited(
        "ServiceAccount",
        "spur-user-alice",
        {"metadata": {"labels": {marks.MANAGED_BY: None, marks.ACCOUNT: "x"}}},
    ),
    "label of an object": edited(
        "Role", marks.ROLE_NAME, {"metadata": {"labels": {marks.INSTALLATION: "other"}}}
    ),
    "installation label": marked("labels", marks.INSTALLATION, None),
    "managed-by label": marked("labels", marks.MANAGED_BY, "helm"),
    "account label": marked("labels", marks.ACCOUNT, "chem"),
    "name annotation": marked("annotations", marks.ACCOUNT_NAME, None),
    "orphan annotation": marked("annotations", marks.ORPHANED_AT, "2020-01-01T00:00:00Z"),
    "pod security": marked("labels", "pod-security.kubernetes.io/enforce", "privileged"),
    "plain create": made_by_plain_create,
}


@pytest.mark.parametrize("kind", EDITS)
async def test_drift_is_undone(here: site.Site, kind: str) -> None:
    """Cases C12, C13 and C14, and every other field of design rule 10."""
    await here.add("bio", "alice", grptres="cpu=4,mem=1000")
    stored = await compare.whole(here.bus, here.config, here.cluster)
    await EDITS[kind](here)
    assert await compare.differences(here.bus, here.config, here.cluster, stored)
    await here.recheck("bio")
    await compare.whole(here.bus, here.config, here.cluster)


async def test_marks_that_name_another_account_never_bind_it(here: site.Site) -> None:
    """Case C06, to its end: the account is deleted, and that works."""
    await here.add("bio", "alice")
    await here.add("chem", "bob")
    patch = {"metadata": {"labels": {marks.ACCOUNT: here.name("chem"), marks.INSTALLATION: None}}}
    await here.edit("Namespace", "bio", "", patch)
    await here.recheck("chem")
    assert await here.cluster.subjects(here.name("bio")) == ["spur-user-alice"]
    await here.recheck("bio")
    await compare.whole(here.bus, here.config, here.cluster)
    await here.delete("bio")
    await compare.whole(here.bus, here.config, here.cluster)


async def test_other_peoples_labels_stay(here: site.Site) -> None:
    await here.add("bio", "alice")
    await here.edit("Namespace", "bio", "", {"metadata": {"labels": {"team": "blue"}}})
    await here.edit("ResourceQuota", "bio", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "1"}}})
    await here.recheck("bio")
    assert (await here.live("Namespace", "bio"))["metadata"]["labels"]["team"] == "blue"


async def test_a_pause_keeps_drift_and_never_delays_a_revocation(here: site.Site) -> None:
    await here.add("bio", "alice", "bob")
    await here.edit("Namespace", "bio", "", {"metadata": {"annotations": {marks.RECONCILE: marks.PAUSED}}})
    await here.edit("ResourceQuota", "bio", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "500"}}})
    subjects = (await here.live("RoleBinding", "bio", marks.BINDING_NAME))["subjects"]
    await here.edit("RoleBinding", "bio", marks.BINDING_NAME, {"subjects": [*subjects, EVE]})
    status = await here.recheck("bio")
    assert (status.phase, status.retry_at) == (Phase.PAUSED, None)
    assert marks.QUOTA_NAME in status.message
    applied = status.applied
    here.sql("DELETE FROM users WHERE account = '$bio' AND name = 'bob'")
    here.sql("UPDATE accounts SET grp_tres = 'cpu=9' WHERE name = '$bio'")
    here.sql("INSERT INTO users (name, account) VALUES ('carol', '$bio')")
    status = await here.recheck("bio", RecheckReason.REQUEST)
    assert status.phase is Phase.PAUSED
    assert status.applied == applied
    account = here.name("bio")
    assert await here.cluster.subjects(account) == ["spur-user-alice", "eve"]
    assert await here.cluster.service_accounts(account) == ["spur-user-alice"]
    hard = (await here.live("ResourceQuota", "bio", marks.QUOTA_NAME))["spec"]["hard"]
    assert hard == {"requests.cpu": "4", "pods": "500"}
    await here.edit("Namespace", "bio", "", {"metadata": {"annotations": {marks.RECONCILE: None}}})
    await here.recheck("bio")
    await compare.whole(here.bus, here.config, here.cluster)


async def test_a_member_who_returns_during_a_pause_has_no_access_until_it_ends(here: site.Site) -> None:
    await here.add("bio", "alice")
    await here.edit("Namespace", "bio", "", {"metadata": {"labels": {marks.RECONCILE: marks.PAUSED}}})
    add = "INSERT INTO users (name, account) VALUES ('alice', '$bio')"
    here.sql(f"BEGIN; DELETE FROM users WHERE account = '$bio'; {add}; COMMIT")
    await here.in_phase("bio", Phase.PAUSED)
    assert await here.cluster.subjects(here.name("bio")) == []
    assert await here.cluster.service_accounts(here.name("bio")) == []
    await here.edit("Namespace", "bio", "", {"metadata": {"labels": {marks.RECONCILE: None}}})
    await here.recheck("bio")
    await compare.whole(here.bus, here.config, here.cluster)


async def test_an_account_deleted_during_a_pause_loses_access_and_nothing_else(here: site.Site) -> None:
    await here.add("bio", "alice")
    await here.edit("Namespace", "bio", "", {"metadata": {"annotations": {marks.RECONCILE: marks.PAUSED}}})
    here.sql("DELETE FROM users WHERE account = '$bio'; DELETE FROM accounts WHERE name = '$bio'")
    await here.in_phase("bio", Phase.PAUSED)
    assert (await here.prune("bio")).phase is Phase.PAUSED
    assert await here.cluster.subjects(here.name("bio")) is None
    assert await here.cluster.service_accounts(here.name("bio")) == []
    hard = (await here.live("ResourceQuota", "bio", marks.QUOTA_NAME))["spec"]["hard"]
    assert hard == {"requests.cpu": "4"}
