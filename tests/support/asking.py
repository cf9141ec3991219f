"""Users as NATS sees them: their own credentials, and a request for a kubeconfig over their own connection."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from support.site import Site

from spur_events import settings
from spur_events.consumers.kube import client as kube
from spur_events.jetstream import caller
from spur_events.local.nats import Nats
from spur_events.schemas import names, subjects
from spur_events.schemas.access import Grant, KubeconfigReply, KubeconfigRequest, Refusal

PATIENCE_S = 20.0


def as_user(given: settings.Settings, nats_server: Nats, user: str, folder: Path) -> settings.Nats:
    """Return how a user signs in: with a credentials file of her own, on a server that was not told of it."""
    path = nats_server.site.add_user(user, output=folder / f"{names.slug(user)}.creds")
    return settings.Nats(url=given.nats.url, credentials=path)


async def ask(nats: settings.Nats, cluster: str, user: str, **request: Any) -> Grant | Refusal:
    """Ask for a user's kubeconfig, and return what comes back."""
    async with caller.caller(nats, "test") as calling:
        reply = await calling.ask(
            subjects.kubeconfig(cluster, names.slug(user)),
            KubeconfigRequest(**request),
            KubeconfigReply,
            PATIENCE_S,
            "the kubeconfig service",
        )
    return reply.result


async def granted(site: Site, user: str, account: str = "", **request: Any) -> Grant:
    """Ask as an administrator for somebody; it must be granted."""
    wanted = site.name(account) if account else ""
    found = await ask(site.config.nats, site.cluster.name, user, account=wanted, **request)
    assert isinstance(found, Grant), found
    return found


async def refused(site: Site, user: str, account: str = "", **request: Any) -> Refusal:
    """Ask as an administrator for somebody; it must be refused."""
    wanted = site.name(account) if account else ""
    found = await ask(site.config.nats, site.cluster.name, user, account=wanted, **request)
    assert isinstance(found, Refusal)
    assert found.message, "a refusal says what to do"
    return found


@contextlib.asynccontextmanager
async def owner(grant: Grant, folder: Path) -> AsyncIterator[kube.Client]:
    """Be a Kubernetes client with what a grant has, and nothing else."""
    path, ca = folder / f"{names.slug(grant.token)}.kubeconfig", folder / "ca.crt"
    ca.write_text(grant.ca)
    path.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n"
        f"clusters: [{{name: x, cluster: {{server: '{grant.server}', certificate-authority: '{ca}'}}}}]\n"
        f"users: [{{name: x, user: {{token: '{grant.token}'}}}}]\n"
        "contexts: [{name: x, context: {cluster: x, user: x}}]\n"
    )
    async with kube.Client(settings.Kubernetes(kubeconfig=path)) as client:
        yield client
