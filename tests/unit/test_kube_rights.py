"""What the program says that it needs, and what deploy/kubernetes grants, are the same."""

from typing import Any

import pytest

from spur_events.consumers.kube import rights
from spur_events.consumers.plan import guard, marks, rbac
from spur_events.local import kubeconfigs

MANIFESTS = [*kubeconfigs.manifests(), *kubeconfigs.guard_manifests("one")]
PARTS = kubeconfigs.PARTS
BINDINGS = ("ClusterRoleBinding", "RoleBinding")


def role_of(binding: dict[str, Any]) -> dict[str, Any]:
    reference = binding["roleRef"]
    return next(
        one
        for one in MANIFESTS
        if one["kind"] == reference["kind"]
        and one["metadata"]["name"] == reference["name"]
        and one["metadata"].get("namespace") == binding["metadata"].get("namespace")
    )


def granted(part: str) -> set[rights.Right]:
    found = set()
    for binding in (one for one in MANIFESTS if one["kind"] in BINDINGS):
        assert len(binding["subjects"]) == 1
        if binding["subjects"][0]["name"] != f"spur-events-{part}":
            continue
        assert binding["subjects"][0]["namespace"] == kubeconfigs.NAMESPACE
        for rule in role_of(binding)["rules"]:
            for group in rule["apiGroups"]:
                for name in rule.get("resourceNames", [""]):
                    for whole in rule["resources"]:
                        resource, _, subresource = whole.partition("/")
                        found |= {
                            rights.Right(
                                verb=verb,
                                group=group,
                                resource=resource,
                                subresource=subresource,
                                name=name,
                                namespace=binding["metadata"].get("namespace", ""),
                            )
                            for verb in rule["verbs"]
                        }
    return found


@pytest.mark.parametrize("part", PARTS)
def test_neither_has_what_the_other_lacks(part: str) -> None:
    assert granted(part) == set(rights.needed(part, "one"))


@pytest.mark.parametrize("part", PARTS)
def test_no_wildcards(part: str) -> None:
    for right in granted(part):
        assert "*" not in str(right)
        assert right.resource


def test_a_right_reads_as_an_administrator_looks_for_it() -> None:
    whole = rights.Right(
        verb="get", group="g.io", resource="things", subresource="sub", name="n", namespace="ns"
    )
    assert str(whole) == "get things.g.io/sub n in namespace ns"
    assert str(rights.Right(verb="list", resource="pods")) == "list pods"


def expressions() -> str:
    policy = next(one for one in MANIFESTS if one["kind"] == guard.POLICY)
    return " ".join(str(rule["expression"]) for rule in policy["spec"]["validations"])


def test_the_fence_lets_the_role_of_members_through() -> None:
    """What it names has to be what the program writes: another name would stop every account."""
    text = expressions()
    role = rbac.role({"namespace": "x", "labels": {}})
    names = [marks.ROLE_NAME, marks.BINDING_NAME, marks.QUOTA_NAME, marks.LIMITS_NAME, guard.PROBE]
    names += [
        name for rule in role["rules"] for key in ("apiGroups", "resources", "verbs") for name in rule[key]
    ]
    assert [name for name in names if f"'{name}'" not in text] == []


def test_the_fence_is_around_every_part() -> None:
    policy = next(one for one in MANIFESTS if one["kind"] == guard.POLICY)
    condition = policy["spec"]["matchConditions"][0]["expression"]
    for part in PARTS:
        assert f"'system:serviceaccount:{kubeconfigs.NAMESPACE}:spur-events-{part}'" in condition
