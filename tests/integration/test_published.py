"""Where users find the API server: what is configured, what the cluster publishes, what our own kubeconfig says."""

import base64
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spur_events import errors, settings
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import published
from spur_events.local.controlplane import ControlPlane

PUBLIC = "/api/v1/namespaces/kube-public/configmaps"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Yield a control plane of this module's own: what it publishes is nobody else's."""
    made = ControlPlane(tmp_path_factory.mktemp("plane"), durable=False)
    made.start()
    try:
        yield made
    finally:
        made.kill()


@contextlib.asynccontextmanager
async def publishing(plane: ControlPlane, name: str, **data: str) -> AsyncIterator[None]:
    """Publish a ConfigMap for as long as the block lasts."""
    async with kube.Client(settings.Kubernetes(kubeconfig=plane.kubeconfig)) as admin:
        with contextlib.suppress(errors.PermanentError):
            await admin.request("DELETE", f"{PUBLIC}/{name}")
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
        await admin.request(
            "POST", PUBLIC, body=body | {"data": {key.replace("_", "."): data[key] for key in data}}
        )
        try:
            yield
        finally:
            await admin.request("DELETE", f"{PUBLIC}/{name}")


async def found(kubeconfig: Path, **access: Any) -> published.Endpoint:
    given = settings.Settings.model_validate({"kubernetes": {"kubeconfig": kubeconfig}, "access": access})
    async with kube.Client(given.kubernetes) as client:
        return await published.endpoint(client, given, "kubeconfig")


def edited(plane: ControlPlane, folder: Path, **cluster: Any) -> Path:
    """Return the administrator's file with other fields of the cluster; None takes one away."""
    content = yaml.safe_load(plane.kubeconfig.read_text())
    fields = content["clusters"][0]["cluster"]
    for key, value in cluster.items():
        name = key.replace("_", "-")
        fields.pop(name, None)
        fields |= {} if value is None else {name: value}
    path = folder / "edited"
    path.write_text(yaml.safe_dump(content))
    return path


def pem(plane: ControlPlane) -> str:
    content = yaml.safe_load(plane.kubeconfig.read_text())
    return base64.b64decode(content["clusters"][0]["cluster"]["certificate-authority-data"]).decode()


def cluster_info(server: str, ca: str) -> str:
    cluster = {"server": server, "certificate-authority-data": base64.b64encode(ca.encode()).decode()}
    return yaml.safe_dump({"kind": "Config", "clusters": [{"name": "", "cluster": cluster}]})


async def test_our_own_kubeconfig_file(plane: ControlPlane, tmp_path: Path) -> None:
    own = published.Endpoint(server=plane.url, ca=pem(plane))
    assert await found(plane.kubeconfig) == own
    (tmp_path / "ca.crt").write_text(pem(plane))
    by_name = edited(plane, tmp_path, certificate_authority_data=None, certificate_authority="ca.crt")
    assert await found(by_name) == own, "relative to the file"


async def test_what_kubeadm_publishes_goes_first(plane: ControlPlane) -> None:
    kubeconfig = cluster_info("https://k8s.example.org:6443", "PUBLISHED")
    async with publishing(plane, "cluster-info", kubeconfig=kubeconfig):
        there = published.Endpoint(server="https://k8s.example.org:6443", ca="PUBLISHED")
        assert await found(plane.kubeconfig) == there
        named = await found(plane.kubeconfig, server="https://other.example.org")
        assert named == published.Endpoint(server="https://other.example.org", ca="PUBLISHED")
        trusted = await found(plane.kubeconfig, system_ca=True)
        assert trusted == published.Endpoint(server=there.server, ca="")
    for wrong in (
        "nonsense",
        "a: [",
        "kind: Config",
        "clusters: [{cluster: {server: x, certificate-authority-data: ä}}]",
    ):
        async with publishing(plane, "cluster-info", kubeconfig=wrong):
            with pytest.raises(errors.MisconfiguredError, match="SPUR_EVENTS_ACCESS_SERVER"):
                await found(plane.kubeconfig)


async def test_the_ca_that_the_cluster_publishes_for_a_configured_address(plane: ControlPlane) -> None:
    async with publishing(plane, "kube-root-ca.crt", ca_crt="ROOT"):
        named = await found(plane.kubeconfig, server="https://k8s.example.org")
        assert named == published.Endpoint(server="https://k8s.example.org", ca="ROOT")
        # The address and the bundle of our own file belong together.
        assert (await found(plane.kubeconfig)).ca == pem(plane)


async def test_a_certificate_that_we_do_not_check(plane: ControlPlane, tmp_path: Path) -> None:
    """What is good for us would have users trust whoever answers, or refuse the right one."""
    loose = edited(plane, tmp_path, certificate_authority_data=None, insecure_skip_tls_verify=True)
    with pytest.raises(errors.MisconfiguredError, match="SPUR_EVENTS_ACCESS_CA"):
        await found(loose)
    assert await found(loose, system_ca=True) == published.Endpoint(server=plane.url, ca="")
    renamed = edited(plane, tmp_path, tls_server_name="kubernetes.default.svc")
    with pytest.raises(errors.MisconfiguredError, match="SPUR_EVENTS_ACCESS_SERVER"):
        await found(renamed)
