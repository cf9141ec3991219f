"""What was open before a removal: exec, attach, port-forward and watch go on, as docs/security.md says.

The real API server does the proxying. There is no kubelet here: a Node points to a small server of ours that accepts
the upgrade and sends every byte back, which is all that the API server sees of one.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import members, pipeline, servers, site

from spur_events import process
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import kinds
from spur_events.local.nats import Nats

_PATIENCE_S = 60.0
_UPGRADED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
    b"X-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n"
)
_UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "SPDY/3.1",
    "X-Stream-Protocol-Version": "v4.channel.k8s.io",
    "Content-Length": "0",
}


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One open request to the API server, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def echoes(self, text: bytes) -> bool:
        self.writer.write(text)
        async with asyncio.timeout(_PATIENCE_S):
            return await self.reader.readexactly(len(text)) == text

    async def shows(self, text: bytes) -> bool:
        async with asyncio.timeout(_PATIENCE_S):
            await self.reader.readuntil(text)
        return True


@contextlib.asynccontextmanager
async def kubelet(certificates: Path) -> AsyncIterator[int]:
    """Run something that the API server takes for a kubelet; yields its port."""
    open_streams: set[asyncio.StreamWriter] = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_streams.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(_UPGRADED)
            while got := await reader.read(1024):
                writer.write(got)
        writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "apiserver.crt", certificates / "apiserver.key")
    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in open_streams:
            process.abort(writer.transport)


@contextlib.asynccontextmanager
async def node(client: kube.Client, name: str, port: int) -> AsyncIterator[None]:
    """Have a Node whose kubelet is there."""
    await client.request("POST", "/api/v1/nodes", body={"metadata": {"name": name}})
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    path = f"/api/v1/nodes/{name}"
    await client.request("PATCH", f"{path}/status", body={"status": status}, content_type=kube.MERGE_PATCH)
    try:
        yield
    finally:
        await client.request("DELETE", path)


def address(kubeconfig: Path) -> str:
    cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
    return str(cluster["server"]).removeprefix("https://")


@contextlib.asynccontextmanager
async def stream(
    kubeconfig: Path, token: str, method: str, path: str, headers: dict[str, str], status: bytes
) -> AsyncIterator[Stream]:
    """Send one request and keep its connection."""
    host, _, port = address(kubeconfig).partition(":")
    context = ssl.create_default_context(cafile=str(kubeconfig.parent / "certificates" / "apiserver.crt"))
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        lines = {"Host": host, "Authorization": f"Bearer {token}", **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode())
        async with asyncio.timeout(_PATIENCE_S):
            answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status), answer
        yield Stream(reader=reader, writer=writer)
    finally:
        process.abort(writer.transport)
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_what_is_open_goes_on_after_the_removal(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> None:
    certificates = control_plane.kubeconfig.parent / "certificates"
    if not certificates.exists():
        pytest.skip("a given cluster has kubelets of its own")
    given = site.config(database_url, nats_server, control_plane, unique)
    async with site.running(given, unique) as here, kubelet(certificates) as port:
        await here.add("lab", "alice", "bob")
        client, place = here.cluster.client, here.namespace("lab")
        async with node(client, unique, port):
            await bound_pod(client, place, unique)
            token = await members.token(here, "lab", "alice")
            await look(client, place, token, control_plane, here)


async def look(
    client: kube.Client, place: str, token: str, control_plane: servers.Cluster, here: site.Site
) -> None:
    pod = kinds.one("Pod", "shell", place)
    secrets = f"/api/v1/namespaces/{place}/secrets"
    upgrades = {
        "exec": f"{pod}/exec?command=sh&stdin=true&stdout=true&container=c",
        "attach": f"{pod}/attach?stdin=true&stdout=true&container=c",
        "port-forward": f"{pod}/portforward?ports=80",
    }

    async def new_one(path: str, headers: dict[str, str], status: bytes, method: str = "POST") -> Stream:
        return await opened.enter_async_context(
            stream(control_plane.kubeconfig, token, method, path, headers, status)
        )

    async with contextlib.AsyncExitStack() as opened:
        streams = {what: await new_one(path, _UPGRADE, b"101") for what, path in upgrades.items()}
        # A year: nobody refuses it.
        watch = await new_one(f"{secrets}?watch=1&timeoutSeconds=31536000", {}, b"200", "GET")
        here.sql("DELETE FROM users WHERE name = 'alice' AND account = '$lab'")
        await here.settled("lab")

        async def refused() -> bool:
            try:
                await new_one(pod, {}, b"40", "GET")
            except AssertionError:
                return False
            return True

        await pipeline.eventually(refused, "new requests are refused")
        for what, path in upgrades.items():
            await new_one(path, _UPGRADE, b"40")  # none can be opened any more
            assert await streams[what].echoes(b"still here"), what
        await client.request("POST", secrets, body={"metadata": {"name": "made-later"}})
        assert await watch.shows(b"made-later")


async def bound_pod(client: kube.Client, namespace: str, node_name: str) -> None:
    """Have a pod on a node, as if a scheduler had put it there."""
    spec: dict[str, Any] = {"containers": [{"name": "c", "image": "i"}]}
    body = {"metadata": {"name": "shell"}, "spec": spec}
    await client.request("POST", kinds.collection("Pod", namespace), body=body)
    target = {"apiVersion": "v1", "kind": "Node", "name": node_name}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "shell"}, "target": target}
    await client.request("POST", f"{kinds.one('Pod', 'shell', namespace)}/binding", body=binding)
