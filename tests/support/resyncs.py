"""Asking for resyncs over the bus, as the command and the interval do, and reading what became of them."""

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from support import compare, pipeline, servers, site

from spur_events import jetstream, settings
from spur_events.consumers import resync, source
from spur_events.consumers.plan import guard, observed
from spur_events.schemas import subjects
from spur_events.schemas.events import AuditRequest, Recheck, RecheckReason, ResyncRequest
from spur_events.schemas.resync import WORK, Checkpoint, Item, ResyncReport, RunState


@contextlib.asynccontextmanager
async def running(given: settings.Settings, prefix: str) -> AsyncIterator[site.Site]:
    """Run everything until the block ends; begins when the resync that the start asks for is over."""
    async with site.running(given, prefix) as made:
        await run(made)
        yield made


async def ask(
    bus: jetstream.Bus,
    cluster: str,
    *,
    dry_run: bool = False,
    prune: bool = True,
    prune_unexplained: bool = False,
    installation: str = "",
) -> str:
    """Ask for a resync; returns its id."""
    request = ResyncRequest(
        installation=installation or await bus.check_topology(),
        id=servers.unique(),
        dry_run=dry_run,
        prune=prune,
        prune_unexplained=prune_unexplained,
        requested_by="test",
        at=datetime.now(UTC),
    )
    await resync.ask(bus, cluster, request)
    return request.id


async def report(bus: jetstream.Bus, cluster: str, asked: str = "") -> ResyncReport | None:
    """Return the last report of a cluster, or that of a request."""
    key = subjects.report_key(cluster, asked)
    entry = await bus.get(subjects.STATUS_BUCKET, key, ResyncReport, newest=True)
    return entry.value if entry else None


async def ended(bus: jetstream.Bus, cluster: str, asked: str, patience_s: float = 300.0) -> ResyncReport:
    """Wait until a resync ended, and return its report."""

    async def check() -> ResyncReport | None:
        found = await report(bus, cluster, asked)
        return found if found is not None and found.state is not RunState.RUNNING else None

    return await pipeline.eventually(check, f"resync {asked} ended", patience_s)


async def run(
    here: site.Site, *, dry_run: bool = False, prune: bool = True, prune_unexplained: bool = False
) -> ResyncReport:
    """Resync a site behind all that was committed, and return the report."""
    await pipeline.published(here.config)
    name = here.cluster.name
    asked = await ask(here.bus, name, dry_run=dry_run, prune=prune, prune_unexplained=prune_unexplained)
    return await ended(here.bus, name, asked)


async def audit(bus: jetstream.Bus) -> Checkpoint:
    """Have the relay compare database and bucket now."""
    question = AuditRequest(installation=await bus.check_topology(), requested_by="test")
    return await bus.ask(subjects.AUDIT_REQUEST, question, Checkpoint, source.AUDIT_TIMEOUT_S)


def items(found: ResyncReport, here: site.Site) -> dict[str, Item]:
    """Return the items about a test's own namespaces, by the account without its prefix.

    The cluster is shared: other tests' unmarked namespaces are reported as well.
    """
    start = here.namespace("")
    mine = [item for item in found.items if item.namespace.startswith(start)]
    return {f"{item.namespace.removeprefix(start)}": item for item in mine}


def work(found: ResyncReport) -> list[Item]:
    """Return the items that change something."""
    return [item for item in found.items if item.action in WORK]


async def rechecks(bus: jetstream.Bus, cluster: str) -> list[Recheck]:
    """Return all events by which somebody asked this cluster to look at an account again; not apply's own."""
    found = await bus.read_stream(subjects.EVENTS_STREAM, f"spur.recheck.{cluster}.>", Recheck)
    return [one for one in found if one.reason not in (RecheckReason.BEHIND, RecheckReason.RETRY)]


async def versions(here: site.Site) -> dict[tuple[str, str, str], str]:
    """Return the resourceVersion of every object of the accounts, once their controller has nothing to write."""
    found: dict[tuple[str, str, str], str] = {}

    async def still() -> bool:
        live = await compare.objects(here.cluster, await here.bus.check_topology())
        mine = {key: one for key, one in live.items() if key[0] not in (guard.POLICY, guard.BINDING)}
        quotas = [one for key, one in mine.items() if key[0] == "ResourceQuota"]
        if not all(map(observed.quota_in_force, quotas)):
            return False
        found.update({key: one["metadata"]["resourceVersion"] for key, one in mine.items()})
        return True

    await pipeline.eventually(still, "the quotas are in force")
    return found
