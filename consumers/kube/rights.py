"""What each part needs in a cluster, as data, and whether it has it: asked by SelfSubjectAccessReview.

`consumers.rights` asks at the start and now and then. deploy/kubernetes grants exactly this; a test compares them.
"""

from dataclasses import dataclass

from spur_events import process
from spur_events.consumers.kube import client as kube
from spur_events.consumers.plan import guard, marks

_RBAC = "rbac.authorization.k8s.io"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_GUARD_KINDS = ("validatingadmissionpolicies", "validatingadmissionpolicybindings")


@dataclass(frozen=True, order=True, kw_only=True)
class Right:
    """One verb on one resource; in all namespaces and for all names where these are empty."""

    verb: str
    group: str = ""
    resource: str
    subresource: str = ""
    name: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        """Return it as an administrator would look for it in a role."""
        resource = f"{self.resource}{f'.{self.group}' if self.group else ''}"
        text = f"{self.verb} {resource}{f'/{self.subresource}' if self.subresource else ''}"
        text += f" {self.name}" if self.name else ""
        return f"{text} in namespace {self.namespace}" if self.namespace else text


def _rights(
    verbs: str, *resources: str, group: str = "", name: str = "", namespace: str = ""
) -> tuple[Right, ...]:
    split = [resource.partition("/") for resource in resources]
    return tuple(
        Right(verb=verb, group=group, resource=one, subresource=sub, name=name, namespace=namespace)
        for one, _, sub in split
        for verb in verbs.split()
    )


_APPLY = (
    *_rights("get create patch delete", "namespaces"),
    *_rights("get list create patch delete", "serviceaccounts"),
    # By a plain create, where an object has to be made anew (kube.apply): it has no name to be limited to.
    *_rights("create", "resourcequotas"),
    *_rights("create", "rolebindings", group=_RBAC),
    *_rights("get patch delete", "resourcequotas", name=marks.QUOTA_NAME),
    *_rights("get create patch delete", "limitranges", name=marks.LIMITS_NAME),
    *_rights("get patch delete", "rolebindings", group=_RBAC, name=marks.BINDING_NAME),
    *_rights("get create patch delete bind escalate", "roles", group=_RBAC, name=marks.ROLE_NAME),
    *_rights("get", *_GUARD_KINDS, group=guard.GROUP),
)
_RESYNC = (
    *_rights("list", "namespaces", "resourcequotas", "limitranges", "serviceaccounts"),
    *_rights("list", "roles", "rolebindings", group=_RBAC),
    *_rights("get", *_GUARD_KINDS, group=guard.GROUP),
)
_KUBECONFIG = (
    *_rights("get", "namespaces", "serviceaccounts"),
    *_rights("get", "resourcequotas", name=marks.QUOTA_NAME),
    *_rights("create", "serviceaccounts/token"),
    *_rights("get", *_GUARD_KINDS, group=guard.GROUP),
    *_rights("get", "configmaps", name="cluster-info", namespace="kube-public"),
    *_rights("get", "configmaps", name="kube-root-ca.crt", namespace="kube-public"),
)


def needed(part: str, installation: str) -> tuple[Right, ...]:
    """Return what a part needs: `apply`, `resync` or `kubeconfig`."""
    if part == "apply":
        own = _rights("create patch", *_GUARD_KINDS, group=guard.GROUP, name=guard.name(installation))
        return (*_APPLY, *own)
    return {"resync": _RESYNC, "kubeconfig": _KUBECONFIG}[part]


async def missing(client: kube.Client, part: str, installation: str) -> tuple[str, ...]:
    """Return what a part needs and does not have, in words.

    Raises:
        SpurEventsError: if the API server does not say.
    """
    wanted = needed(part, installation)
    allowed = await process.together(*(_has(client, right) for right in wanted))
    return tuple(str(right) for right, yes in zip(wanted, allowed, strict=True) if not yes)


async def _has(client: kube.Client, right: Right) -> bool:
    attributes = {
        "verb": right.verb,
        "group": right.group,
        "resource": right.resource,
        "subresource": right.subresource,
        "name": right.name,
        "namespace": right.namespace,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: text for key, text in attributes.items() if text}},
    }
    answer = await client.request("POST", _REVIEWS, body=review)
    return bool((answer.get("status") or {}).get("allowed"))
