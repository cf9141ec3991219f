"""Deletes namespaces, and the data in them: everything is checked again right before (design rules 11 to 13).

`converge`, the one writer of an account, calls it for the events that a resync with a confirmed plan publishes. What
speaks against a deletion is said by `plan.pruning`. Nothing is forced: a namespace that finalizers hold is waited for.
"""

import logging
from dataclasses import replace

from spur_events import errors
from spur_events.consumers import lease
from spur_events.consumers.kube import apply
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors as kube_errors
from spur_events.consumers.plan import marks, observed, pruning, steps
from spur_events.schemas import names
from spur_events.schemas.events import Recheck, RecheckReason
from spur_events.schemas.status import Phase

log = logging.getLogger(__name__)


def kept(namespace: marks.Manifest, why: str) -> steps.Findings:
    """Return that a namespace is not deleted, and why not."""
    return steps.Findings(
        reason="Kept",
        message=f"namespace {namespace['metadata']['name']} is not deleted: {why}",
        namespace_uid=namespace["metadata"]["uid"],
        namespace_version=namespace["metadata"]["resourceVersion"],
        retained=observed.is_retained(namespace),
    )


async def delete(client: kube.Client, namespace: marks.Manifest) -> steps.Findings:
    """Delete the very namespace that was looked at, if nobody has changed it since.

    Raises:
        LostError, UnreachableError: the event has to come again.
    """
    metadata = namespace["metadata"]
    try:
        await apply.delete(client, namespace, with_version=True)
        live = await apply.get(client, "Namespace", metadata["name"])
    except (lease.LostError, errors.UnreachableError):
        raise
    except kube_errors.ConflictError:
        return kept(namespace, "it was changed meanwhile; the next resync looks again")
    except errors.SpurEventsError as error:
        return replace(kept(namespace, str(error)), reason="NotPruned")
    facts = {"namespace": metadata["name"], "uid": metadata["uid"]}
    log.warning("namespace deleted", extra={**facts, "labels": metadata.get("labels")})
    if live is None or live["metadata"]["uid"] != metadata["uid"]:
        return steps.Findings(phase=Phase.PRUNED, retained=False)
    return steps.terminating(live) or kept(live, "the server has not begun to delete it")


async def without_state(
    client: kube.Client, event: Recheck, *, known_name: str
) -> tuple[steps.Findings, str]:
    """Look at the namespace of a slug that the bucket knows nothing of; delete it if the event says so.

    Returns the findings, and the account's name as far as it can be known.
    """
    live = await apply.get(client, "Namespace", names.namespace_of_slug(event.slug))
    if live is None or observed.owner(live, event.installation) == "foreign":
        return steps.Findings(phase=Phase.PRUNED, retained=False), known_name
    told = str((live["metadata"].get("annotations") or {}).get(marks.ACCOUNT_NAME, ""))
    name = told if names.slug(told) == event.slug else known_name
    if (ending := steps.terminating(live)) is not None:
        return ending, name
    if wish := pruning.wish(live):
        found = kept(live, f"it carries {wish}")
    elif event.reason is not RecheckReason.PRUNE_UNEXPLAINED:
        found = kept(live, "'spur-events resync --prune-unexplained' would")
    elif event.namespace_uid != live["metadata"]["uid"]:
        found = kept(live, "it is not the one that the plan was about")
    else:
        found = await delete(client, live)
    if found.phase is None:
        text = f"no account and no recorded deletion explains it; {found.message}"
        reason = "Unexplained" if found.reason == "Kept" else found.reason
        found = replace(found, phase=Phase.CONFLICT, reason=reason, message=text, retry=False)
    return found, name
