"""What live objects say: an account's objects together, whose a namespace is, whether a quota is in force.

Pure. `kube.observe` reads the objects, `steps` and `resync` decide by what is said here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from spur_events.consumers.plan import marks, quantities
from spur_events.schemas import names


@dataclass(frozen=True, kw_only=True)
class Observed:
    """An account's objects as they are; None where there is none.

    `service_accounts` are ours by their marks; `unmarked_service_accounts` only have the name of a member's:
    somebody else's, or ours with the marks taken off.
    """

    namespace: marks.Manifest | None
    quota: marks.Manifest | None = None
    limits: marks.Manifest | None = None
    role: marks.Manifest | None = None
    binding: marks.Manifest | None = None
    service_accounts: tuple[marks.Manifest, ...] = ()
    unmarked_service_accounts: tuple[marks.Manifest, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Terminating:
    """A namespace that is being deleted: since when (RFC 3339), and what holds it."""

    since: str
    held_by: tuple[str, ...]


def collect(
    namespace: marks.Manifest, inside: Iterable[marks.Manifest], installation: str, slug: str
) -> Observed:
    """Return an account's objects out of those that were found in its namespace."""
    marked = marks.labels(installation, slug).items()
    fixed: dict[str, marks.Manifest] = {}
    ours, unmarked = [], []
    for found in inside:
        if found["kind"] != "ServiceAccount":
            if _FIXED.get(found["kind"]) == found["metadata"]["name"]:
                fixed[found["kind"]] = found
        elif marked <= (found["metadata"].get("labels") or {}).items() or _is_members(found, installation):
            ours.append(found)
        elif found["metadata"]["name"].startswith(names.SERVICE_ACCOUNT_PREFIX):
            unmarked.append(found)
    return Observed(
        namespace=namespace,
        quota=fixed.get("ResourceQuota"),
        limits=fixed.get("LimitRange"),
        role=fixed.get("Role"),
        binding=fixed.get("RoleBinding"),
        service_accounts=tuple(ours),
        unmarked_service_accounts=tuple(unmarked),
    )


def _is_members(found: marks.Manifest, installation: str) -> bool:
    """Whether a ServiceAccount was made for a member, by spur itself (no installation) or by us.

    The account's label does not count: in whose namespace it is does. Who could change the labels of
    ServiceAccounts must not be able to keep a removed member's tokens alive by it.
    """
    labels = found["metadata"].get("labels") or {}
    return (
        found["metadata"]["name"].startswith(names.SERVICE_ACCOUNT_PREFIX)
        and labels.get(marks.MANAGED_BY) == marks.FIELD_MANAGER
        and labels.get(marks.INSTALLATION, installation) == installation
    )


_FIXED = {
    "ResourceQuota": marks.QUOTA_NAME,
    "LimitRange": marks.LIMITS_NAME,
    "Role": marks.ROLE_NAME,
    "RoleBinding": marks.BINDING_NAME,
}


def owner(namespace: marks.Manifest, installation: str, *, known_uid: str = "") -> Literal["ours", "foreign"]:
    """Return whose a namespace is: ours by its mark, or where the mark was taken off, by a UID on record.

    A mark of another installation makes it foreign, whatever we remember.
    """
    labels = namespace["metadata"].get("labels") or {}
    marked = labels.get(marks.INSTALLATION)
    if marked == installation and labels.get(marks.MANAGED_BY) == marks.FIELD_MANAGER:
        return "ours"
    remembered = bool(known_uid) and known_uid == namespace["metadata"].get("uid")
    return "ours" if remembered and marked in (None, installation) else "foreign"


def other_installation(namespace: marks.Manifest, installation: str) -> str:
    """Return which other installation's mark a namespace carries; empty where it carries none."""
    marked = str((namespace["metadata"].get("labels") or {}).get(marks.INSTALLATION, ""))
    return "" if marked == installation else marked


def is_paused(namespace: marks.Manifest) -> bool:
    """Whether somebody asked that nothing but revocations be done in a namespace (design rule 10)."""
    return _wishes(namespace, marks.RECONCILE, marks.PAUSED)


def is_retained(namespace: marks.Manifest) -> bool:
    """Whether somebody asked that a namespace be never deleted (design rule 11)."""
    return _wishes(namespace, marks.RETAIN, marks.RETAINED)


def _wishes(namespace: marks.Manifest, key: str, value: str) -> bool:
    metadata = namespace["metadata"]
    return any((metadata.get(part) or {}).get(key) == value for part in ("annotations", "labels"))


def terminating(namespace: marks.Manifest) -> Terminating | None:
    """Return since when a namespace is being deleted and what holds it; None if it is not."""
    since = namespace["metadata"].get("deletionTimestamp")
    if not since:
        return None
    finalizers = [
        *(namespace["metadata"].get("finalizers") or []),
        *((namespace.get("spec") or {}).get("finalizers") or []),
    ]
    conditions = (namespace.get("status") or {}).get("conditions") or []
    # The namespace controller says in words what is left: contents, their finalizers, failed discoveries.
    said = [condition["message"] for condition in conditions if condition.get("status") == "True"]
    return Terminating(since=str(since), held_by=tuple(said or [f"finalizer {one}" for one in finalizers]))


def other_managers(live: marks.Manifest) -> tuple[str, ...]:
    """Return who else has written to an object, for the log of what we take back; status writers left out."""
    entries = live["metadata"].get("managedFields") or []
    found = {entry.get("manager", "") for entry in entries if not entry.get("subresource")}
    return tuple(sorted(found - {marks.FIELD_MANAGER, ""}))


def quota_in_force(quota: marks.Manifest) -> bool:
    """Whether admission counts with the quota as it is now.

    Admission reads the status, which the quota controller writes: until it has, pods are refused for a new
    quota, and admitted by the old numbers for a changed one.
    """
    hard = (quota.get("spec") or {}).get("hard") or {}
    status = quota.get("status") or {}
    used = status.get("used") or {}
    return quantities.equal(hard, status.get("hard") or {}) and hard.keys() <= used.keys()


def over_quota(quota: marks.Manifest) -> tuple[str, ...]:
    """Return the keys, sorted, of which more is used than is allowed by now (design rule 7)."""
    hard = (quota.get("spec") or {}).get("hard") or {}
    used = (quota.get("status") or {}).get("used") or {}
    return tuple(sorted(key for key, text in hard.items() if _value(used.get(key, "0")) > _value(text)))


def _value(text: str) -> Fraction:
    # The API server holds no quantity that is none.
    return quantities.value(text) or Fraction(0)
