"""Writes on a real API server: what apply makes whole, what it must replace, what it refuses (C12 to C14)."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support import pipeline, tcp

from spur_events import settings
from spur_events.consumers import passes
from spur_events.consumers.kube import apply, connection, errors, kinds, observe
from spur_events.consumers.kube import client as kube
from spur_events.consumers.plan import desired, diff, marks, observed, steps
from spur_events.schemas import accounts, names, tres
from spur_events.schemas.status import Phase

OTHER_UID = "11111111-1111-1111-1111-111111111111"


@pytest.fixture
async def client(control_plane: Any) -> AsyncIterator[kube.Client]:
    async with kube.Client(settings.Kubernetes(kubeconfig=control_plane.kubeconfig)) as made:
        yield made


def plan_of(
    name: str, grptres: str = "cpu=4,mem=1000,gres/gpu=8", members: dict[str, str] | None = None
) -> desired.Plan:
    return desired.objects(state_of(name, grptres, members), settings.Quota())


def state_of(
    name: str, grptres: str = "cpu=4,mem=1000,gres/gpu=8", members: dict[str, str] | None = None
) -> accounts.AccountState:
    return accounts.AccountState(
        installation=name,
        revision=accounts.Revision(1, 1),
        name=name,
        incarnation="i",
        allocation=accounts.Allocation(limits=tres.parse(grptres)),
        members=tuple(accounts.Member(name=user, generation=g) for user, g in (members or {}).items()),
    )


def objects(plan: desired.Plan) -> list[marks.Manifest]:
    some = (plan.quota, plan.limits, plan.role, plan.binding)
    return [plan.namespace, *(one for one in some if one is not None), *plan.service_accounts]


def some(manifest: marks.Manifest | None) -> marks.Manifest:
    assert manifest is not None
    return manifest


async def create(client: kube.Client, plan: desired.Plan) -> None:
    for manifest in objects(plan):
        await apply.apply(client, manifest)


async def edit(client: kube.Client, manifest: marks.Manifest, patch: Any) -> marks.Manifest:
    """Change an object as `kubectl edit` does: another manager, no apply."""
    return await client.request(
        "PATCH",
        kinds.of(manifest),
        query={"fieldManager": "kubectl-edit"},
        body=patch,
        content_type=kube.MERGE_PATCH,
    )


async def test_all_objects_are_as_planned_and_applying_again_changes_nothing(
    client: kube.Client, unique: str
) -> None:
    plan = plan_of(unique, members={"alice": "g1", "Bob.X": "g1"})
    for manifest in objects(plan):
        first = await apply.apply(client, manifest)
        assert diff.differs(manifest, first) == []
    for manifest in objects(plan):
        if manifest["kind"] == "ResourceQuota":
            continue  # its version moves with the status, which the controller writes
        before = some(await apply.get(client, manifest["kind"], *_place(manifest)))
        again = await apply.apply(client, manifest)
        assert again["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def _place(manifest: marks.Manifest) -> tuple[str, str]:
    return manifest["metadata"]["name"], manifest["metadata"].get("namespace", "")


async def test_what_others_added_is_removed(client: kube.Client, unique: str) -> None:
    """C13, and a mark of ours that somebody else set."""
    plan = plan_of(unique, members={"alice": "g1"})
    await create(client, plan)
    quota, limits, role, binding = (some(x) for x in (plan.quota, plan.limits, plan.role, plan.binding))
    await edit(client, quota, {"spec": {"hard": {"pods": "500", "requests.storage": "1Gi"}}})
    await edit(client, limits, {"spec": {"limits": [{"type": "Container", "default": {"cpu": "2"}}]}})
    await edit(client, role, {"rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]})
    eve = {"kind": "User", "name": "eve", "apiGroup": "rbac.authorization.k8s.io"}
    await edit(client, binding, {"subjects": [eve]})
    await edit(
        client,
        plan.namespace,
        {"metadata": {"annotations": {marks.ORPHANED_AT: "x", "their/own": "y"}, "labels": {"team": "z"}}},
    )
    for manifest in objects(plan):
        live = await apply.apply(client, manifest)
        assert diff.differs(manifest, live) == []
    namespace = some(await apply.get(client, "Namespace", plan.namespace["metadata"]["name"]))
    assert namespace["metadata"]["annotations"]["their/own"] == "y"
    assert namespace["metadata"]["labels"]["team"] == "z"


async def test_subjects_of_others_go_where_there_are_no_members(client: kube.Client, unique: str) -> None:
    plan = plan_of(unique)
    await create(client, plan)
    eve = {"kind": "User", "name": "eve", "apiGroup": "rbac.authorization.k8s.io"}
    await edit(client, some(plan.binding), {"subjects": [eve]})
    live = await apply.apply(client, some(plan.binding))
    assert not live.get("subjects")


async def test_another_managers_applied_fields_are_taken_back(client: kube.Client, unique: str) -> None:
    """C14: forced by somebody else's server-side apply, a value and a key of the quota."""
    plan = plan_of(unique, "cpu=16")
    await create(client, plan)
    quota = some(plan.quota)
    forced = {
        **{key: quota[key] for key in ("apiVersion", "kind")},
        "metadata": {"name": marks.QUOTA_NAME},
        "spec": {"hard": {"requests.cpu": "99", "pods": "7"}},
    }
    other = {"fieldManager": "terraform", "force": "true"}
    path = kinds.of(quota)
    taken = await client.request(
        "PATCH", path, query=other, body=forced, content_type="application/apply-patch+yaml"
    )
    assert taken["spec"]["hard"]["requests.cpu"] == "99"
    assert observed.other_managers(taken) == ("terraform",)
    live = await apply.apply(client, quota)
    assert live["spec"]["hard"] == {"requests.cpu": "16"}
    assert observed.other_managers(live) == ()


async def test_dropped_keys_and_annotations_go(client: kube.Client, unique: str) -> None:
    """C15: a cleared limit is no key any more, and a reopened account no orphan."""
    await create(client, plan_of(unique))
    live = await apply.apply(client, some(plan_of(unique, "cpu=4,mem=1000").quota))
    assert set(live["spec"]["hard"]) == {"requests.cpu", "requests.memory"}
    live = await apply.apply(client, some(plan_of(unique, "cpu=-1").quota))
    assert not live["spec"].get("hard")
    plan = plan_of(unique)
    orphan = {**plan.namespace, "metadata": {**plan.namespace["metadata"]}}
    orphan["metadata"]["annotations"] = {**orphan["metadata"]["annotations"], marks.ORPHANED_AT: "2026"}
    await apply.apply(client, orphan)
    live = await apply.apply(client, plan.namespace)
    assert marks.ORPHANED_AT not in live["metadata"]["annotations"]


async def test_a_role_binding_to_another_role_is_replaced_once(client: kube.Client, unique: str) -> None:
    """C12."""
    plan = plan_of(unique, members={"alice": "g1", "bob": "g1"})
    await apply.apply(client, plan.namespace)
    binding = some(plan.binding)
    old = {**binding, "roleRef": {**binding["roleRef"], "name": "spur-old-editor"}, "subjects": []}
    before = await apply.apply(client, old)
    client.counts.clear()
    after = await apply.apply(client, binding)
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert diff.differs(binding, after) == []
    assert client.counts["DELETE"] == client.counts["POST"] == 1
    # What a POST created can still be changed by apply, members removed and all.
    live = await apply.apply(client, some(plan_of(unique).binding))
    assert not live.get("subjects")


async def test_a_binding_that_a_finalizer_holds_is_waited_for(client: kube.Client, unique: str) -> None:
    plan = plan_of(unique)
    await apply.apply(client, plan.namespace)
    binding = some(plan.binding)
    old = {**binding, "roleRef": {**binding["roleRef"], "name": "spur-old-editor"}}
    await apply.apply(client, old)
    await edit(client, binding, {"metadata": {"finalizers": ["example.com/hold"]}})
    with pytest.raises(errors.ConflictError, match=r"example\.com/hold"):
        await apply.apply(client, binding)
    await edit(client, binding, {"metadata": {"finalizers": None}})
    assert diff.differs(binding, await apply.apply(client, binding)) == []


@pytest.mark.parametrize(
    "spec",
    [
        {"hard": {"pods": "5"}, "scopes": ["BestEffort"]},  # our keys are not valid with this one
        {"hard": {"requests.cpu": "4", "pods": "5"}, "scopes": ["NotTerminating"]},
        {
            "hard": {"pods": "5"},
            "scopeSelector": {"matchExpressions": [{"scopeName": "Terminating", "operator": "Exists"}]},
        },
    ],
)
async def test_a_quota_with_scopes_is_replaced(client: kube.Client, unique: str, spec: Any) -> None:
    """It would count only some pods, and scopes cannot be changed."""
    plan = plan_of(unique)
    await apply.apply(client, plan.namespace)
    quota = some(plan.quota)
    await client.request(
        "POST",
        kinds.collection("ResourceQuota", quota["metadata"]["namespace"]),
        body={**quota, "spec": spec},
    )
    live = await apply.apply(client, quota)
    assert diff.differs(quota, live) == []


async def test_an_object_that_is_being_deleted_does_not_count_as_applied(
    client: kube.Client, unique: str
) -> None:
    plan = plan_of(unique)
    await create(client, plan)
    role = some(plan.role)
    live = await edit(client, role, {"metadata": {"finalizers": ["example.com/hold"]}})
    await apply.delete(client, live)
    with pytest.raises(errors.ConflictError, match=r"being deleted.*example\.com/hold"):
        await apply.apply(client, role)
    held = some(await apply.get(client, "Role", *_place(role)))
    assert diff.differs(role, held) == ["metadata.deletionTimestamp"]
    await edit(client, role, {"metadata": {"finalizers": None}})
    assert diff.differs(role, await apply.apply(client, role)) == []


async def test_preconditions(client: kube.Client, unique: str) -> None:
    plan = plan_of(unique)
    with pytest.raises(errors.NotFoundError):
        await apply.apply(client, some(plan.quota))
    with pytest.raises(errors.ConflictError):  # absent: not created in place of the one that was seen
        await apply.apply(client, plan.namespace, uid=OTHER_UID)
    live = await apply.apply(client, plan.namespace)
    uid, version = live["metadata"]["uid"], live["metadata"]["resourceVersion"]
    with pytest.raises(errors.ConflictError):
        await apply.apply(client, plan.namespace, uid=OTHER_UID)
    changed = await edit(client, plan.namespace, {"metadata": {"labels": {"team": "x"}}})
    with pytest.raises(errors.ConflictError):
        await apply.apply(client, plan.namespace, uid=uid, resource_version=version)
    newer = changed["metadata"]["resourceVersion"]
    await apply.apply(client, plan.namespace, uid=uid, resource_version=newer)
    with pytest.raises(errors.ConflictError):
        await apply.delete(client, {**live, "metadata": {**live["metadata"], "uid": OTHER_UID}})
    with pytest.raises(ValueError, match="needs uid"):
        await apply.apply(client, plan.namespace, resource_version=newer)


async def test_a_namespace_that_came_since_it_was_seen_absent_is_left_as_it_is(
    client: kube.Client, unique: str
) -> None:
    """A worker that froze between its look and its write brings nothing back, and takes nobody's namespace (C36)."""
    plan = plan_of(unique)
    todo = steps.Steps(changed=tuple(steps.members_of(plan)))
    state = state_of(unique)
    assert (await passes.carry_out(client, plan, state, todo)).phase in (None, Phase.PENDING)
    newer = desired.objects(state.model_copy(update={"revision": accounts.Revision(1, 2)}), settings.Quota())
    before = await apply.apply(client, newer.namespace)
    with pytest.raises(errors.ConflictError):
        await passes.carry_out(client, plan, state, todo)
    assert await apply.get(client, "Namespace", *_place(plan.namespace)) == before


async def test_what_was_created_by_apply_is_owned_as_later_applies_own_it(
    client: kube.Client, unique: str
) -> None:
    live = await apply.create(client, plan_of(unique).namespace)
    managers = [(one["manager"], one["operation"]) for one in live["metadata"]["managedFields"]]
    assert managers == [(marks.FIELD_MANAGER, "Apply")]


async def test_a_new_generation_is_a_new_service_account(client: kube.Client, unique: str) -> None:
    plan = plan_of(unique, members={"alice": "g1"})
    await create(client, plan)
    [manifest] = plan.service_accounts
    first = await apply.ensure_service_account(client, manifest)
    same = await apply.ensure_service_account(client, manifest)
    assert same["metadata"]["uid"] == first["metadata"]["uid"]
    token = await _token(client, manifest)
    assert await _authenticated(client, token)
    [newer] = plan_of(unique, members={"alice": "g2"}).service_accounts
    second = await apply.ensure_service_account(client, newer, live=same)
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert diff.differs(newer, second) == []
    assert diff.differs(newer, await apply.ensure_service_account(client, newer)) == []
    # The server keeps the answer about a token for 10 s; access itself ends with the subject (design rule 14).
    for _ in range(40):
        if not await _authenticated(client, token):
            break
        await asyncio.sleep(0.5)
    else:
        pytest.fail("the token of the old ServiceAccount is still accepted after 20 s")


async def _token(client: kube.Client, manifest: marks.Manifest) -> str:
    answer = await client.request(
        "POST",
        kinds.of(manifest) + "/token",
        body={"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}},
    )
    return str(answer["status"]["token"])


async def _authenticated(client: kube.Client, token: str) -> bool:
    review = await client.request(
        "POST",
        "/apis/authentication.k8s.io/v1/tokenreviews",
        body={
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token},
        },
    )
    return bool(review["status"].get("authenticated"))


async def test_a_terminating_namespace(client: kube.Client, unique: str) -> None:
    """What is there can be updated, nothing can be created, and what holds it is told (C05, C10)."""
    plan = plan_of(unique)
    await apply.apply(client, plan.namespace)
    live = await apply.apply(client, some(plan.role))
    await edit(client, some(plan.role), {"metadata": {"finalizers": ["example.com/hold"]}})
    assert observed.terminating(live) is None
    namespace = some(await apply.get(client, "Namespace", plan.namespace["metadata"]["name"]))
    assert await apply.delete(client, namespace)
    try:
        with pytest.raises(errors.NamespaceTerminatingError):
            await apply.apply(client, some(plan.quota))
        held = await apply.apply(client, plan.namespace)
        found = observed.terminating(held)
        assert found is not None
        assert found.since == held["metadata"]["deletionTimestamp"]
        assert found.held_by
        # A namespace is deleted by its UID: deleting it again is no error.
        assert await apply.delete(client, namespace)
    finally:
        await edit(client, some(plan.role), {"metadata": {"finalizers": None}})


async def test_observe_and_list(client: kube.Client, unique: str) -> None:
    plan = plan_of(unique, members={"alice": "g1", "bob": "g1"})
    namespace = plan.namespace["metadata"]["name"]
    assert await observe.observe(client, namespace, unique, unique) == observed.Observed(namespace=None)
    await create(client, plan)
    bob = next(one for one in plan.service_accounts if one["metadata"]["name"].endswith("bob"))
    await edit(client, bob, {"metadata": {"labels": {marks.INSTALLATION: None, marks.MANAGED_BY: None}}})
    found = await observe.observe(client, namespace, unique, unique)
    assert diff.differs(some(plan.quota), some(found.quota)) == []
    assert diff.differs(some(plan.binding), some(found.binding)) == []
    assert [one["metadata"]["name"] for one in found.service_accounts] == [names.service_account("alice")]
    assert [one["metadata"]["name"] for one in found.unmarked_service_accounts] == ["spur-user-bob"]
    assert observed.owner(some(found.namespace), unique) == "ours"
    assert observed.owner(some(found.namespace), "another") == "foreign"
    client.counts.clear()
    listed = await observe.list_all(client, "ServiceAccount", selector=f"{marks.ACCOUNT}={unique}", page=1)
    assert len(listed) == 2
    assert client.counts["GET"] >= 2
    assert {one["kind"] for one in listed} == {"ServiceAccount"}


@pytest.mark.parametrize(
    "suffix",
    [
        *("_lab", "-lab", "lab-", "LAB", "___", "Physics_Lab", "physics.lab", "a.b", "a b", "*", ">", "a..b"),
        *(
            "\u00fc\u4e2d\U0001f600",
            "tab\tnewline\n",
            "\x00\x01\x7f\x85\x9f\ufeff\uffff",
            "<&>\u2028",
            "x" * 300,
            "\ud800",
            "'\";--",
        ),
    ],
)
async def test_any_name_becomes_objects_that_stay_as_planned(
    client: kube.Client, unique: str, suffix: str
) -> None:
    """C24, C26: what the server stored is what was planned, original names included."""
    plan = plan_of(unique + suffix, members={suffix: "g1", unique + suffix: "g1"})
    for manifest in objects(plan):
        # The installation of these tests is the account's name: a label has to be one.
        manifest["metadata"]["labels"][marks.INSTALLATION] = unique
        live = await apply.apply(client, manifest)
        assert diff.differs(manifest, live) == []


@pytest.mark.parametrize("moment", ["while the answer is awaited", "when the connection is just there"])
async def test_a_closed_client_holds_no_connection_to_a_server_that_is_frozen(
    control_plane: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A connection whose request was cancelled waits for the server's farewell, if nobody ends it."""
    frozen = False

    def pass_on(data: bytes) -> bytes:
        return b"" if frozen else data

    made = connection._Handler.connection_made

    def just_there(handler: connection._Handler, transport: asyncio.BaseTransport) -> None:
        nonlocal frozen
        made(handler, transport)
        frozen = True  # a connection with an unread answer would end at once
        if moment == "when the connection is just there":
            watching.cancel()

    monkeypatch.setattr(connection._Handler, "connection_made", just_there)
    admin = control_plane.kubeconfig.read_text()
    async with kube.Client(settings.Kubernetes(kubeconfig=control_plane.kubeconfig)) as direct:
        address = direct.address
    at = urlsplit(address)
    async with tcp.between(str(at.hostname), int(at.port or 0), pass_on, to_server=pass_on) as port:

        def connections() -> list[Any]:
            found = [one for one in gc.get_objects() if type(one).__name__ == "_SelectorSocketTransport"]
            return [
                one for one in found if one._sock is not None and one.get_extra_info("peername")[1] == port
            ]

        path = tmp_path / "kubeconfig"
        path.write_text(admin.replace(address, f"https://{at.hostname}:{port}"))
        async with kube.Client(settings.Kubernetes(kubeconfig=path)) as client:
            watching = asyncio.create_task(
                client.request("GET", kinds.collection("Namespace"), query={"watch": "true"})
            )
            pool = client._api.rest_client.pool_manager.connector

            async def begun() -> bool:
                return any(isinstance(one, connection._Handler) for one in pool._acquired)

            if moment == "while the answer is awaited":
                await pipeline.eventually(begun, "the request is under way")
                watching.cancel()
            await asyncio.wait({watching})
            assert connections()
        assert not connections()
