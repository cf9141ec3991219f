"""/healthz and /readyz of running parts, asked as a probe asks."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from support import pipeline, processes, servers, site

from spur_events import errors, health, services, settings
from spur_events.local import folder
from spur_events.local.nats import Nats


@pytest.fixture
def port() -> int:
    return folder.free_port()


async def ask(port: int, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        text = answer.content_type == "text/plain"
        return answer.status, await (answer.text() if text else answer.json())


async def ready(port: int, *, patience_s: float = pipeline.PATIENCE_S) -> Any:
    async def check() -> Any:
        with contextlib.suppress(aiohttp.ClientError):
            status, body = await ask(port, "/readyz")
            return body if status == 200 else None
        return None

    return await pipeline.eventually(check, "ready", patience_s)


@contextlib.asynccontextmanager
async def serving(port: int, *parts: str) -> AsyncIterator[None]:
    async with health.serving(settings.Health(port=port), parts):
        yield


async def test_a_part_says_why_it_is_not_ready(port: int) -> None:
    reasons = ["NATS is not connected"]
    async with serving(port, "one", "two"):
        assert await ask(port, "/healthz") == (200, "ok\n")
        body = {"ready": False, "reasons": {"one": ["not started yet"], "two": ["not started yet"]}}
        assert await ask(port, "/readyz") == (503, body)
        with health.part("one", lambda: reasons), health.part("two", list):
            assert await ask(port, "/readyz") == (503, {"ready": False, "reasons": {"one": reasons}})
            reasons.clear()
            assert await ask(port, "/readyz") == (200, {"ready": True, "reasons": {}})
        assert (await ask(port, "/readyz"))[0] == 503


async def test_no_port_no_server() -> None:
    async with serving(0, "one"):
        with health.part("one", list):
            pass


async def test_a_taken_port_is_named(port: int) -> None:
    async with serving(port, "one"):
        with pytest.raises(errors.MisconfiguredError, match=f"{port}.*SPUR_EVENTS_HEALTH_PORT"):
            async with serving(port, "one"):
                pass


async def test_all_parts_together(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str, port: int
) -> None:
    given = site.config(database_url, nats_server, control_plane, unique)
    await pipeline.may_guard(given)
    async with (
        serving(port, *services.TOGETHER),
        pipeline.background(services.everything(given)),
    ):
        await ready(port)
        nats_server.kill()

        async def told() -> Any:
            status, body = await ask(port, "/readyz")
            return body["reasons"] if status == 503 else None

        reasons = await pipeline.eventually(told, "NATS is missed")
        assert "NATS is not connected" in reasons["relay"]
        assert (await ask(port, "/healthz"))[0] == 200
        nats_server.start()
        await ready(port)


async def test_a_process_of_its_own(
    database_url: str,
    nats_server: Nats,
    control_plane: servers.Cluster,
    unique: str,
    port: int,
    tmp_path: Any,
) -> None:
    given = site.config(database_url, nats_server, control_plane, unique, health={"port": port})
    with processes.Service("relay", given, tmp_path / "relay.log"):
        assert await ready(port) == {"ready": True, "reasons": {}}
        other = folder.free_port()
        standby = given.model_copy(update={"health": settings.Health(port=other)})
        # One that does not lead is as ready as it should be.
        with processes.Service("relay", standby, tmp_path / "standby.log"):
            await ready(other)
