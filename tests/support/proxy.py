"""A reverse proxy in front of the real API server, in the test's own process: it can refuse, delay and count.

Plain HTTP to us, TLS to the server; everybody keeps the credentials that he has.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from aiohttp import web

from spur_events import settings
from spur_events.consumers.kube import connection

Rule = Callable[[web.Request], Awaitable[web.Response | None]]

_PASSED_ON = ("Accept", "Authorization", "Content-Type")


async def _let_through(_request: web.Request) -> web.Response | None:
    return None


@dataclass(kw_only=True)
class Proxy:
    """`rule` answers in the server's place, or returns None to let a request through. `refused`: when, what."""

    kubeconfig: Path
    rule: Rule = _let_through
    refused: list[tuple[float, str, str]] = field(default_factory=list)

    def credentials(self, part: str) -> str:
        """Return the header by which requests of a part are known."""
        content = yaml.safe_load((self.kubeconfig / f"{part}.kubeconfig").read_text("utf-8"))
        return f"Bearer {content['users'][0]['user']['token']}"

    def let_through(self) -> None:
        """Refuse nothing any more."""
        self.rule = _let_through


@contextlib.asynccontextmanager
async def before(upstream: Path, folder: Path) -> AsyncIterator[Proxy]:
    """Run a proxy in front of the API server of a folder of kubeconfigs; the folder `.kubeconfig` leads through it."""
    one = upstream / "apply.kubeconfig"
    api = await connection.load(settings.Kubernetes(kubeconfig=one, concurrency=128))
    proxy = Proxy(kubeconfig=folder / "through-proxy")

    async def answer(request: web.Request) -> web.StreamResponse:
        made = await proxy.rule(request)
        if made is not None:
            proxy.refused.append((time.monotonic(), request.method, request.path))
            return made
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        async with api.rest_client.pool_manager.request(
            request.method,
            f"{api.configuration.host}{request.raw_path}",
            data=await request.read(),
            headers=headers,
        ) as reply:
            return web.Response(
                status=reply.status,
                body=await reply.read(),
                headers={"Content-Type": reply.headers.get("Content-Type", "application/json")},
            )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    # A test that ends must not wait for requests that its rule holds.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    try:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = runner.addresses[0]
        _write(upstream, proxy.kubeconfig, f"http://{address[0]}:{address[1]}")
        yield proxy
    finally:
        await runner.cleanup()
        await connection.close(api)


def refusal(code: int, reason: str, message: str, **headers: str) -> web.Response:
    """Return a refusal as an API server words it; header names are given with underscores."""
    body = {
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "code": code, "reason": reason, "message": message,
    }  # fmt: skip
    return web.Response(
        status=code,
        text=json.dumps(body),
        content_type="application/json",
        headers={name.replace("_", "-"): text for name, text in headers.items()},
    )


async def never() -> web.Response | None:
    """Hold a request until its sender gives up."""
    await asyncio.Event().wait()
    return None


def _write(upstream: Path, folder: Path, server: str) -> None:
    folder.mkdir()
    for path in upstream.glob("*.kubeconfig"):
        content = yaml.safe_load(path.read_text("utf-8"))
        content["clusters"] = [
            {"name": one["name"], "cluster": {"server": server}} for one in content["clusters"]
        ]
        (folder / path.name).write_text(yaml.safe_dump(content), "utf-8")
