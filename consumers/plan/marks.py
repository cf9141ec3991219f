"""The names and marks that our objects carry in a cluster, each written down once.

Used by the planner, by `consumers.kube` and by everything that looks our objects up. The values are those of
spur's own reconciler where it has them, so that a site can switch (design rules 8 and 9). How accounts and
users become names is left to `schemas.names`.
"""

from typing import Any

Manifest = dict[str, Any]

#: Field manager of every write, and what `managed-by` says. One constant for all versions: two names
#: would make two versions of spur-events fight over fields.
FIELD_MANAGER = "spur-quota"

MANAGED_BY = "app.kubernetes.io/managed-by"
ACCOUNT = "spur.amd.com/account"
INSTALLATION = "spur.amd.com/installation"
USER = "spur.amd.com/user"

ACCOUNT_NAME = "spur.amd.com/account-name"
REVISION = "spur.amd.com/revision"
INCARNATION = "spur.amd.com/incarnation"
ORPHANED_AT = "spur.amd.com/orphaned-at"
USER_NAME = "spur.amd.com/user-name"
GENERATION = "spur.amd.com/generation"

#: A person's wishes about a namespace, as its label or annotation: leave it as it is; never delete it.
RECONCILE = "spur.amd.com/reconcile"
PAUSED = "paused"
RETAIN = "spur.amd.com/retain"
RETAINED = "true"

#: Labels and annotations that only we set. Any other key in our domain (the wishes above) is left alone.
OWN_LABELS = frozenset({MANAGED_BY, ACCOUNT, INSTALLATION, USER})
OWN_ANNOTATIONS = frozenset({ACCOUNT_NAME, REVISION, INCARNATION, ORPHANED_AT, USER_NAME, GENERATION})

#: Pod Security admission (https://kubernetes.io/docs/concepts/security/pod-security-admission/).
POD_SECURITY = {
    "pod-security.kubernetes.io/enforce": "baseline",
    "pod-security.kubernetes.io/audit": "baseline",
    "pod-security.kubernetes.io/warn": "baseline",
}

QUOTA_NAME = "spur-account-quota"
LIMITS_NAME = "spur-account-defaults"
ROLE_NAME = "spur-account-editor"
BINDING_NAME = "spur-account-members"


def labels(installation: str, slug: str) -> dict[str, str]:
    """Return the labels of every object of an account, by the account's slug."""
    return {MANAGED_BY: FIELD_MANAGER, ACCOUNT: slug, INSTALLATION: installation}


def selector(installation: str, slug: str | None = None) -> str:
    """Return the label selector for an installation's objects, or those of one account of it."""
    terms = {MANAGED_BY: FIELD_MANAGER, INSTALLATION: installation}
    if slug is not None:
        terms[ACCOUNT] = slug
    return ",".join(f"{key}={value}" for key, value in terms.items())


def printable(name: str) -> str:
    """Return an original name as an annotation can hold it.

    Lone surrogates have no UTF-8: the API server would store another character, and the object would
    look changed for ever.
    """
    return name.encode("utf-8", "replace").decode("utf-8")
