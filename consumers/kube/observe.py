"""Reads what is in the cluster: one account's objects, or all objects of a kind.

`converge` and `resync` call it. What the objects mean is `plan.observed`'s business.
"""

from spur_events import process
from spur_events.consumers.kube import apply, errors, kinds
from spur_events.consumers.kube import client as kube
from spur_events.consumers.plan import marks, observed

PAGE = 500


async def observe(client: kube.Client, namespace: str, installation: str, slug: str) -> observed.Observed:
    """Read all objects of one account: six reads at once, or one where the namespace is absent.

    Not a snapshot: each object is as it was when it was read.
    """
    found = await apply.get(client, "Namespace", namespace)
    if found is None:
        return observed.Observed(namespace=None)
    fixed, accounts = await process.together(
        process.together(
            apply.get(client, "ResourceQuota", marks.QUOTA_NAME, namespace),
            apply.get(client, "LimitRange", marks.LIMITS_NAME, namespace),
            apply.get(client, "Role", marks.ROLE_NAME, namespace),
            apply.get(client, "RoleBinding", marks.BINDING_NAME, namespace),
        ),
        list_all(client, "ServiceAccount", namespace=namespace),
    )
    return observed.collect(
        found, [*(one for one in fixed if one is not None), *accounts], installation, slug
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
