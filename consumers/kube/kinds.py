"""Where the API server keeps each kind of object.

`apply` and `observe` build their paths with it. Only the kinds that spur-events handles are known.
"""

from dataclasses import dataclass
from urllib.parse import quote

from spur_events.consumers.plan import marks


@dataclass(frozen=True)
class Kind:
    """A kind: API prefix, plural, and whether its objects live in a namespace."""

    prefix: str
    plural: str
    namespaced: bool = True


_NO_NAMES = ("", ".", "..")
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
KINDS = {
    "Namespace": Kind("/api/v1", "namespaces", namespaced=False),
    "ResourceQuota": Kind("/api/v1", "resourcequotas"),
    "LimitRange": Kind("/api/v1", "limitranges"),
    "Role": Kind(_RBAC, "roles"),
    "RoleBinding": Kind(_RBAC, "rolebindings"),
    "ServiceAccount": Kind("/api/v1", "serviceaccounts"),
    "Pod": Kind("/api/v1", "pods"),
    "ValidatingAdmissionPolicy": Kind(_ADMISSION, "validatingadmissionpolicies", namespaced=False),
    "ValidatingAdmissionPolicyBinding": Kind(
        _ADMISSION, "validatingadmissionpolicybindings", namespaced=False
    ),
}


def collection(kind: str, namespace: str = "") -> str:
    """Return the path of all objects of a kind, in one namespace or everywhere."""
    where = KINDS[kind]
    inside = f"/namespaces/{quote(namespace, safe='')}" if where.namespaced and namespace else ""
    return f"{where.prefix}{inside}/{where.plural}"


def one(kind: str, name: str, namespace: str = "") -> str:
    """Return the path of one object.

    Raises:
        ValueError: if the namespace of a namespaced object, or the name, is empty or dots: the path would be
            that of a collection, and a delete would empty it.
    """
    if name in _NO_NAMES or namespace in (".", "..") or (KINDS[kind].namespaced and not namespace):
        raise ValueError(f"a {kind} needs a name and its namespace, got {name!r} in {namespace!r}")
    return f"{collection(kind, namespace)}/{quote(name, safe='')}"


def of(manifest: marks.Manifest) -> str:
    """Return the path of a manifest's or a live object's own place."""
    metadata = manifest["metadata"]
    return one(manifest["kind"], metadata["name"], metadata.get("namespace", ""))
