"""The long-running parts, each wired from its pieces: `spur-events run`, `up` and the tests start them here.

A part that cannot reach its servers at the start ends with one clear line, for a service manager to start it
again; once it runs it rides out any outage by itself (design rule 20).
"""

from collections.abc import Callable

from spur_events import jetstream, postgres, process, retrying, settings
from spur_events.consumers import converge, retries, sweeper, worker
from spur_events.consumers import resync as comparison
from spur_events.consumers.kube import client as kube
from spur_events.producers import outbox
from spur_events.producers import relay as producer

Ready = Callable[[], None]


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

        async def sweep() -> None:
            await part.ready.wait()
            ready()
            await sweeper.Sweeper(config, bus).run()

        try:
            await process.together(part.run(), sweep())
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

        async def tell() -> None:
            await part.ready.wait()
            ready()

        await process.together(part.run(), tell())


async def everything(config: settings.Settings, ready: Ready = _quiet) -> None:
    """Run all parts in this process until cancelled; `ready` is called when all are ready."""
    waiting = {"relay", "apply", "resync"}

    def arrived(part: str) -> Ready:
        def tell() -> None:
            waiting.discard(part)
            if not waiting:
                ready()

        return tell

    await process.together(
        relay(config, arrived("relay")), apply(config, arrived("apply")), resync(config, arrived("resync"))
    )
