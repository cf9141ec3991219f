"""Writes to the cluster: server-side apply, made whole where apply alone leaves other people's additions in.

`converge` calls it with manifests from `consumers.plan` and a guarded client. Whether a write is needed at all,
and whose an object is, is left to the caller.

Tried on kube-apiserver 1.37 (tests/integration/test_kube_apply.py): force takes over values and replaces the
lists `rules`, `limits` and `subjects` whole; a key that another manager owns in `spec.hard` stays; `roleRef` and a
quota's `scopes` cannot be changed, only replaced with the object.
"""

import asyncio
from typing import Any

from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors, kinds
from spur_events.consumers.plan import diff, marks

_ATTEMPTS = 5
#: A version that no object has: etcd counts its own first revision as 1, an object's is a later one.
_NEVER = "1"
_PAUSE_S = 0.2


async def apply(
    client: kube.Client,
    manifest: marks.Manifest,
    *,
    uid: str | None = None,
    resource_version: str | None = None,
) -> marks.Manifest:
    """Make the live object what the manifest says, creating it where it is absent; return it.

    With `uid` only that very object is written, with `resource_version` as well only if it is unchanged. A
    version alone would not do: the server creates an absent object in spite of it.

    A namespace that is being deleted, and what is in it, can still be updated: look at `observed.terminating`.

    Raises:
        ValueError: if `resource_version` is given without `uid`.
        ConflictError: if the precondition does not hold, or the object is being deleted and a finalizer
            holds it.
        NotFoundError: if its namespace does not exist.
        NamespaceTerminatingError: if it would have to be created in a namespace that is being deleted.
    """
    if resource_version is not None and uid is None:
        raise ValueError("resource_version needs uid")
    try:
        live = await _server_side(client, manifest, uid=uid, resource_version=resource_version)
    except errors.InvalidError:
        # The message would have to be parsed to know why; the object itself tells.
        found = await get(client, manifest["kind"], *_place(manifest))
        if found is not None and manifest["kind"] in diff.PATCHED_WHOLE and diff.extras(manifest, found):
            # Ours and others' list elements together may be what the server refuses (Deny beside Warn).
            _check(found, uid, resource_version)
            return await _remove_extras(client, manifest, found)
        if found is None or not _immutable_differs(manifest, found):
            raise
        live = found
        _check(live, uid, resource_version)
        return await _replace(client, manifest, live)
    if _immutable_differs(manifest, live):
        return await _replace(client, manifest, live)
    if is_being_deleted(live) and manifest["kind"] != "Namespace":
        # Nobody would tell us when it goes: it must not count as applied.
        raise errors.ConflictError(f"{kinds.of(live)} on {client.address} is being deleted; {_holds(live)}")
    return await _remove_extras(client, manifest, live)


async def create(client: kube.Client, manifest: marks.Manifest) -> marks.Manifest:
    """Create an object that was seen to be absent, and return it; what came there meanwhile is left as it is.

    It is an apply, and not a POST, so that the fields are owned as later applies own them.

    Raises:
        ConflictError: if it is there by now.
    """
    # An apply's version says nothing about an absent object (tests/integration/test_kube_apply.py).
    return await _server_side(client, manifest, resource_version=_NEVER)


async def ensure_service_account(
    client: kube.Client, manifest: marks.Manifest, *, live: marks.Manifest | None = None
) -> marks.Manifest:
    """Make a member's ServiceAccount what the manifest says; one of another generation is replaced.

    A new ServiceAccount has a new UID, so that every token of the old one is dead. One without a generation
    (spur's own, or somebody's) counts as another: nobody knows what tokens it has.

    Args:
        client: where to write.
        manifest: from `plan.service_accounts`.
        live: the object as just observed, to save reading it.

    Raises:
        ConflictError: if the old one cannot be removed yet.
    """
    if live is None:
        live = await get(client, "ServiceAccount", *_place(manifest))
    if live is not None and (_generation(live) != _generation(manifest) or is_being_deleted(live)):
        return await _replace(client, manifest, live)
    # The UID ties the apply to the object that was looked at: not to one that somebody put in its place.
    return await apply(client, manifest, uid=live["metadata"]["uid"] if live else None)


async def get(client: kube.Client, kind: str, name: str, namespace: str = "") -> marks.Manifest | None:
    """Return a live object, or None where there is none."""
    try:
        return await client.request("GET", kinds.one(kind, name, namespace))
    except errors.NotFoundError:
        return None


async def delete(
    client: kube.Client,
    live: marks.Manifest,
    *,
    propagation: str = "Background",
    with_version: bool = False,
) -> bool:
    """Delete the very object that was observed (by UID); tell whether it was still there.

    It may live on until its finalizers are done. With `with_version` it must also be unchanged.

    Raises:
        ConflictError: if another object has its name by now, or it has changed.
    """
    preconditions = {"uid": live["metadata"]["uid"]}
    if with_version:
        preconditions["resourceVersion"] = live["metadata"]["resourceVersion"]
    options = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": preconditions,
        "propagationPolicy": propagation,
    }
    try:
        await client.request("DELETE", kinds.of(live), body=options)
    except errors.NotFoundError:
        return False
    return True


def is_being_deleted(live: marks.Manifest) -> bool:
    """Whether an object only waits for its finalizers."""
    return bool(live["metadata"].get("deletionTimestamp"))


async def _server_side(
    client: kube.Client,
    manifest: marks.Manifest,
    *,
    uid: str | None = None,
    resource_version: str | None = None,
) -> marks.Manifest:
    preconditions = {"uid": uid, "resourceVersion": resource_version}
    given = {key: text for key, text in preconditions.items() if text is not None}
    return await client.request(
        "PATCH",
        kinds.of(manifest),
        query={"fieldManager": marks.FIELD_MANAGER, "force": "true"},
        body={**manifest, "metadata": {**manifest["metadata"], **given}},
        content_type=kube.APPLY_PATCH,
    )


async def _remove_extras(
    client: kube.Client, manifest: marks.Manifest, live: marks.Manifest
) -> marks.Manifest:
    for _ in range(_ATTEMPTS):
        patch: Any = diff.extras(manifest, live)
        if not patch:
            return live
        # Tied to what was seen: between apply and here somebody may have put another object there.
        seen = {key: live["metadata"][key] for key in ("uid", "resourceVersion")}
        patch["metadata"] = {**patch.get("metadata", {}), **seen}
        try:
            live = await client.request(
                "PATCH",
                kinds.of(manifest),
                query={"fieldManager": marks.FIELD_MANAGER},
                body=patch,
                content_type=kube.MERGE_PATCH,
            )
        except errors.ConflictError:
            # Somebody, for example the quota controller with the status, was between: apply again.
            live = await _server_side(client, manifest, uid=live["metadata"]["uid"])
    raise errors.ConflictError(f"{kinds.of(manifest)} on {client.address} is changed by others all the time")


async def _replace(client: kube.Client, manifest: marks.Manifest, live: marks.Manifest) -> marks.Manifest:
    old = live["metadata"]["uid"]
    await delete(client, live)
    for _ in range(_ATTEMPTS):
        try:
            # Not an apply: that would happily update the old object while a finalizer holds it.
            return await client.request(
                "POST",
                kinds.collection(manifest["kind"], manifest["metadata"].get("namespace", "")),
                query={"fieldManager": marks.FIELD_MANAGER},
                body=manifest,
            )
        except errors.AlreadyExistsError:
            found = await get(client, manifest["kind"], *_place(manifest))
            if found is not None and found["metadata"]["uid"] != old and not is_being_deleted(found):
                raise
        await asyncio.sleep(_PAUSE_S)
    raise errors.ConflictError(f"{kinds.of(manifest)} on {client.address} must be replaced; {_holds(live)}")


def _holds(live: marks.Manifest) -> str:
    return f"finalizers that hold the old one: {', '.join(live['metadata'].get('finalizers') or ['none'])}"


def _immutable_differs(manifest: marks.Manifest, live: marks.Manifest) -> bool:
    """Whether the live object has something that only a new object can get rid of."""
    if manifest["kind"] == "RoleBinding":
        return bool(manifest["roleRef"] != live.get("roleRef"))
    if manifest["kind"] == "ResourceQuota":
        # With scopes it would count only some pods, and leave the others uncapped.
        spec = live.get("spec") or {}
        return bool(spec.get("scopes") or spec.get("scopeSelector"))
    return False


def _check(live: marks.Manifest, uid: str | None, resource_version: str | None) -> None:
    metadata = live["metadata"]
    if uid not in (None, metadata["uid"]) or resource_version not in (None, metadata["resourceVersion"]):
        raise errors.ConflictError(f"{kinds.of(live)} is not the object that was looked at")


def _place(manifest: marks.Manifest) -> tuple[str, str]:
    return manifest["metadata"]["name"], manifest["metadata"].get("namespace", "")


def _generation(found: marks.Manifest) -> str | None:
    generation = (found["metadata"].get("annotations") or {}).get(marks.GENERATION)
    return None if generation is None else str(generation)
