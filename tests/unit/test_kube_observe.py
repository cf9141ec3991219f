"""Reading live objects: whose they are, what holds them, whether a quota is in force."""

from typing import Any

import pytest

from spur_events.consumers.kube import kinds
from spur_events.consumers.plan import marks, observed

OURS = {marks.MANAGED_BY: marks.FIELD_MANAGER, marks.INSTALLATION: "i"}


@pytest.mark.parametrize(
    ("labels", "known_uid", "expected"),
    [
        (OURS, "", "ours"),
        (OURS | {marks.ACCOUNT: "bio"}, "", "ours"),
        (None, "", "foreign"),
        ({marks.MANAGED_BY: marks.FIELD_MANAGER}, "", "foreign"),  # spur's own: to be adopted on purpose
        (OURS | {marks.INSTALLATION: "j"}, "", "foreign"),
        (None, "u", "ours"),  # the mark was taken off (C06)
        (OURS | {marks.MANAGED_BY: "helm"}, "u", "ours"),
        (None, "v", "foreign"),
        (OURS | {marks.INSTALLATION: "j"}, "u", "foreign"),
    ],
)
def test_owner(labels: dict[str, str] | None, known_uid: str, expected: str) -> None:
    namespace = {"metadata": {"name": "n", "uid": "u", "labels": labels}}
    assert observed.owner(namespace, "i", known_uid=known_uid) == expected


def test_terminating() -> None:
    assert observed.terminating({"metadata": {}}) is None
    namespace: Any = {
        "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b"]},
        "spec": {"finalizers": ["kubernetes"]},
    }
    found = observed.terminating(namespace)
    assert found is not None
    assert found.held_by == ("finalizer a/b", "finalizer kubernetes")
    namespace["status"] = {
        "conditions": [
            {"status": "False", "message": "fine"},
            {"status": "True", "message": "Some content in the namespace has finalizers remaining"},
        ]
    }
    found = observed.terminating(namespace)
    assert found is not None
    assert found.since == "2026-01-01T00:00:00Z"
    assert found.held_by == ("Some content in the namespace has finalizers remaining",)


@pytest.mark.parametrize(
    ("hard", "status", "expected"),
    [
        ({"pods": "0"}, None, False),
        ({"pods": "0"}, {"hard": {"pods": "0"}}, False),
        ({"pods": "0"}, {"hard": {"pods": "0"}, "used": {"pods": "3"}}, True),
        ({"cpu": "1"}, {"hard": {"cpu": "1000m"}, "used": {"cpu": "0"}}, True),
        ({"cpu": "1"}, {"hard": {"cpu": "2"}, "used": {"cpu": "0"}}, False),
        ({"cpu": "1"}, {"hard": {"cpu": "1", "pods": "1"}, "used": {"cpu": "0", "pods": "0"}}, False),
        ({}, {}, True),
        (None, {}, True),
        ({}, {"hard": {"pods": "0"}, "used": {"pods": "0"}}, False),
    ],
)
def test_quota_in_force(hard: Any, status: Any, expected: bool) -> None:
    assert observed.quota_in_force({"spec": {"hard": hard}, "status": status}) is expected


def test_over_quota() -> None:
    quota = {
        "spec": {"hard": {"b": "1", "a": "1G", "c": "1", "d": "0"}},
        "status": {"used": {"b": "1001m", "a": "1Gi", "c": "1000m"}},
    }
    assert observed.over_quota(quota) == ("a", "b")
    assert observed.over_quota({"spec": {"hard": {"a": "0"}}}) == ()


def test_paths() -> None:
    assert kinds.one("Namespace", "a") == "/api/v1/namespaces/a"
    assert kinds.one("Role", "r", "n") == "/apis/rbac.authorization.k8s.io/v1/namespaces/n/roles/r"
    assert kinds.collection("ResourceQuota") == "/api/v1/resourcequotas"
    assert kinds.one("Role", "../x", "n").endswith("/roles/..%2Fx")
    for name, namespace in (("", "n"), ("r", ""), ("..", "n"), ("r", "..")):
        with pytest.raises(ValueError, match="needs a name"):
            kinds.one("Role", name, namespace)
