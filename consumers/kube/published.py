"""The API server's address and CA bundle as users need them: from the settings, else from what the cluster publishes.

`consumers.kubeconfig` asks at every request, so that a new certificate or address needs no restart. Looked at, in
this order: SPUR_EVENTS_ACCESS_SERVER and _CA; the ConfigMap kube-public/cluster-info, where kubeadm publishes both
(https://kubernetes.io/docs/reference/setup-tools/kubeadm/implementation-details/#create-the-public-cluster-info-configmap);
the responder's own kubeconfig file, but not the address of a pod's own ServiceAccount, which is good inside
the cluster only. For the CA alone also kube-root-ca.crt in kube-public: the one in an account's namespace can be
written by its members, who could have another member trust a server of theirs.
"""

import ssl
from dataclasses import dataclass
from typing import Any

import yaml

from spur_events import errors as base
from spur_events import settings
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import connection, errors

_PUBLIC = "/api/v1/namespaces/kube-public/configmaps"
_WITHOUT_CA = "set SPUR_EVENTS_ACCESS_CA to the CA bundle, or SPUR_EVENTS_ACCESS_SYSTEM_CA=true"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where users find the API server, and the PEM bundle that its certificate is checked with; empty: the system's."""

    server: str
    ca: str


async def endpoint(client: kube.Client, config: settings.Settings, part: str) -> Endpoint:
    """Return what stands in the kubeconfig that is handed out; `part` is whose kubeconfig file may be looked at.

    Raises:
        MisconfiguredError: naming the setting that is needed.
    """
    given, own_ca = config.access, _file(config.access)
    trusted = own_ca is not None or given.system_ca
    if given.server and trusted:
        return Endpoint(server=given.server, ca=own_ca or "")
    published = await _cluster_info(client)
    # A pod has no file, and the address that it knows is good inside the cluster only.
    own = connection.own_endpoint(connection.of_part(config.kubernetes, part))
    server = given.server or (published.server if published else "") or (own.server if own else "")
    if not server:
        raise base.MisconfiguredError(
            "the cluster publishes no address of its API server (ConfigMap cluster-info in kube-public), and there"
            " is no kubeconfig file: set SPUR_EVENTS_ACCESS_SERVER to the address that users reach"
        )
    if trusted:
        return Endpoint(server=server, ca=own_ca or "")
    if published and published.ca:
        return Endpoint(server=server, ca=published.ca)
    if own is not None and server == own.server:
        # With this address and this bundle we got here ourselves.
        if own.verified and not own.server_name:
            return Endpoint(server=server, ca=own.ca)
        raise base.MisconfiguredError(
            f"the kubeconfig of this service does not check the certificate of {server} by its name: set"
            " SPUR_EVENTS_ACCESS_SERVER to an address that is in it, and SPUR_EVENTS_ACCESS_CA"
        )
    ca = await _root_ca(client) or (own.ca if own else "")
    if not ca:
        raise base.MisconfiguredError(f"the cluster publishes no CA bundle for {server}; {_WITHOUT_CA}")
    return Endpoint(server=server, ca=ca)


def _file(given: settings.Access) -> str | None:
    """Return the configured bundle, or None where none is configured."""
    if given.ca is None or given.system_ca:
        return None
    try:
        text = given.ca.read_text("ascii")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError, ssl.SSLError) as error:
        raise base.MisconfiguredError(
            f"SPUR_EVENTS_ACCESS_CA names {given.ca}, which is not a PEM bundle: {error}"
        ) from error
    return text


async def _cluster_info(client: kube.Client) -> Endpoint | None:
    text = await _public(client, "cluster-info", "kubeconfig")
    if not text:
        return None
    try:
        cluster = yaml.safe_load(text)["clusters"][0]["cluster"]
        ca = connection.decoded(cluster.get("certificate-authority-data", ""))
        return Endpoint(server=str(cluster["server"]), ca=ca)
    except (yaml.YAMLError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise base.MisconfiguredError(
            "ConfigMap cluster-info in kube-public holds no kubeconfig: mend it, or set SPUR_EVENTS_ACCESS_SERVER and"
            " SPUR_EVENTS_ACCESS_CA"
        ) from error


async def _root_ca(client: kube.Client) -> str:
    return await _public(client, "kube-root-ca.crt", "ca.crt")


async def _public(client: kube.Client, name: str, key: str) -> str:
    """Return what a ConfigMap of kube-public holds; empty where it is not there or not for us to read."""
    try:
        found: Any = await client.request("GET", f"{_PUBLIC}/{name}")
    except (errors.NotFoundError, errors.ForbiddenError):
        return ""
    return str((found.get("data") or {}).get(key) or "")
