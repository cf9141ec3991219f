"""The long-running parts, each wired from its pieces: `spur-events run`, `up` and the tests start them here.

A part that cannot reach its servers at the start ends with one clear line, for a service manager to start it
again; once it runs it rides out any outage by itself (design rule 20).
"""

import asyncio
from collections.abc import Callable

from spur_events import health, jetstream, postgres, process, retrying, settings
from spur_events.consumers import auth as callout
from spur_events.consumers import converge, guard, retries, rights, sweeper, worker
from spur_events.consumers import kubeconfig as responder
from spur_events.consumers import resync as comparison
from spur_events.consumers.kube import client as kube
from spur_events.producers import outbox
from spur_events.producers import relay as producer

Ready = Callable[[], None]

#: The parts that `everything` runs.
TOGETHER = frozenset({"relay", "apply", "resync", "kubeconfig"})


def _quiet() -> None:
    """Tell nobody."""


async def relay(config: settings.Settings, ready: Ready = _quiet) -> None:
    """Carry changes from the database to NATS until cancelled; `ready` is called when this relay leads."""
    async with postgres.session(config.database, "spur-events relay") as connection:
        await outbox.installation(connection)
    async with jetstream.connect(config.nats, "spur-events relay", "relay") as bus:
        part = producer.Relay(config, bus)

        async def tell() -> None:
            await part.leading.wait()
            ready()

        # One that does not lead stands by, and is as ready as it should be.
        with health.part("relay", lambda: _troubles(bus)):
            await process.together(part.run(), tell())


async def apply(config: settings.Settings, ready: Ready = _quiet) -> None:
    """Make a cluster follow the bucket until cancelled; `ready` is called when events are being taken."""
    async with (
        kube.Client(config.kubernetes, "apply") as client,
        jetstream.connect(config.nats, f"spur-events apply {config.kubernetes.cluster}", "apply") as bus,
    ):
        await client.request("GET", "/version")
        # The relay makes the streams; until it has, there is nothing to apply.
        installation = await retrying.forever("wait for the relay's streams", bus.check_topology)
        again = retries.Retries(bus)
        handler = converge.Converger(config, bus, client, again)
        part = worker.Worker(config, bus, installation, handler.handle)
        keeper = guard.Keeper(config, bus, client, installation)
        reporter = rights.Reporter(config, bus, client, "apply", installation, keeper)

        async def sweep() -> None:
            await part.ready.wait()
            await reporter.looked.wait()
            ready()
            await sweeper.Sweeper(config, bus).run()

        try:
            with health.part("apply", lambda: _troubles(bus, part.ready, reporter)):
                await process.together(part.run(), reporter.run(), sweep())
        finally:
            again.close()


async def resync(config: settings.Settings, ready: Ready = _quiet) -> None:
    """Compare a cluster with the bucket, at intervals and on request, until cancelled."""
    async with (
        kube.Client(config.kubernetes, "resync") as client,
        jetstream.connect(config.nats, f"spur-events resync {config.kubernetes.cluster}", "resync") as bus,
    ):
        await client.request("GET", "/version")
        installation = await retrying.forever("wait for the relay's streams", bus.check_topology)
        part = comparison.Resync(config, bus, client, installation)
        reporter = rights.Reporter(config, bus, client, "resync", installation)

        async def tell() -> None:
            await part.ready.wait()
            await reporter.looked.wait()
            ready()

        with health.part("resync", lambda: _troubles(bus, part.ready, reporter)):
            await process.together(part.run(), reporter.run(), tell())


def _troubles(
    bus: jetstream.Bus, ready: asyncio.Event | None = None, reporter: rights.Reporter | None = None
) -> list[str]:
    """Return why a part cannot do its work now."""
    found = [] if bus.connected else ["NATS is not connected"]
    if (ready is not None and not ready.is_set()) or (reporter is not None and not reporter.looked.is_set()):
        found.append("starting")
    return [*found, *(reporter.reasons() if reporter is not None else [])]


async def kubeconfig(config: settings.Settings, ready: Ready = _quiet) -> None:
    """Answer requests for kubeconfigs of a cluster until cancelled; `ready` is called when they are being taken."""
    name = f"spur-events kubeconfig {config.kubernetes.cluster}"
    async with (
        kube.Client(config.kubernetes, responder.PART) as client,
        jetstream.connect(config.nats, name, responder.PART) as bus,
    ):
        await client.request("GET", "/version")
        installation = await retrying.forever("wait for the relay's streams", bus.check_topology)
        part = responder.Responder(config, bus, client, installation)
        reporter = rights.Reporter(config, bus, client, responder.PART, installation)

        async def tell() -> None:
            await part.ready.wait()
            await reporter.looked.wait()
            ready()

        with health.part(responder.PART, lambda: _troubles(bus, part.ready, reporter)):
            await process.together(part.run(), reporter.run(), tell())


async def auth(config: settings.Settings, ready: Ready = _quiet) -> None:
    """Tell the NATS server who clients without credentials are, until cancelled."""
    async with jetstream.connect(config.nats, "spur-events auth", callout.PART) as bus:
        part = callout.Auth(config, bus)

        async def tell() -> None:
            await part.ready.wait()
            ready()

        with health.part(callout.PART, lambda: _troubles(bus, part.ready)):
            await process.together(part.run(), tell())


async def everything(config: settings.Settings, ready: Ready = _quiet) -> None:
    """Run all parts in this process until cancelled; `ready` is called when all are ready."""
    waiting = set(TOGETHER)

    def arrived(part: str) -> Ready:
        def tell() -> None:
            waiting.discard(part)
            if not waiting:
                ready()

        return tell

    await process.together(
        relay(config, arrived("relay")),
        apply(config, arrived("apply")),
        resync(config, arrived("resync")),
        kubeconfig(config, arrived("kubeconfig")),
    )
