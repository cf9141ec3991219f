"""Whether a process lives and whether its parts can do their work, over HTTP: /healthz and /readyz.

The command line serves it for `run` (`serving`); each part in `services` says how it is (`part`). For probes of a
service manager or of Kubernetes; what a person asks is answered by `spur-events status`.
"""

import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable, Collection, Iterator

from aiohttp import web

from spur_events import errors, settings

#: Returns why a part cannot do its work now; nothing if it can.
Check = Callable[[], Collection[str]]

_checks: contextvars.ContextVar[dict[str, Check] | None] = contextvars.ContextVar("checks", default=None)


@contextlib.contextmanager
def part(name: str, check: Check) -> Iterator[None]:
    """Let a part be asked for as long as the block lasts; nobody asks where nothing is served."""
    checks = _checks.get()
    if checks is None:
        yield
        return
    checks[name] = check
    try:
        yield
    finally:
        del checks[name]


@contextlib.asynccontextmanager
async def serving(given: settings.Health, expected: Collection[str]) -> AsyncIterator[int]:
    """Serve for as long as the block lasts, about the parts that the block starts; yields the port, 0 for none.

    Args:
        given: where to listen.
        expected: names of the parts; one that has not said how it is has not started yet.

    Raises:
        MisconfiguredError: if the address cannot be had.
    """
    if not given.port:
        yield 0
        return
    checks: dict[str, Check] = {}

    async def live(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_request: web.Request) -> web.Response:
        reasons = {name: list(checks[name]()) if name in checks else ["not started yet"] for name in expected}
        reasons = {name: found for name, found in reasons.items() if found}
        return web.json_response(
            {"ready": not reasons, "reasons": reasons},
            status=web.HTTPServiceUnavailable.status_code if reasons else web.HTTPOk.status_code,
        )

    app = web.Application()
    app.router.add_get("/healthz", live)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    token = _checks.set(checks)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, given.host, given.port).start()
        except OSError as error:
            raise errors.MisconfiguredError(
                f"cannot listen on {given.host}:{given.port} for health: {error.strerror or error}; set"
                " SPUR_EVENTS_HEALTH_PORT to a free port, or to 0 for none"
            ) from error
        yield given.port
    finally:
        _checks.reset(token)
        await runner.cleanup()
