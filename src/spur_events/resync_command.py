"""`spur-events resync` and `adopt`: ask the running parts over the bus, show what they plan and did.

Needs NATS only; the work is done by `run relay`, `run resync` and `run apply` (consumers.resync).
"""

import asyncio
import contextlib
import getpass
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import rich.console
import rich.progress
import typer

from spur_events import errors, jetstream, settings
from spur_events.consumers import answers, retries, source
from spur_events.consumers import resync as requests
from spur_events.schemas import names, subjects
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.events import AuditRequest, RecheckReason, ResyncRequest
from spur_events.schemas.resync import DELETIONS, WORK, Action, Checkpoint, Item, ResyncReport, RunState
from spur_events.schemas.status import AccountStatus, Phase

_POLL_S = 0.1
#: How often a listening service is looked for, `_POLL_S` apart.
_LOOKS = 50
#: Without a sign of life from the process that runs a resync for so long, it is given up. Longer than that process
#: waits for the writers, which is told.
_SILENCE_S = answers.STALL_S + 30.0
_AUDIT_PAUSES_S = (0.5, 1.0, 2.0)
_EXIT_CODES = {RunState.DONE: 0, RunState.FAILED: 1, RunState.REFUSED: 3}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What was asked for on the command line."""

    dry_run: bool
    yes: bool
    prune_unexplained: bool
    as_json: bool


async def resync(config: settings.Settings, wish: Wish, cluster: str | None) -> int:
    """Plan, show, ask, carry out, sum up; returns the exit code."""
    console = rich.console.Console(stderr=wish.as_json, highlight=False, soft_wrap=True)
    async with jetstream.connect(config.nats, "spur-events resync command") as bus:
        asking = _Asking(bus, cluster or config.kubernetes.cluster, await bus.check_topology(), wish, console)
        unheard = await asking.audit()
        plan = await asking.run(dry_run=True)
        _show_plan(console, plan)
        if wish.dry_run:
            return asking.end(plan, unheard)
        deletions = _deletions(plan)
        allowed = not deletions or _may_delete(console, wish, deletions)
        agreed = [item.slug for item in deletions] if allowed and not unheard else []
        done = await asking.run(dry_run=False, agreed=agreed)
        _show_outcome(console, done)
        code = asking.end(done, unheard)
        if allowed:
            return code
        console.print(f"{len(deletions)} deletions were not carried out: run it with --yes", markup=False)
        return code or errors.RefusedError.exit_code


class _Asking:
    """One command's conversation with the running parts."""

    def __init__(
        self, bus: jetstream.Bus, cluster: str, installation: str, wish: Wish, console: rich.console.Console
    ) -> None:
        self._bus = bus
        self._cluster = cluster
        self._installation = installation
        self._wish = wish
        self._console = console
        self._user = getpass.getuser()

    async def audit(self) -> str:
        """Have the relay compare database and bucket now; returns why that was not possible, if so."""
        question = AuditRequest(installation=self._installation, requested_by=self._user)
        for pause_s in (*_AUDIT_PAUSES_S, None):
            try:
                await self._bus.ask(subjects.AUDIT_REQUEST, question, Checkpoint, source.AUDIT_TIMEOUT_S)
            except errors.UnreachableError:
                raise  # waited for long enough
            except errors.TemporaryError as error:
                if pause_s is not None:
                    # A relay that gives up its lead leads again in a moment, or another one does.
                    await asyncio.sleep(pause_s)
                elif isinstance(error, jetstream.MissingError):
                    return "no relay leads, so the database could not be compared with the bucket: nothing is deleted"
                else:
                    raise
            else:
                break
        return ""

    async def run(self, *, dry_run: bool, agreed: Sequence[str] = ()) -> ResyncReport:
        """Ask for a resync, or join a running one that does the same, and return its last report.

        No deletion is carried out but those of the slugs that were `agreed` to.
        """
        delete = dry_run or bool(agreed)
        request = ResyncRequest(
            installation=self._installation,
            id=uuid.uuid4().hex,
            dry_run=dry_run,
            prune=delete,
            prune_unexplained=delete and self._wish.prune_unexplained,
            requested_by=self._user,
            at=datetime.now(UTC),
            limited=not dry_run,
            confirmed=tuple(agreed),
        )
        report = await self._report()
        followed = request.id
        if report is not None and _can_join(report, request):
            self._console.print(
                f"a resync asked for by {report.requested_by} is running: joining it", markup=False
            )
            followed = report.id
        else:
            await self._somebody_listens()
            await requests.ask(self._bus, self._cluster, request)
        return await self._follow(followed)

    async def _follow(self, followed: str) -> ResyncReport:
        heard_s = time.monotonic()
        last: datetime | None = None
        progress = rich.progress.Progress(
            console=self._console, transient=True, disable=not self._console.is_terminal
        )
        bar = progress.add_task("waiting", total=None)
        with progress:
            while True:
                report = await self._report(followed)
                latest = report or await self._report()  # while another run is under way
                if latest is not None and latest.at != last:
                    last, heard_s = latest.at, time.monotonic()
                if report is not None:
                    if report.state is not RunState.RUNNING:
                        return report
                    total = sum(item.action in WORK for item in report.items)
                    if total:
                        progress.update(
                            bar, description="applying", total=total, completed=total - report.waiting
                        )
                if time.monotonic() - heard_s > _SILENCE_S:
                    raise errors.TimedOutError(
                        f"the resync of cluster {self._cluster} gave no sign for {_SILENCE_S:.0f} s;"
                        " look at the log of 'spur-events run resync'; asking again is safe"
                    )
                await asyncio.sleep(_POLL_S)

    async def _report(self, request: str = "") -> ResyncReport | None:
        key = subjects.report_key(self._cluster, request)
        entry = await self._bus.get(subjects.STATUS_BUCKET, key, ResyncReport, newest=True)
        return entry.value if entry else None

    async def _somebody_listens(self) -> None:
        for _ in range(_LOOKS):  # a service that just asks for the next request is not seen for a moment
            with contextlib.suppress(jetstream.MissingError):
                if await self._bus.listeners(subjects.resync_durable(self._cluster)):
                    return
            await asyncio.sleep(_POLL_S)
        raise errors.UnreachableError(
            f"nobody resyncs cluster {self._cluster!r}: start 'spur-events run resync' there, or name another"
            " cluster with --cluster"
        )

    def end(self, report: ResyncReport, unheard: str) -> int:
        """Print what a person must know at the end, and return the exit code."""
        if self._wish.as_json:
            sys.stdout.write(report.model_dump_json(indent=2) + "\n")
        for text in (report.message, unheard):
            if text:
                self._console.print(text, markup=False)
        return errors.RefusedError.exit_code if unheard else _EXIT_CODES.get(report.state, 1)


def _can_join(report: ResyncReport, request: ResyncRequest) -> bool:
    if request.confirmed:
        return False  # the other run has other deletions to carry out
    alive = report.state is RunState.RUNNING and report.at > request.at - timedelta(seconds=_SILENCE_S / 2)
    same = (report.dry_run, report.prune, report.prune_unexplained)
    return alive and same == (request.dry_run, request.prune, request.prune_unexplained)


def _deletions(plan: ResyncReport) -> list[Item]:
    """Return what ends in the deletion of a namespace, at once or after the grace.

    To have an account forgotten that only the bucket knows is to record its deletion.
    """
    forget = plan.prune_unexplained and not plan.message
    return [
        item
        for item in plan.items
        if (item.action in DELETIONS and not item.outcome)
        or (forget and item.action is Action.UNEXPLAINED and item.incarnation)
    ]


def _may_delete(console: rich.console.Console, wish: Wish, deletions: list[Item]) -> bool:
    if wish.yes:
        return True
    if not sys.stdin.isatty():
        return False
    console.print(
        f"{len(deletions)} namespaces would be deleted, with all that is in them, at once or after their grace.",
        markup=False,
    )
    return typer.confirm("Delete them?", default=False, err=wish.as_json)


def _show_plan(console: rich.console.Console, plan: ResyncReport) -> None:
    for item in plan.items:
        console.print(_line(item), markup=False)
    console.print(_sum(plan), markup=False)


def _show_outcome(console: rich.console.Console, report: ResyncReport) -> None:
    for item in report.items:
        if item.failed:
            console.print(
                f"failed: {item.account or item.namespace or 'member guard'}: {item.outcome}", markup=False
            )
    failed = sum(item.failed for item in report.items)
    done = sum(item.carried_out for item in report.items)
    took_s = (report.at - report.started_at).total_seconds()
    console.print(f"done: {done}, failed: {failed}, in {took_s:.1f} s", markup=False)


def _line(item: Item) -> str:
    details = [*item.details, *([item.outcome] if item.outcome else [])]
    about = f"{item.account or '-'} ({item.namespace})" if item.namespace else "member guard"
    return f"{item.action:12} {about}{': ' if details else ''}{'; '.join(details)}"


def _sum(plan: ResyncReport) -> str:
    counts: Iterable[tuple[str, int]] = Counter(str(item.action) for item in plan.items).items()
    parts = [f"{count} {action}" for action, count in counts]
    parts.append(f"{plan.unchanged} unchanged")
    return f"plan for {plan.accounts} accounts on cluster {plan.cluster}: {', '.join(parts)} ({plan.reads} requests)"


async def adopt(config: settings.Settings, account: str, cluster: str | None) -> str:
    """Have an account's writer take over the namespace of its name; returns what to print.

    Raises:
        PermanentError: if there is no such account, or the namespace cannot be taken over.
        TimedOutError: if no apply process answers.
    """
    where = cluster or config.kubernetes.cluster
    slug = names.slug(account)
    async with jetstream.connect(config.nats, "spur-events adopt") as bus:
        state = await bus.get(subjects.ACCOUNTS_BUCKET, slug, AccountState, newest=True)
        if state is None or state.value.deletion is not None:
            raise errors.PermanentError(
                f"no account {account!r} in the database; add it first: sacctmgr add account name={account}"
            )
        sequence = await retries.recheck(
            bus,
            cluster=where,
            installation=state.value.installation,
            slug=slug,
            reason=RecheckReason.ADOPT,
            message_id=f"adopt.{where}.{slug}.{uuid.uuid4().hex}",
        )
        status = await _handled(bus, where, slug, sequence)
    if status.phase in {Phase.CONFLICT, Phase.FAILED, Phase.DEGRADED, Phase.TERMINATING}:
        raise errors.PermanentError(f"{status.namespace} was not adopted: {status.message}")
    return f"{status.namespace} belongs to account {account} now ({str(status.phase).lower()})"


async def _handled(bus: jetstream.Bus, cluster: str, slug: str, sequence: int) -> AccountStatus:
    key = subjects.status_key(cluster, slug)
    try:
        async with asyncio.timeout(_SILENCE_S):
            while True:
                entry = await bus.get(subjects.STATUS_BUCKET, key, AccountStatus, newest=True)
                if entry is not None and entry.value.answers(sequence):
                    return entry.value
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise errors.TimedOutError(
            f"nobody answered for cluster {cluster!r} within {_SILENCE_S:.0f} s; is 'spur-events run apply' running?"
        ) from None
