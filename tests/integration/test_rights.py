"""Services with less than they need say what is missing: in the log, in the status, in readiness."""

import asyncio
import contextlib
import json
import logging
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import pipeline, processes, servers, site

from spur_events import health, jetstream, services, settings
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors as kube_errors
from spur_events.consumers.kube import kinds, rights
from spur_events.consumers.plan import guard, marks
from spur_events.local import folder, kubeconfigs
from spur_events.local.nats import Nats
from spur_events.schemas import subjects
from spur_events.schemas.access import GuardState, PartReport

_RBAC = "rbac.authorization.k8s.io"


@contextlib.asynccontextmanager
async def narrower(
    admin: kube.Client, control_plane: servers.Cluster, target: Path, name: str, without: set[str]
) -> AsyncIterator[Path]:
    """Yield a folder of kubeconfigs in which apply has a role of its own, without some resources."""
    rules = [
        {"apiGroups": [one.group], "resources": [one.resource], "verbs": [one.verb]}
        | ({"resourceNames": [one.name]} if one.name else {})
        for one in rights.needed("apply", "")
        if one.resource not in without
    ]
    metadata = {"name": name}
    await kubeconfigs.write(
        admin,
        [
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": name, "namespace": "spur-events"},
            },
            {
                "apiVersion": f"{_RBAC}/v1",
                "kind": "ClusterRole",
                "metadata": metadata,
                "rules": rules,
            },
            {
                "apiVersion": f"{_RBAC}/v1",
                "kind": "ClusterRoleBinding",
                "metadata": metadata,
                "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "spur-events"}],
            },
        ],
    )
    await asyncio.to_thread(shutil.copytree, control_plane.kubeconfigs, target)
    await kubeconfigs.save(admin, control_plane.kubeconfig, target / "apply.kubeconfig", name)
    try:
        yield target
    finally:
        for plural in ("clusterroles", "clusterrolebindings"):
            await admin.request("DELETE", f"/apis/{_RBAC}/v1/{plural}/{name}")


@pytest.fixture
async def admin(control_plane: servers.Cluster) -> AsyncIterator[kube.Client]:
    async with kube.Client(settings.Kubernetes(kubeconfig=control_plane.kubeconfigs)) as made:
        yield made


async def test_each_missing_right_is_named(
    database_url: str,
    nats_server: Nats,
    control_plane: servers.Cluster,
    unique: str,
    tmp_path: Path,
    admin: kube.Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    port = folder.free_port()
    lacking = {"limitranges"}
    async with narrower(admin, control_plane, tmp_path / "narrow", unique, lacking) as narrow:
        given = site.config(
            database_url,
            nats_server,
            control_plane,
            unique,
            kubernetes={"kubeconfig": narrow, "cluster": unique},
        )
        async with (
            pipeline.relay(given),
            health.serving(settings.Health(port=port), {"apply"}),
            pipeline.background(services.apply(given)),
            jetstream.connect(given.nats, "test", "test") as bus,
        ):
            installation = await bus.check_topology()
            own = guard.name(installation)
            limits = [
                f"{verb} limitranges {marks.LIMITS_NAME}" for verb in ("get", "create", "patch", "delete")
            ]
            guards = [
                f"{verb} {plural}.{guard.GROUP} {own}"
                for verb in ("create", "patch")
                for plural in ("validatingadmissionpolicies", "validatingadmissionpolicybindings")
            ]

            async def looked() -> PartReport | None:
                key = subjects.part_key(unique, "apply")
                entry = await bus.get(subjects.STATUS_BUCKET, key, PartReport)
                known = entry is not None and set(entry.value.missing_rights) == {*limits, *guards}
                return entry.value if entry and known else None

            report = await pipeline.eventually(looked, "apply has looked at its rights")
            assert report.guard is GuardState.MISSING
            assert "cannot patch resource" in report.message
            logged = {
                record.__dict__["right"] for record in caplog.records if record.message == "right missing"
            }
            assert logged >= set(report.missing_rights)
            await check_status(given, unique, report)
            body = await readiness(port)
            assert f"right missing: {limits[0]}" in body["reasons"]["apply"]
            assert any(reason.startswith("member guard missing") for reason in body["reasons"]["apply"])


async def check_status(given: settings.Settings, cluster: str, report: PartReport) -> None:
    text = await status(given)
    for right in report.missing_rights:
        assert f"cluster {cluster}: apply: right missing: {right}" in text
    assert f"cluster {cluster}: member guard missing" in text
    found = json.loads(await status(given, "--json"))["clusters"]
    assert [one["cluster"] for one in found] == [cluster]
    assert found[0]["guard"] == "missing"
    assert found[0]["parts"][0]["missing_rights"] == list(report.missing_rights)


async def status(given: settings.Settings, *arguments: str) -> str:
    command = [str(processes.SCRIPTS / "spur-events"), "status", *arguments]
    environment = processes.environment(given)
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


async def readiness(port: int) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/readyz") as answer,
    ):
        assert answer.status == 503
        return await answer.json()


FORBIDDEN = "denied request: spur-events-fence"


async def test_the_fence_holds_the_services_to_accounts(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str, admin: kube.Client
) -> None:
    """With stolen credentials of apply or of the responder: RBAC alone would let all of this through."""
    given = site.config(database_url, nats_server, control_plane, unique)
    async with site.running(given, unique) as here:
        await here.add("lab", "alice")
        place = here.namespace("lab")
        await admin.request("POST", kinds.collection("Namespace"), body={"metadata": {"name": unique}})
        async with kube.Client(given.kubernetes, "apply") as apply:
            for method, path, body in thefts(place, unique):
                with pytest.raises(kube_errors.ForbiddenError, match=FORBIDDEN):
                    await send(apply, method, path, body)
        token = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        async with kube.Client(given.kubernetes, "kubeconfig") as responder:
            await responder.request(
                "POST", f"{of('ServiceAccount', 'spur-user-alice', place)}/token", body=token
            )
            for name, namespace in (
                ("default", place),
                ("spur-events-apply", "spur-events"),
                ("default", "kube-system"),
                ("default", "default"),
            ):
                with pytest.raises(kube_errors.ForbiddenError, match=FORBIDDEN):
                    await responder.request(
                        "POST", f"{of('ServiceAccount', name, namespace)}/token", body=token
                    )
        await admin.request("DELETE", kinds.one("Namespace", unique))


def of(kind: str, name: str, namespace: str = "") -> str:
    return kinds.one(kind, name, namespace)


async def send(client: kube.Client, method: str, path: str, body: Any) -> None:
    content = kube.APPLY_PATCH if method == "PATCH" else "application/json"
    query = {"fieldManager": "thief", "force": "true"} if method == "PATCH" else {}
    await client.request(method, path, body=body, content_type=content, query=query)


def thefts(place: str, foreign: str) -> list[tuple[str, str, Any]]:
    """Return what a thief would do first: requests and their bodies."""
    labels = {
        marks.MANAGED_BY: marks.FIELD_MANAGER,
        marks.INSTALLATION: "thief",
        "pod-security.kubernetes.io/enforce": "privileged",
    }

    def namespace(name: str, **own: str) -> Any:
        metadata = {"name": name, "labels": labels | own}
        return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}

    def role(where: str, **rule: list[str]) -> Any:
        metadata = {"name": marks.ROLE_NAME, "namespace": where}
        rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]} | rule]
        return {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": rules}

    def binding(**subject: str) -> Any:
        metadata = {"name": marks.BINDING_NAME, "namespace": place}
        role_ref = {"apiGroup": _RBAC, "kind": "Role", "name": marks.ROLE_NAME}
        whole = {"apiVersion": f"{_RBAC}/v1", "kind": "RoleBinding", "metadata": metadata}
        return {**whole, "roleRef": role_ref, "subjects": [subject]}

    def account(name: str, where: str) -> Any:
        return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": where}}

    escalations: list[dict[str, list[str]]] = [
        {"apiGroups": ["*"]},
        {"resources": ["*"]},
        {"verbs": ["*"]},
        {"verbs": ["impersonate"]},
        {"resources": ["serviceaccounts/token"], "verbs": ["create"]},
        {"resources": ["resourcequotas"], "verbs": ["delete"]},
        {"apiGroups": [_RBAC], "resources": ["rolebindings"], "verbs": ["create"]},
    ]
    wrong: list[dict[str, str]] = [
        {"kind": "User", "name": "eve", "apiGroup": _RBAC},
        {"kind": "Group", "name": "system:authenticated", "apiGroup": _RBAC},
        {"kind": "ServiceAccount", "name": "default", "namespace": place},
        {"kind": "ServiceAccount", "name": "spur-user-alice", "namespace": "spur-acct-elsewhere"},
    ]
    return [
        ("PATCH", of("Namespace", "kube-system"), namespace("kube-system")),
        ("PATCH", of("Namespace", foreign), namespace(foreign)),
        ("PATCH", of("Namespace", place), namespace(place)),
        ("DELETE", of("Namespace", foreign), None),
        ("DELETE", of("Namespace", "spur-events"), None),
        ("PATCH", of("Role", marks.ROLE_NAME, "kube-system"), role("kube-system")),
        ("PATCH", of("Role", marks.ROLE_NAME, foreign), role(foreign)),
        *(("PATCH", of("Role", marks.ROLE_NAME, place), role(place, **rule)) for rule in escalations),
        *(("PATCH", of("RoleBinding", marks.BINDING_NAME, place), binding(**one)) for one in wrong),
        ("POST", kinds.collection("ServiceAccount", "kube-system"), account("eve", "kube-system")),
        ("POST", kinds.collection("ServiceAccount", place), account("eve", place)),
        ("DELETE", of("ServiceAccount", "default", "kube-system"), None),
    ]
