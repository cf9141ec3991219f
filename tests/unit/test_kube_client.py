"""The client against answers that a healthy API server seldom gives (C50), from a server of our own."""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st
from kubernetes_asyncio import client as k8s

from spur_events import errors as base
from spur_events import process, settings
from spur_events.consumers import guard
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import connection, errors, observe, rights

EXEC_API = "client.authentication.k8s.io/v1"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Fake:
    """An HTTP server that gives whatever `handler` says, and the kubeconfig for it."""

    def __init__(self, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.requests: list[web.Request] = []
        self.handler: Handler | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)  # some requests are held for ever
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.write(self._runner.addresses[0][1], "first")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def write(self, port: int, token: str) -> None:
        self.port = port
        self.kubeconfig.write_text(
            f"""
            apiVersion: v1
            kind: Config
            clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
            users: [{{name: u, user: {{token: {token}}}}}]
            contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
            current-context: x
            """
        )

    def plugin(self, script: str) -> None:
        """Have the kubeconfig name an exec plugin, with this shell script in it."""
        path = self.kubeconfig.with_name("plugin")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        content = yaml.safe_load(self.kubeconfig.read_text())
        content["users"][0]["user"] = {"exec": {"apiVersion": EXEC_API, "command": str(path)}}
        self.kubeconfig.write_text(yaml.safe_dump(content))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        assert self.handler is not None
        return await self.handler(request)

    def answers(self, status: int, body: Any = None, **headers: str) -> None:
        async def handler(_: web.Request) -> web.StreamResponse:
            named = {name.replace("_", "-"): text for name, text in headers.items()}
            if isinstance(body, str):
                return web.Response(status=status, text=body, headers=named)
            return web.json_response(body or {"kind": "Status"}, status=status, headers=named)

        self.handler = handler


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[Fake]:
    async with Fake(tmp_path) as made:
        yield made


@pytest.fixture
async def client(fake: Fake) -> AsyncIterator[kube.Client]:
    async with kube.Client(settings.Kubernetes(kubeconfig=fake.kubeconfig, concurrency=2)) as made:
        yield made


def refusal(reason: str, message: str = "said so", **details: Any) -> dict[str, Any]:
    return {"kind": "Status", "reason": reason, "message": message, "details": details}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, refusal("NotFound"), errors.NotFoundError),
        (409, refusal("Conflict"), errors.ConflictError),
        (409, refusal("AlreadyExists"), errors.AlreadyExistsError),
        (403, refusal("Forbidden"), errors.ForbiddenError),
        (
            403,
            refusal("Forbidden", causes=[{"reason": "NamespaceTerminating"}]),
            errors.NamespaceTerminatingError,
        ),
        (401, refusal("Unauthorized"), errors.UnauthorizedError),
        (422, refusal("Invalid"), errors.InvalidError),
        (422, refusal("Invalid", causes=[{"field": "metadata.uid"}]), errors.ConflictError),
        (400, refusal("BadRequest"), errors.InvalidError),
        (410, refusal("Expired"), errors.ExpiredError),
        (429, refusal("TooManyRequests"), errors.ThrottledError),
        (500, refusal("InternalError"), errors.ServerError),
        (503, "no backend", errors.ServerError),
        (302, "moved", errors.InvalidError),
    ],
)
async def test_refusals(fake: Fake, client: kube.Client, status: int, body: Any, kind: type) -> None:
    fake.answers(status, body)
    with pytest.raises(base.SpurEventsError) as caught:
        await client.request("GET", "/api/v1/namespaces/x")
    assert type(caught.value) is kind
    said = body if isinstance(body, str) else "said so"
    assert said in str(caught.value)
    assert client.address in str(caught.value)


@pytest.mark.parametrize(("status", "after"), [(429, "5"), (503, "7"), (500, "1")])
async def test_the_servers_delay_is_handed_on(
    fake: Fake, client: kube.Client, status: int, after: str
) -> None:
    fake.answers(status, Retry_After=after)
    with pytest.raises(errors.ThrottledError) as caught:
        await client.request("PATCH", "/x", body={})
    assert caught.value.retry_after_s == float(after)
    assert len(fake.requests) == 1


async def test_no_delay_where_the_server_names_none_in_seconds(fake: Fake, client: kube.Client) -> None:
    fake.answers(429, Retry_After="Tue, 01 Dec 2026 12:00:00 GMT")
    with pytest.raises(errors.ThrottledError) as caught:
        await client.request("GET", "/x")
    assert caught.value.retry_after_s is None


@pytest.mark.parametrize("body", ["not json", "[1]", ""])
async def test_an_answer_that_is_no_object(fake: Fake, client: kube.Client, body: str) -> None:
    fake.answers(200, body)
    if not body:
        assert await client.request("GET", "/x") == {}
        return
    with pytest.raises(errors.UnreachableError, match=client.address):
        await client.request("GET", "/x")


async def test_a_server_that_hangs_or_is_gone_is_named(fake: Fake) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    fake.handler = hang
    async with kube.Client(settings.Kubernetes(kubeconfig=fake.kubeconfig, timeout_s=2)) as slow:
        with pytest.raises(errors.SlowError, match=r"did not answer GET /x within 2 s"):
            await slow.request("GET", "/x")
    config = settings.Kubernetes(kubeconfig=fake.kubeconfig)
    fake.write(1, "t")
    async with kube.Client(config) as other:
        with pytest.raises(errors.UnreachableError, match=r"127\.0\.0\.1:1 cannot be reached.*KUBECONFIG"):
            await other.request("GET", "/x")


async def test_plain_http_where_tls_is_expected(fake: Fake) -> None:
    fake.answers(200)
    text = fake.kubeconfig.read_text().replace("http://", "https://")
    fake.kubeconfig.write_text(text)
    async with kube.Client(settings.Kubernetes(kubeconfig=fake.kubeconfig)) as other:
        with pytest.raises(errors.UnreachableError, match="https://127"):
            await other.request("GET", "/x")


async def test_writes_are_guarded_after_their_turn_came(fake: Fake, client: kube.Client) -> None:
    """A write that had to wait for its turn is checked when it is sent, not when it was asked for."""
    release = asyncio.Event()
    valid = True

    async def handler(_: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response({})

    def guard() -> None:
        if not valid:
            raise base.TemporaryError("lease lost")

    fake.handler = handler
    guarded = client.guarded(guard)
    first = [asyncio.create_task(guarded.request("PATCH", f"/{i}", body={})) for i in range(2)]
    async with asyncio.timeout(60):
        while len(fake.requests) < 2:  # both places are taken
            await asyncio.sleep(0.01)
    waiting = asyncio.create_task(guarded.request("PATCH", "/late", body={}))
    await asyncio.sleep(0)
    valid = False
    release.set()
    await asyncio.gather(*first)
    with pytest.raises(base.TemporaryError, match="lease lost"):
        await waiting
    assert [request.path for request in fake.requests] == ["/0", "/1"]
    await guarded.request("GET", "/read")
    await client.request("PATCH", "/unguarded", body={})
    assert client.counts == guarded.counts == {"PATCH": 3, "GET": 1}


@given(st.text())
@example("\U0001f600\u2028\x85\x7f\\ud83d")
def test_a_body_is_json_that_yaml_reads_alike(text: str) -> None:
    data = kube.encode({"a": text})
    assert json.loads(data) == yaml.safe_load(data.decode()) == {"a": text}


async def test_no_proxy_is_asked_for_a_loopback_address(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    fake.answers(200)
    async with kube.Client(settings.Kubernetes(kubeconfig=fake.kubeconfig)) as client:
        assert await client.request("GET", "/x") == {"kind": "Status"}


async def test_requests_in_flight_are_bounded(fake: Fake, client: kube.Client) -> None:
    now = most = 0

    async def handler(_: web.Request) -> web.StreamResponse:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return web.json_response({})

    fake.handler = handler
    await process.together(*(client.request("GET", f"/{i}") for i in range(10)))
    assert most == 2


async def test_a_rotated_token_is_read_again(fake: Fake, client: kube.Client) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        good = request.headers.get("Authorization") == "Bearer second"
        return web.json_response({}, status=200 if good else 401)

    fake.handler = handler
    with pytest.raises(errors.UnauthorizedError, match="credentials"):
        await client.request("GET", "/x")
    fake.write(fake.port, "second")
    assert await client.request("GET", "/x") == {}


async def test_credentials_that_are_read_again_leave_no_file_open(fake: Fake) -> None:
    """They are read at each 401, and the library gives the certificates in them to OpenSSL as files."""
    given = yaml.safe_load(fake.kubeconfig.read_text())
    cluster = {"server": "https://127.0.0.1:1", "certificate-authority-data": "eA=="}
    given["clusters"][0]["cluster"] = cluster
    fake.kubeconfig.write_text(yaml.safe_dump(given))

    def files() -> list[str]:
        found = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        return [one for one in found if one.startswith(tempfile.gettempdir())]

    before = files()
    configuration = k8s.Configuration()
    assert await connection.refresh(settings.Kubernetes(kubeconfig=fake.kubeconfig), configuration)
    assert configuration.api_key
    assert files() == before


async def test_a_list_that_expires_starts_again(fake: Fake, client: kube.Client) -> None:
    tokens: list[str | None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        token = request.query.get("continue")
        tokens.append(token)
        if token == "old":
            return web.json_response(refusal("Expired"), status=410)
        more = "old" if len(tokens) == 1 else ""
        items = [{"metadata": {"name": "a"}}]
        return web.json_response({"apiVersion": "v1", "metadata": {"continue": more}, "items": items})

    fake.handler = handler
    found = await observe.list_all(client, "Namespace")
    assert [one["metadata"]["name"] for one in found] == ["a"]
    assert tokens == [None, "old", None]


@pytest.mark.parametrize("text", ["", "[]", "{", "clusters: 5", "current-context: x\nclusters: []"])
async def test_a_damaged_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "damaged"
    path.write_text(text)
    with pytest.raises(base.MisconfiguredError, match=r"damaged cannot be used"):
        async with kube.Client(settings.Kubernetes(kubeconfig=path)):
            pass


async def test_no_configuration_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(base.MisconfiguredError, match="set SPUR_EVENTS_KUBERNETES_KUBECONFIG or KUBECONFIG"):
        async with kube.Client(settings.Kubernetes()):
            pass
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(base.MisconfiguredError, match="absent does not exist"):
        async with kube.Client(settings.Kubernetes()):
            pass


@pytest.mark.parametrize(
    ("look", "refused"),
    [
        (lambda client: observe.observe(client, "lab", "x", "x"), "roles"),
        (lambda client: guard.look(client, "x"), "validatingadmissionpolicies"),
        (lambda client: rights.missing(client, "resync", "x"), "selfsubjectaccessreviews"),
    ],
    ids=["an account", "the guard", "rights"],
)
async def test_no_request_goes_on_when_one_beside_it_was_refused(
    fake: Fake, look: Callable[[kube.Client], Awaitable[Any]], refused: str
) -> None:
    """It could make a connection after its client was closed, which nobody ends."""
    first = True

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal first
        if first and refused in request.path.split("/"):
            first = False
            return web.json_response({"kind": "Status"}, status=403)
        if not request.path.endswith("/namespaces/lab"):
            await asyncio.Event().wait()
        return web.json_response({})

    fake.handler = handler
    async with kube.Client(settings.Kubernetes(kubeconfig=fake.kubeconfig, concurrency=100)) as client:
        with pytest.raises(errors.ForbiddenError):
            await look(client)
        assert not client._api.rest_client.pool_manager.connector._acquired


async def test_an_exec_plugin_that_hangs_is_ended_and_told(fake: Fake, tmp_path: Path) -> None:
    """As one whose identity provider is away: nobody may wait for it for ever, nor may they pile up."""
    hang, told = tmp_path / "hang", tmp_path / "told"
    given = json.dumps({"apiVersion": EXEC_API, "kind": "ExecCredential", "status": {"token": "t"}})
    fake.plugin(f"if [ -e {hang} ]; then echo $$ >> {told}; sleep 1000; fi\necho '{given}'")
    fake.answers(401)
    config = settings.Kubernetes(kubeconfig=fake.kubeconfig, timeout_s=2)
    async with kube.Client(config) as client:
        hang.touch()
        with pytest.raises(errors.UnauthorizedError):
            await client.request("GET", "/x")
    with pytest.raises(base.MisconfiguredError, match="no credentials within 2 s"):
        async with kube.Client(config):
            pass
    pids = told.read_text().split()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


async def test_what_an_exec_plugin_says_when_it_fails_is_told(fake: Fake) -> None:
    fake.plugin("echo log in first >&2\nexit 3")
    with pytest.raises(base.MisconfiguredError, match="ended with 3: log in first"):
        async with kube.Client(settings.Kubernetes(kubeconfig=fake.kubeconfig)):
            pass


@pytest.mark.parametrize(
    "script", ["exec yes", "setsid sleep 30 & sleep 60", "echo '{}'; sleep 30 &"], ids=lambda s: s[:8]
)
async def test_nothing_that_an_exec_plugin_leaves_behind_is_waited_for(fake: Fake, script: str) -> None:
    fake.plugin(script)
    config = settings.Kubernetes(kubeconfig=fake.kubeconfig, timeout_s=1)
    async with asyncio.timeout(20):
        with pytest.raises(base.MisconfiguredError, match="no credentials within 1 s"):
            async with kube.Client(config):
                pass
