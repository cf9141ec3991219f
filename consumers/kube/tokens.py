"""Tokens of members' ServiceAccounts: asked for by TokenRequest, bound to the very object that was checked.

`consumers.kubeconfig` calls it. Nothing here keeps or logs a token. Tried on kube-apiserver 1.37: a UID in the
request's metadata is a precondition (409 if the ServiceAccount is another one by now). Servers before 1.34 ignore
it, so the UID in the token itself is compared as well.
"""

import base64
import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors, kinds


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token and when the server says that it ends. Its text is never shown."""

    text: str = field(repr=False)
    expires_at: datetime


async def request(
    client: kube.Client, service_account: str, namespace: str, *, uid: str, lifetime_s: int
) -> Token:
    """Return a token for the API server itself; it may last shorter than asked for.

    Raises:
        NotFoundError: if the ServiceAccount is gone.
        ConflictError: if it is not the one with this UID any more.
        InvalidError: if the lifetime is refused, or the answer is not what a TokenRequest gives.
    """
    path = f"{kinds.one('ServiceAccount', service_account, namespace)}/token"
    answer = await client.request(
        "POST",
        path,
        body={
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "metadata": {"name": service_account, "namespace": namespace, "uid": uid},
            # No audiences: the API server's own.
            "spec": {"expirationSeconds": lifetime_s},
        },
    )
    try:
        text = str(answer["status"]["token"])
        found = Token(text=text, expires_at=datetime.fromisoformat(answer["status"]["expirationTimestamp"]))
        bound_to = str(_claims(text)["kubernetes.io"]["serviceaccount"]["uid"])
    except (KeyError, IndexError, TypeError, ValueError):
        # Not chained: the error could quote what should not be seen.
        raise errors.InvalidError(f"POST {path} on {client.address}: the answer is not a token") from None
    if bound_to != uid:
        raise errors.ConflictError(f"POST {path} on {client.address}: the token is another ServiceAccount's")
    return found


def _claims(token: str) -> dict[str, Any]:
    payload = token.split(".")[1]
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return found
