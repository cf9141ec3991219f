"""What is in the cluster: an account's objects, whose a namespace is, whether a quota is in force.

`converge`, `resync` and `status` call it. Comparing with what should be there is left to `plan.diff`.
"""

import asyncio
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from spur_events.consumers.kube import apply, errors, kinds
from spur_events.consumers.kube import client as kube
from spur_events.consumers.plan import marks, quantities
from spur_events.schemas import names

PAGE = 500


@dataclass(frozen=True, kw_only=True)
class Observed:
    """An account's objects as they are; None where there is none.

    `service_accounts` carry this installation's mark for the account; `unmarked_service_accounts` have the
    name of a member's but not the mark: somebody else's, or ours with the mark taken off.
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


async def observe(client: kube.Client, namespace: str, installation: str, slug: str) -> Observed:
    """Read all objects of one account: six reads at once, or one where the namespace is absent.

    Not a snapshot: each object is as it was when it was read.
    """
    found = await apply.get(client, "Namespace", namespace)
    if found is None:
        return Observed(namespace=None)
    quota, limits, role, binding, accounts = await asyncio.gather(
        apply.get(client, "ResourceQuota", marks.QUOTA_NAME, namespace),
        apply.get(client, "LimitRange", marks.LIMITS_NAME, namespace),
        apply.get(client, "Role", marks.ROLE_NAME, namespace),
        apply.get(client, "RoleBinding", marks.BINDING_NAME, namespace),
        list_all(client, "ServiceAccount", namespace=namespace),
    )
    marked = marks.labels(installation, slug).items()
    ours, unmarked = [], []
    for account in accounts:
        if marked <= (account["metadata"].get("labels") or {}).items():
            ours.append(account)
        elif account["metadata"]["name"].startswith(names.SERVICE_ACCOUNT_PREFIX):
            unmarked.append(account)
    return Observed(
        namespace=found,
        quota=quota,
        limits=limits,
        role=role,
        binding=binding,
        service_accounts=tuple(ours),
        unmarked_service_accounts=tuple(unmarked),
    )


async def list_all(
    client: kube.Client, kind: str, *, namespace: str = "", selector: str = "", page: int = PAGE
) -> list[marks.Manifest]:
    """Return all objects of a kind that a label selector matches, in one namespace or everywhere.

    Read in pages of one consistent snapshot. A list that takes so long that the server has forgotten the
    snapshot starts again, since a mix of two would show objects as absent that are not.

    Raises:
        ExpiredError: if that happens time and again.
    """
    for last in (False, False, True):
        try:
            return await _pages(client, kind, namespace, selector, page)
        except errors.ExpiredError:
            if last:
                raise
    raise AssertionError("the loop returns or raises")


async def _pages(
    client: kube.Client, kind: str, namespace: str, selector: str, page: int
) -> list[marks.Manifest]:
    query = {"limit": str(page)}
    if selector:
        query["labelSelector"] = selector
    items: list[marks.Manifest] = []
    while True:
        answer = await client.request("GET", kinds.collection(kind, namespace), query=query)
        # Items of a list do not say what they are.
        own = {"apiVersion": answer["apiVersion"], "kind": kind}
        items += [{**own, **item} for item in answer.get("items") or []]
        more = answer["metadata"].get("continue")
        if not more:
            return items
        query["continue"] = more


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
