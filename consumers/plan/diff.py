"""Whether a live object is as it should be, counting only what is ours (design rule 10).

`converge` and `resync` ask `differs` before they write, `consumers.kube.apply` asks `extras` after it wrote.
Server status, defaults and other people's labels and annotations do not count.
"""

import hashlib
import json
from typing import Any

from spur_events.consumers.plan import marks, quantities

#: Top-level fields, beside metadata, that are ours whole. A Namespace has none; of a ServiceAccount only the
#: one that we set: image pull secrets are an administrator's.
_FIELDS: dict[str, tuple[str, ...]] = {
    "ResourceQuota": ("spec",),
    "LimitRange": ("spec",),
    "Role": ("rules",),
    "RoleBinding": ("roleRef", "subjects"),
    "ServiceAccount": ("automountServiceAccountToken",),
    "ValidatingAdmissionPolicy": ("spec",),
    "ValidatingAdmissionPolicyBinding": ("spec",),
}
#: Kinds in whose spec an apply also leaves elements of lists, such as a match condition.
PATCHED_WHOLE = frozenset({"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"})
#: Maps from resource names to quantities.
_QUANTITY_MAPS = frozenset({"hard", "default", "defaultRequest", "min", "max", "maxLimitRequestRatio"})
_OWN_KEYS = {"labels": marks.OWN_LABELS, "annotations": marks.OWN_ANNOTATIONS}


def digest(manifest: marks.Manifest) -> str:
    """Return a short text that changes with the manifest, and with nothing else."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:16]


def differs(desired: marks.Manifest, live: marks.Manifest) -> list[str]:
    """Return the paths, sorted, at which a live object is not what is desired; empty if it is."""
    paths: list[str] = []
    for part, own in _OWN_KEYS.items():
        want = desired["metadata"].get(part) or {}
        have = live.get("metadata", {}).get(part) or {}
        keys = want.keys() | (own & have.keys())
        paths += [f"metadata.{part}[{key}]" for key in keys if want.get(key) != have.get(key)]
    if live.get("metadata", {}).get("deletionTimestamp") and desired["kind"] != "Namespace":
        paths.append("metadata.deletionTimestamp")  # as good as gone; a namespace's end is a state of its own
    for field in _FIELDS.get(desired["kind"], ()):
        paths += _compare(field, desired.get(field), live.get(field))
    return sorted(paths)


def extras(desired: marks.Manifest, live: marks.Manifest) -> marks.Manifest:
    """Return a JSON merge patch that removes what a server-side apply leaves of others; empty if nothing.

    An apply replaces lists and takes values over, but a key of a map that another manager owns stays.
    """
    patch: marks.Manifest = {}
    for part, own in _OWN_KEYS.items():
        want = desired["metadata"].get(part) or {}
        have = live.get("metadata", {}).get(part) or {}
        foreign = sorted((own & have.keys()) - want.keys())
        if foreign:
            patch.setdefault("metadata", {})[part] = dict.fromkeys(foreign)
    if desired["kind"] == "ResourceQuota":
        want, have = desired["spec"]["hard"], (live.get("spec") or {}).get("hard") or {}
        foreign = sorted(have.keys() - want.keys())
        if foreign:
            patch["spec"] = {"hard": dict.fromkeys(foreign)}
    if desired["kind"] in PATCHED_WHOLE:
        spec = _merge_patch(desired["spec"], live.get("spec") or {})
        if spec:
            patch["spec"] = spec
    return patch


def _merge_patch(want: marks.Manifest, have: marks.Manifest) -> marks.Manifest:
    """Return the JSON merge patch that makes `want` of `have`: it replaces lists whole."""
    patch: marks.Manifest = {}
    for key in sorted(want.keys() | have.keys()):
        left, right = want.get(key), have.get(key)
        if not _compare(key, left, right):
            continue
        if isinstance(left, dict) and isinstance(right, dict):
            patch[key] = _merge_patch(left, right)
        else:
            patch[key] = left
    return patch


def _compare(path: str, want: Any, have: Any) -> list[str]:
    if want == have:
        return []  # nearly always, and by far the quickest: a resync compares ten objects an account
    # The server leaves out empty values: absent, empty and null are one. `False` is a value.
    if _empty(want) and _empty(have):
        return []
    if isinstance(want, dict) and isinstance(have, dict):
        paths: list[str] = []
        quantity = path.rpartition(".")[2] in _QUANTITY_MAPS
        for key in want.keys() | have.keys():
            left, right = want.get(key), have.get(key)
            if quantity and left is not None and right is not None:
                paths += [] if quantities.same(left, right) else [f"{path}[{key}]"]
            else:
                paths += _compare(f"{path}[{key}]" if quantity else f"{path}.{key}", left, right)
        return paths
    if isinstance(want, list) and isinstance(have, list) and len(want) == len(have):
        pairs = enumerate(zip(want, have, strict=True))
        return [
            deeper for index, (left, right) in pairs for deeper in _compare(f"{path}[{index}]", left, right)
        ]
    return [] if want == have else [path]


def _empty(value: Any) -> bool:
    return value is None or value in ("", [], {})
