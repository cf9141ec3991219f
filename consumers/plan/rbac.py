"""What members may do in their account's namespace, and who they are (design section 4, Role).

`desired` calls it. Members get nothing on RBAC, quotas and ServiceAccounts: with those they could keep or
widen their access.
"""

from collections.abc import Iterable

from spur_events.consumers.plan import marks
from spur_events.schemas import accounts, names

_GROUP = "rbac.authorization.k8s.io"
_READ = ("get", "list", "watch")
_WRITE = (*_READ, "create", "update", "patch", "delete", "deletecollection")

#: API groups, resources, verbs. Order and spelling are the object's: a change here updates every Role.
_RULES: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("",), ("pods", "services", "configmaps", "secrets", "persistentvolumeclaims"), _WRITE),
    (("",), ("pods/log",), ("get",)),
    (("",), ("pods/exec", "pods/attach", "pods/portforward"), ("create", "get")),
    (("batch",), ("jobs", "cronjobs"), _WRITE),
    (("apps",), ("deployments", "replicasets", "statefulsets", "daemonsets"), _WRITE),
    (("", "events.k8s.io"), ("events",), _READ),
    (("",), ("resourcequotas", "limitranges"), _READ),
)


def role(metadata: marks.Manifest) -> marks.Manifest:
    """Return the Role, the same in every account."""
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": "Role",
        "metadata": {"name": marks.ROLE_NAME, **metadata},
        "rules": [
            {"apiGroups": list(groups), "resources": list(resources), "verbs": list(verbs)}
            for groups, resources, verbs in _RULES
        ],
    }


def binding(metadata: marks.Manifest, members: Iterable[accounts.Member]) -> marks.Manifest:
    """Return the RoleBinding of an account's members.

    Subjects are written even where there are none: an absent list would leave other people's subjects in.
    """
    subjects = sorted({names.service_account(member.name) for member in members})
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": marks.BINDING_NAME, **metadata},
        "roleRef": {"apiGroup": _GROUP, "kind": "Role", "name": marks.ROLE_NAME},
        "subjects": [
            {"kind": "ServiceAccount", "name": name, "namespace": metadata["namespace"]} for name in subjects
        ],
    }
