"""Gives the services their own rights in a cluster: applies deploy/kubernetes, writes a kubeconfig for each part.

Used by the supervisor for the embedded control plane, and by the tests. An administrator does the same with kubectl
(deploy/kubernetes/README.md).
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import yaml

from spur_events import settings
from spur_events.consumers.kube import client as kube
from spur_events.local import folder as folders

#: Parts that have a ServiceAccount of their own.
PARTS = ("apply", "resync", "kubeconfig")
NAMESPACE = "spur-events"

_MANIFESTS = Path(__file__).parents[1] / "deploy" / "kubernetes"
_FIELD_MANAGER = "spur-events-up"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ClusterRole": f"{_RBAC}/clusterroles",
    "ClusterRoleBinding": f"{_RBAC}/clusterrolebindings",
    "Role": f"{_RBAC}/namespaces/{{namespace}}/roles",
    "RoleBinding": f"{_RBAC}/namespaces/{{namespace}}/rolebindings",
    "ValidatingAdmissionPolicy": f"{_ADMISSION}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{_ADMISSION}/validatingadmissionpolicybindings",
}
#: A longer one than any `up` lasts; the API server may cut it down.
_LIFETIME_S = 365 * 86400

Manifest = dict[str, Any]


def manifests() -> list[Manifest]:
    """Return every object of deploy/kubernetes, in the order in which kubectl takes the files."""
    return [one for path in sorted(_MANIFESTS.glob("*.yaml")) for one in _documents(path.read_text("utf-8"))]


def guard_manifests(installation: str) -> list[Manifest]:
    """Return what lets apply write an installation's member guard."""
    text = (_MANIFESTS / "per-installation" / "guard.yaml").read_text("utf-8")
    return _documents(text.replace("INSTALLATION", installation))


def install(admin: Path, folder: Path, installation: str) -> None:
    """Do all of it as an administrator, for one installation."""

    async def work() -> None:
        async with kube.Client(settings.Kubernetes(kubeconfig=admin)) as client:
            await prepare(client, admin, folder)
            await write(client, guard_manifests(installation))

    asyncio.run(work())


async def prepare(client: kube.Client, admin: Path, folder: Path) -> None:
    """Apply what all installations share, and write `<part>.kubeconfig` for each part into a folder."""
    await write(client, manifests())
    folders.make_private(folder)
    for part in PARTS:
        await save(client, admin, folder / f"{part}.kubeconfig", f"spur-events-{part}")


async def write(client: kube.Client, objects: list[Manifest]) -> None:
    """Apply objects in this order."""
    for one in objects:
        metadata = one["metadata"]
        path = _PATHS[one["kind"]].format(namespace=metadata.get("namespace", ""))
        await client.request(
            "PATCH",
            f"{path}/{metadata['name']}",
            query={"fieldManager": _FIELD_MANAGER, "force": "true"},
            body=one,
            content_type=kube.APPLY_PATCH,
        )


async def save(
    client: kube.Client, admin: Path, target: Path, service_account: str, lifetime_s: int = _LIFETIME_S
) -> None:
    """Write a kubeconfig with a new token of a ServiceAccount, for the cluster of the administrator's file."""
    answer = await client.request(
        "POST",
        f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{service_account}/token",
        body={
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": lifetime_s},
        },
    )
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "cluster", "cluster": _cluster(admin)}],
        "users": [{"name": service_account, "user": {"token": answer["status"]["token"]}}],
        "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": service_account}}],
        "current-context": "cluster",
    }
    folders.write_private(target, json.dumps(content, indent=2) + "\n")


def _cluster(admin: Path) -> Manifest:
    """Return the cluster that a kubeconfig is about; files that it names are named from anywhere."""
    content = yaml.safe_load(admin.read_text("utf-8"))
    contexts = {one["name"]: one["context"] for one in content["contexts"]}
    clusters = {one["name"]: one["cluster"] for one in content["clusters"]}
    found: Manifest = dict(clusters[contexts[content["current-context"]]["cluster"]])
    if "certificate-authority" in found:
        found["certificate-authority"] = str((admin.parent / found["certificate-authority"]).absolute())
    return found


def _documents(text: str) -> list[Manifest]:
    return [one for one in yaml.safe_load_all(text) if one]
