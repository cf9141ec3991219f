"""Compares the bucket with a cluster, and has every difference looked at by the account's one writer.

`spur-events run resync` runs it, any number of times a cluster: a request is a message that only one of them gets.
It never writes to the cluster itself, and what it may conclude from absence, `source` decides (design rule 12).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from spur_events import errors, jetstream, process, retrying, settings
from spur_events.consumers import answers, guard, lease, source
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors as kube_errors
from spur_events.consumers.kube import observe
from spur_events.consumers.plan import marks, resync
from spur_events.schemas import codec, names, subjects
from spur_events.schemas.events import AuditRequest, Recheck, RecheckReason, ResyncRequest
from spur_events.schemas.resync import (
    DELETIONS,
    WORK,
    Action,
    Checkpoint,
    Item,
    ResyncReport,
    RunState,
)
from spur_events.schemas.status import AccountStatus

log = logging.getLogger(__name__)

_ACK_WAIT_S = 30.0
_WAIT_S = 5.0
#: Objects a page: ten list calls for 500 accounts with five members each leave room to spare.
_PAGE = 1000
_IN_FLIGHT = 64
#: About a minute, or as long as the server asks for.
_LIST_ATTEMPTS = 15
_ANSWER_KEPT = timedelta(minutes=10)
_INSIDE = ("ResourceQuota", "LimitRange", "Role", "RoleBinding", "ServiceAccount")
_REASONS = {
    Action.PRUNE: RecheckReason.PRUNE,
    Action.PRUNE_UNEXPLAINED: RecheckReason.PRUNE_UNEXPLAINED,
}


class Resync:
    """The resyncs of one cluster that this process carries out."""

    def __init__(
        self, config: settings.Settings, bus: jetstream.Bus, client: kube.Client, installation: str
    ) -> None:
        self._config = config
        self._cluster = config.kubernetes.cluster
        self._durable = subjects.resync_durable(self._cluster)
        self._bus = bus
        self._client = client
        self._installation = installation
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Take requests, and make one at every interval, until cancelled."""
        await self._ensure()
        self.ready.set()
        await process.together(self._take(), self._ask_regularly())

    async def _ensure(self) -> None:
        async def attempt() -> None:
            await self._bus.ensure_consumer(self._durable, [subjects.resync(self._cluster)], _ACK_WAIT_S)

        await retrying.forever("ensure resync consumer", attempt)

    async def _ask_regularly(self) -> None:
        interval_s = self._config.resync.interval_s
        while True:
            # One request an interval, whichever of several processes is first.
            number = int(time.time() // interval_s)
            request = ResyncRequest(
                installation=self._installation,
                id=f"interval-{number}",
                prune=True,
                requested_by="interval",
                at=datetime.now(UTC),
            )
            try:
                await ask(self._bus, self._cluster, request)
            except errors.TemporaryError as error:
                log.warning("resync not asked for", extra={"error": str(error)})
            await asyncio.sleep(interval_s - time.time() % interval_s)

    async def _take(self) -> None:
        async with self._bus.pull(self._durable) as pull:
            while True:
                asked_at_s = lease.now_s()
                try:
                    message = await pull.next(_WAIT_S)
                except errors.TemporaryError as error:
                    log.warning("no requests to be had", extra={"error": str(error)})
                    message = None
                if message is None:
                    if lease.now_s() - asked_at_s < _WAIT_S / 2:  # not ready, or the consumer is gone
                        await asyncio.sleep(retrying.jittered_s(0.5))
                        await self._ensure()
                    continue
                await self._answer(message, asked_at_s)

    async def _answer(self, message: jetstream.Message, asked_at_s: float) -> None:
        held = lease.Lease(
            message, asked_at_s=asked_at_s, ack_wait_s=_ACK_WAIT_S, request_timeout_s=_ACK_WAIT_S / 4
        )
        keeper = asyncio.create_task(held.keep())
        try:
            try:
                request = codec.decode(ResyncRequest, message.data, message.headers)
            except codec.CodecError as error:
                await self._bus.park(message, subjects.parked(self._cluster, "unreadable"), str(error))
            else:
                await self._perform(request)
            await message.done()
        except asyncio.CancelledError:
            # Another process takes it at once, instead of after the ack wait.
            with contextlib.suppress(errors.TemporaryError):
                await message.again(0.1)
            raise
        except errors.TemporaryError as error:
            # The request comes again after its ack wait.
            log.warning("resync did not end", extra={"error": str(error)})
        finally:
            held.end()
            keeper.cancel()

    async def _perform(self, request: ResyncRequest) -> None:
        started = datetime.now(UTC)
        report = ResyncReport(
            id=request.id,
            cluster=self._cluster,
            installation=self._installation,
            state=RunState.RUNNING,
            dry_run=request.dry_run,
            prune=request.prune,
            prune_unexplained=request.prune_unexplained,
            requested_by=request.requested_by,
            started_at=started,
            at=started,
        )
        if request.installation != self._installation:
            text = f"asked by installation {request.installation}, this cluster follows {self._installation}"
            await self._put(report.model_copy(update={"state": RunState.REFUSED, "message": text}))
            return
        await self._tidy()
        await self._put(report)
        reads = self._client.counts["GET"]
        try:
            report = await self._compare(request, report)
        except kube_errors.ForbiddenError as error:
            text = f"nothing was deleted: a right is missing to see what the cluster holds: {error}"
            report = report.model_copy(update={"state": RunState.REFUSED, "message": text})
        except kube_errors.ANSWERS as error:
            report = report.model_copy(update={"state": RunState.FAILED, "message": str(error)})
        except kube_errors.UnreachableError as error:
            report = report.model_copy(update={"state": RunState.FAILED, "message": str(error)})
        report = report.model_copy(update={"reads": self._client.counts["GET"] - reads})
        await self._put(report)
        log.info(
            "resync ended",
            extra={
                "id": report.id,
                "state": str(report.state),
                "accounts": report.accounts,
                "unchanged": report.unchanged,
                "items": len(report.items),
                "error": report.message,
            },
        )

    async def _compare(self, request: ResyncRequest, report: ResyncReport) -> ResyncReport:
        found = await source.read(self._bus, self._installation)
        statuses = {
            key.removeprefix(f"{self._cluster}."): entry.value
            async for key, entry in self._bus.each(subjects.STATUS_BUCKET, AccountStatus, f"{self._cluster}.")
            if isinstance(entry, jetstream.Entry)
        }
        live = await self._live()
        plan = resync.plan(
            found.states,
            statuses,
            live,
            installation=self._installation,
            config=self._config.quota,
            now=datetime.now(UTC),
            prune_grace_s=self._config.resync.prune_grace_s,
            unexplained=found.unexplained,
        )
        ours = sum(_owner(one) == self._installation for one in live.namespaces)
        others = sum(map(_is_marked, live.namespaces)) - ours
        doubt = found.doubt(ours, others, override=request.prune_unexplained)
        items = [_allowed(item, request, doubt) for item in plan.items]
        items += await guard.items(self._client, self._installation)
        report = report.model_copy(
            update={
                "accounts": found.contents.accounts,
                "unchanged": plan.unchanged,
                "items": tuple(items),
                "message": doubt,
            }
        )
        ended = RunState.REFUSED if doubt else RunState.DONE
        if request.dry_run:
            return report.model_copy(update={"state": ended})
        await self._forget(request, items, doubt)
        mended = await guard.mended(self._bus, self._cluster, self._installation, items)
        items = [mended.get(number, item) for number, item in enumerate(items)]
        items = await self._carry_out(report, items)
        if ended is RunState.DONE and any(item.failed for item in items):
            ended = RunState.FAILED
        return report.model_copy(update={"state": ended, "items": tuple(items), "waiting": 0})

    async def _live(self) -> resync.Live:
        """List everything that could be ours: never one request an account."""
        selector = f"{marks.MANAGED_BY}={marks.FIELD_MANAGER}"
        namespaces, *inside = await process.together(
            self._listed("Namespace"), *(self._listed(kind, selector) for kind in _INSIDE)
        )
        by_namespace: dict[str, list[marks.Manifest]] = {}
        for found in (one for listed in inside for one in listed):
            by_namespace.setdefault(found["metadata"]["namespace"], []).append(found)
        return resync.Live(
            namespaces=tuple(
                one
                for one in namespaces
                if one["metadata"]["name"].startswith(names.NAMESPACE_PREFIX) or _is_marked(one)
            ),
            inside={name: tuple(found) for name, found in by_namespace.items()},
        )

    async def _listed(self, kind: str, selector: str = "") -> list[marks.Manifest]:
        """List a kind; a server that is away or asks to be left alone for a while is waited for (rule 20)."""

        async def attempt() -> list[marks.Manifest]:
            return await observe.list_all(self._client, kind, selector=selector, page=_PAGE)

        refused = (kube_errors.ForbiddenError, kube_errors.UnauthorizedError)
        return await retrying.call(f"list {kind}", _LIST_ATTEMPTS, attempt, unless=refused)

    async def _forget(self, request: ResyncRequest, items: Sequence[Item], doubt: str) -> None:
        """Have the relay record the deletion of accounts that only the bucket knows; their namespaces close."""
        slugs = tuple(
            item.slug
            for item in items
            if item.action is Action.UNEXPLAINED
            and item.incarnation
            and (not request.limited or item.slug in request.confirmed)
        )
        if not (request.prune_unexplained and slugs) or doubt:
            return
        question = AuditRequest(
            installation=self._installation, forget=slugs, requested_by=request.requested_by
        )
        await self._bus.ask(subjects.AUDIT_REQUEST, question, Checkpoint, source.AUDIT_TIMEOUT_S)

    async def _carry_out(self, report: ResyncReport, items: list[Item]) -> list[Item]:
        """Publish a recheck for each item that is work, and wait for what becomes of it."""
        waiting = answers.Answers(self._bus, self._cluster)
        await waiting.begin()
        limit = asyncio.Semaphore(_IN_FLIGHT)

        async def publish(number: int, item: Item) -> None:
            event = Recheck(
                installation=self._installation,
                slug=item.slug,
                reason=_REASONS.get(item.action, RecheckReason.RESYNC),
                namespace_uid=item.namespace_uid,
                incarnation=item.incarnation,
            )
            async with limit:
                sequence = await self._bus.publish(
                    subjects.recheck(self._cluster, item.slug, self._bus.partitions),
                    event,
                    message_id=f"resync.{self._cluster}.{report.id}.{report.started_at.timestamp()}.{item.slug}",
                )
            waiting.expect(number, item, sequence)

        await process.together(
            *(
                publish(number, item)
                for number, item in enumerate(items)
                if item.action in WORK and not item.outcome
            )
        )
        async for left in waiting.answers():
            await self._put(
                report.model_copy(
                    update={
                        "items": tuple(waiting.applied_to(items)),
                        "waiting": left,
                        "at": datetime.now(UTC),
                    }
                )
            )
        return waiting.applied_to(items)

    async def _put(self, report: ResyncReport) -> None:
        """Write the cluster's last report, and then the answer to whoever asked: another run may follow at once."""
        report = report.model_copy(update={"at": datetime.now(UTC)})
        for key in (
            subjects.report_key(self._cluster),
            subjects.report_key(self._cluster, report.id),
        ):
            try:
                await self._bus.put(subjects.STATUS_BUCKET, key, report)
            except codec.TooLargeError:
                kept = [item for item in report.items if item.failed or item.action in DELETIONS][:1000]
                text = f"{report.message} (only {len(kept)} of {len(report.items)} items fit in a report)".strip()
                shorter = report.model_copy(update={"items": tuple(kept), "message": text})
                await self._bus.put(subjects.STATUS_BUCKET, key, shorter)

    async def _tidy(self) -> None:
        """Remove answers that nobody waits for any more."""
        prefix = subjects.report_key(self._cluster, "")
        reports = await self._bus.read_all(subjects.STATUS_BUCKET, ResyncReport, f"{prefix}.")
        for key, entry in reports.items():
            old = isinstance(entry, jetstream.Damaged) or datetime.now(UTC) - entry.value.at > _ANSWER_KEPT
            if old:
                await self._bus.delete(subjects.STATUS_BUCKET, key, last=entry.sequence)


def _is_marked(namespace: marks.Manifest) -> bool:
    """Whether a namespace is of some installation of spur or spur-events."""
    labels = namespace["metadata"].get("labels") or {}
    return bool(labels.get(marks.MANAGED_BY) == marks.FIELD_MANAGER)


def _owner(namespace: marks.Manifest) -> str:
    """Return the installation of a marked namespace; empty where there is none."""
    labels = namespace["metadata"].get("labels") or {}
    return str(labels.get(marks.INSTALLATION, "")) if _is_marked(namespace) else ""


def _allowed(item: Item, request: ResyncRequest, doubt: str) -> Item:
    """Return an item as it will be treated: a deletion that is not allowed says so, and is not carried out."""
    if item.action is Action.UNEXPLAINED and request.prune_unexplained and not item.incarnation:
        item = item.model_copy(update={"action": Action.PRUNE_UNEXPLAINED})
    if item.action not in DELETIONS:
        return item
    if doubt:
        return item.model_copy(update={"outcome": "not deleted: the source is in doubt"})
    if not request.prune:
        return item.model_copy(update={"outcome": "not deleted: not asked for"})
    if request.limited and item.slug not in request.confirmed:
        return item.model_copy(update={"outcome": "not deleted: it was not in the plan that was agreed to"})
    return item


async def ask(bus: jetstream.Bus, cluster: str, request: ResyncRequest) -> None:
    """Ask for a resync; it is carried out once, now or when a process that does it is there again."""
    await bus.publish(subjects.resync(cluster), request, message_id=f"resync.{cluster}.{request.id}")
