"""A member of an account as her own Kubernetes client: a token of her ServiceAccount and nothing else."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from support import pipeline
from support.site import Site

from spur_events import settings
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors as kube_errors
from spur_events.consumers.kube import kinds
from spur_events.schemas import names


async def token(site: Site, account: str, user: str, *, lifetime_s: int = 3600) -> str:
    """Return a token as the responder would ask for one."""
    path = kinds.one("ServiceAccount", names.service_account(user), site.namespace(account))
    answer = await site.cluster.client.request(
        "POST",
        f"{path}/token",
        body={
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": lifetime_s},
        },
    )
    return str(answer["status"]["token"])


def kubeconfig(admin: Path, bearer: str, folder: Path) -> Path:
    """Return a kubeconfig file with this token, for the cluster of the administrator's file."""
    content = yaml.safe_load(admin.read_text())
    content["users"] = [{"name": "member", "user": {"token": bearer}}]
    content["contexts"][0]["context"]["user"] = "member"
    content["current-context"] = content["contexts"][0]["name"]
    path = folder / f"{names.slug(bearer)}.kubeconfig"
    path.write_text(json.dumps(content))
    return path


@contextlib.asynccontextmanager
async def client(admin: Path, bearer: str, folder: Path) -> AsyncIterator[kube.Client]:
    """Be the owner of a token."""
    given = settings.Kubernetes(kubeconfig=kubeconfig(admin, bearer, folder))
    async with kube.Client(given) as made:
        yield made


async def may_list_pods(member: kube.Client, namespace: str) -> bool:
    """Return whether the owner of a token can do what members do all day."""
    try:
        await member.request("GET", kinds.collection("Pod", namespace))
    except (kube_errors.UnauthorizedError, kube_errors.ForbiddenError):
        return False
    return True


async def let_in(member: kube.Client, namespace: str) -> None:
    """Wait until the owner of a token can: the API server takes a new RoleBinding up moments later."""

    async def check() -> bool:
        return await may_list_pods(member, namespace)

    await pipeline.eventually(check, "the API server knows the binding")


async def status_of(member: kube.Client, method: str, path: str, body: Any = None) -> str:
    """Return how the API server answers: "ok" or the name of our error."""
    try:
        await member.request(method, path, body=body)
    except kube_errors.ANSWERS as error:
        return type(error).__name__
    return "ok"
