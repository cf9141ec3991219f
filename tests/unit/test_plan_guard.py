"""The member guard as a plan: what it holds for, and how changes of it are seen. What it refuses: tests/attacks."""

import copy
from typing import Any

import pytest

from spur_events.consumers.plan import diff, guard, marks, rbac

OURS = "0b5e8f0e-1111-4222-8333-444455556666"
POLICY, BINDING = guard.manifests(OURS)
#: Of what the Role lets members write: what the guard has no rule for.
WITHOUT_RULE = {"configmaps", "persistentvolumeclaims"}


def test_both_are_named_after_the_installation() -> None:
    assert POLICY["metadata"]["name"] == BINDING["metadata"]["name"] == f"spur-member-guard-{OURS}"
    assert BINDING["spec"]["policyName"] == POLICY["metadata"]["name"]
    for one in (POLICY, BINDING):
        assert one["metadata"]["labels"] == {marks.MANAGED_BY: "spur-quota", marks.INSTALLATION: OURS}
        assert guard.is_ours(one, OURS)
        assert not guard.is_ours(one, "another")


def test_it_holds_in_the_installations_namespaces_alone() -> None:
    selector = BINDING["spec"]["matchResources"]["namespaceSelector"]
    assert selector == {"matchLabels": {marks.MANAGED_BY: "spur-quota", marks.INSTALLATION: OURS}}
    assert BINDING["spec"]["validationActions"][0] == "Deny"
    assert POLICY["spec"]["failurePolicy"] == "Fail"


def test_all_that_members_may_write_is_looked_at() -> None:
    role = rbac.role({"namespace": "x", "labels": {}})
    written = {
        resource
        for rule in role["rules"]
        for resource in rule["resources"]
        if "create" in rule["verbs"] and "/" not in resource
    }
    rules = POLICY["spec"]["matchConstraints"]["resourceRules"]
    matched = {resource for rule in rules for resource in rule["resources"]}
    assert written - matched == WITHOUT_RULE


def test_every_variable_is_used_and_every_used_one_is_there() -> None:
    texts = [one["expression"] for one in POLICY["spec"]["variables"]]
    texts += [
        rule[key] for rule in POLICY["spec"]["validations"] for key in ("expression", "messageExpression")
    ]
    for one in POLICY["spec"]["variables"]:
        assert any(f"variables.{one['name']}" in text for text in texts), one["name"]


def changed(manifest: marks.Manifest, path: str, value: Any) -> marks.Manifest:
    live = copy.deepcopy(manifest)
    *folders, last = path.split(".")
    place = live
    for folder in folders:
        place = place[folder]
    place[last] = value
    return live


CHANGES: list[tuple[marks.Manifest, str, Any]] = [
    (BINDING, "spec.validationActions", ["Warn"]),
    (BINDING, "spec.policyName", "another"),
    (BINDING, "spec.matchResources.namespaceSelector", {}),
    (BINDING, "spec.matchResources.objectSelector", {"matchLabels": {"a": "b"}}),
    (BINDING, "spec.matchResources.excludeResourceRules", [{"resources": ["pods"]}]),
    (BINDING, "spec.paramRef", {"name": "x"}),
    (POLICY, "spec.failurePolicy", "Ignore"),
    (POLICY, "spec.matchConditions", [{"name": "never", "expression": "false"}]),
    (POLICY, "spec.matchConstraints.excludeResourceRules", [{"resources": ["pods"]}]),
    (POLICY, "spec.validations", POLICY["spec"]["validations"][:-1]),
    (POLICY, "spec.paramKind", {"kind": "ConfigMap"}),
]


@pytest.mark.parametrize(("manifest", "path", "value"), CHANGES, ids=[path for _, path, _ in CHANGES])
def test_a_change_is_seen_and_the_patch_takes_it_back(
    manifest: marks.Manifest, path: str, value: Any
) -> None:
    live = changed(manifest, path, value)
    assert diff.differs(manifest, live)
    merged = merge(live, diff.extras(manifest, live))
    assert diff.differs(manifest, merged) == []
    assert diff.extras(manifest, merged) == {}


def test_what_the_server_adds_is_no_difference() -> None:
    live = copy.deepcopy(POLICY)
    live["metadata"] |= {"uid": "x", "resourceVersion": "1", "generation": 3}
    live["metadata"]["labels"]["somebody"] = "else"
    live["status"] = {"observedGeneration": 1}
    assert diff.differs(POLICY, live) == []
    assert diff.extras(POLICY, live) == {}


def merge(live: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    made = dict(live) if isinstance(live, dict) else {}
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merge(made.get(key), value)
    return made
