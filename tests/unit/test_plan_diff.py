"""What counts as drift, and what does not (C13, C15; design rule 10)."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from spur_events import settings
from spur_events.consumers.plan import desired, diff, marks
from spur_events.schemas import accounts

PLAN = desired.objects(
    accounts.AccountState(
        installation="i",
        revision=accounts.Revision(1, 1),
        name="physics",
        incarnation="a",
        allocation=accounts.Allocation(limits={"cpu": 1, "mem": 1000}),
        members=(accounts.Member(name="alice", generation="g1"),),
    ),
    settings.Quota(),
)


def live(manifest: marks.Manifest | None) -> Any:
    """Return a manifest as a server would: with things of its own."""
    found: Any = copy.deepcopy(manifest)
    found["metadata"] |= {"uid": "u", "resourceVersion": "5"}
    found["metadata"]["labels"]["team"] = "theirs"
    found["metadata"].setdefault("annotations", {})["spur.amd.com/reconcile"] = "paused"
    found["status"] = {"x": 1}
    return found


def by_kind(kind: str) -> marks.Manifest:
    every = [PLAN.namespace, PLAN.quota, PLAN.limits, PLAN.role, PLAN.binding, *PLAN.service_accounts]
    return next(one for one in every if one is not None and one["kind"] == kind)


KINDS = ["Namespace", "ResourceQuota", "LimitRange", "Role", "RoleBinding", "ServiceAccount"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_others_add_to_metadata_and_status_is_no_drift(kind: str) -> None:
    found = live(by_kind(kind))
    assert diff.differs(by_kind(kind), found) == []
    assert diff.extras(by_kind(kind), found) == {}


def test_quantities_count_by_value() -> None:
    found = live(PLAN.quota)
    found["spec"]["hard"] = {"requests.cpu": "1000m", "requests.memory": "1G"}
    assert diff.differs(by_kind("ResourceQuota"), found) == []
    found = live(PLAN.limits)
    found["spec"]["limits"][0]["min"]["cpu"] = "0.001"
    assert diff.differs(by_kind("LimitRange"), found) == []


CHANGES: list[tuple[str, Callable[[Any], object], list[str]]] = [
    ("ResourceQuota", lambda o: o["spec"]["hard"].update(pods="500"), ["spec.hard[pods]"]),
    ("ResourceQuota", lambda o: o["spec"]["hard"].pop("requests.cpu"), ["spec.hard[requests.cpu]"]),
    (
        "ResourceQuota",
        lambda o: o["spec"]["hard"].update({"requests.cpu": "2"}),
        ["spec.hard[requests.cpu]"],
    ),
    ("ResourceQuota", lambda o: o["spec"].update(scopes=["BestEffort"]), ["spec.scopes"]),
    ("LimitRange", lambda o: o["spec"]["limits"].append({"type": "Pod"}), ["spec.limits"]),
    (
        "LimitRange",
        lambda o: o["spec"]["limits"][0].update(default={"cpu": "1"}),
        ["spec.limits[0].default"],
    ),
    ("Role", lambda o: o["rules"].append({"verbs": ["*"]}), ["rules"]),
    ("Role", lambda o: o["rules"][0]["verbs"].append("*"), ["rules[0].verbs"]),
    ("RoleBinding", lambda o: o["subjects"].append({"kind": "User", "name": "eve"}), ["subjects"]),
    ("RoleBinding", lambda o: o["roleRef"].update(name="old"), ["roleRef.name"]),
    ("RoleBinding", lambda o: o.pop("subjects"), ["subjects"]),
    ("ServiceAccount", lambda o: o.pop("automountServiceAccountToken"), ["automountServiceAccountToken"]),
    (
        "ServiceAccount",
        lambda o: o["metadata"]["annotations"].update({marks.GENERATION: "g0"}),
        [f"metadata.annotations[{marks.GENERATION}]"],
    ),
    (
        "Namespace",
        lambda o: o["metadata"]["labels"].pop("pod-security.kubernetes.io/enforce"),
        ["metadata.labels[pod-security.kubernetes.io/enforce]"],
    ),
    (
        "Namespace",
        lambda o: o["metadata"]["annotations"].update({marks.ORPHANED_AT: "x"}),
        [f"metadata.annotations[{marks.ORPHANED_AT}]"],
    ),
]


@pytest.mark.parametrize(("kind", "change", "paths"), CHANGES)
def test_what_is_ours_counts(kind: str, change: Callable[[Any], object], paths: list[str]) -> None:
    found = live(by_kind(kind))
    change(found)
    assert diff.differs(by_kind(kind), found) == paths


def test_server_leaves_out_empty_values() -> None:
    want = copy.deepcopy(by_kind("RoleBinding"))
    want["subjects"] = []
    found = live(want)
    del found["subjects"]
    assert diff.differs(want, found) == []
    want = copy.deepcopy(by_kind("ResourceQuota"))
    want["spec"]["hard"] = {}
    found = live(want)
    found["spec"] = {}
    assert diff.differs(want, found) == []


def test_extras_removes_keys_of_others_only_where_they_are_ours() -> None:
    found = live(PLAN.quota)
    found["spec"]["hard"] |= {"pods": "500", "requests.storage": "1"}
    found["metadata"]["annotations"][marks.ORPHANED_AT] = "x"
    assert diff.extras(by_kind("ResourceQuota"), found) == {
        "metadata": {"annotations": {marks.ORPHANED_AT: None}},
        "spec": {"hard": {"pods": None, "requests.storage": None}},
    }


def test_digest_is_of_the_content() -> None:
    role = by_kind("Role")
    reordered = dict(reversed(list(role.items())))
    assert diff.digest(role) == diff.digest(reordered)
    assert len(diff.digest(role)) == 16
    changed = copy.deepcopy(role)
    changed["rules"][0]["verbs"].append("*")
    assert diff.digest(changed) != diff.digest(role)
