"""One account on one cluster: makes its objects what its state in the bucket says, and writes down how it went.

`worker` hands events over; the planner says what should be there; kube.apply writes. The order of the rules
(design section 3): nothing older than what the namespace records; nobody else's namespace; revocation before
everything else; an error with one object does not stop the others.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from spur_events import errors, jetstream, retrying, settings
from spur_events.consumers import outcome, passes, removal, retries, verdicts
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors as kube_errors
from spur_events.consumers.kube import observe
from spur_events.consumers.plan import desired, observed, pruning, steps
from spur_events.consumers.worker import Work
from spur_events.schemas import codec, subjects
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.events import AccountChanged, Recheck, RecheckReason
from spur_events.schemas.status import AccountStatus, Phase

log = logging.getLogger(__name__)

_STATE = jetstream.Entry[AccountState]
#: Timers are not exact.
_EARLY = timedelta(milliseconds=50)
#: What every account of the cluster shares is not an account's failure: the event waits, and is asked for again.
_OUTAGE_S = (0.5, 5.0)
_DELETIONS = frozenset({RecheckReason.PRUNE, RecheckReason.PRUNE_UNEXPLAINED})
#: Asked for because of a status that is behind: with nothing left to do there is nothing to tell anybody.
_OWN = frozenset({RecheckReason.RETRY, RecheckReason.BEHIND})


class Converger:
    """The handler of all events of one cluster."""

    def __init__(
        self,
        config: settings.Settings,
        bus: jetstream.Bus,
        client: kube.Client,
        again: retries.Retries,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config = config
        self._cluster = config.kubernetes.cluster
        self._bus = bus
        self._client = client
        self._again = again
        self._clock = clock

    async def handle(self, work: Work) -> verdicts.Verdict:
        """Converge the account that an event is about.

        Raises:
            LostError: if the lease ran out; nothing was written after that.
            TemporaryError: if the bus does not answer.
        """
        try:
            state = await self._state(work)
        except codec.CodecError as error:
            return verdicts.Park(reason="state", detail=f"state of {work.slug} in the bucket: {error}")
        status, last = await self._status(work.slug)
        if state is None:
            return await self._without_state(work, status, last)
        subject = outcome.Subject(
            slug=work.slug,
            name=state.value.name,
            installation=state.value.installation,
            state=state.value,
            sequence=state.sequence,
        )
        if status is not None and _is_settled(work, state.value, status, self._clock()):
            return verdicts.Done()
        try:
            found = await self._converge(work, state.value, status)
        except kube_errors.UnreachableError as error:
            return await self._outage(work, subject, status, last, error)
        except kube_errors.ANSWERS as error:
            found = _failure(error)
        await self._record(work, subject, status, last, found)
        return verdicts.Done()

    async def _without_state(
        self, work: Work, status: AccountStatus | None, last: int | None
    ) -> verdicts.Verdict:
        """Handle an event about a slug that the bucket has no state for: unexplained, or the bucket was emptied.

        The relay fills an emptied bucket again, and says so with events.
        """
        event = work.event
        unexplained = status is not None and status.wanted == outcome.NO_REVISION
        if isinstance(event, AccountChanged) or (event.reason in _OWN and not unexplained):
            return verdicts.Done()
        known = status.name if status is not None and status.slug == work.slug else work.slug
        subject = outcome.Subject(slug=work.slug, name=known, installation=event.installation)
        client = self._client.guarded(work.lease.check)
        try:
            found, name = await removal.without_state(client, event, known_name=known)
        except kube_errors.UnreachableError as error:
            return await self._outage(work, subject, status, last, error)
        except kube_errors.ANSWERS as error:
            found, name = _failure(error), known
        await self._record(work, replace(subject, name=name), status, last, found)
        return verdicts.Done()

    async def _outage(
        self,
        work: Work,
        subject: outcome.Subject,
        status: AccountStatus | None,
        last: int | None,
        error: errors.TemporaryError,
    ) -> verdicts.Verdict:
        found = steps.Findings(phase=Phase.FAILED, reason="Unreachable", message=str(error), retry=False)
        await self._record(work, subject, status, last, found, handled=False)
        return verdicts.Again(after_s=retrying.backoff_s(work.deliveries, *_OUTAGE_S))

    async def _state(self, work: Work) -> _STATE | None:
        bucket, event = subjects.ACCOUNTS_BUCKET, work.event
        if isinstance(event, Recheck) and event.reason in _DELETIONS:
            return await self._bus.get(bucket, work.slug, AccountState, newest=True)
        entry = await self._bus.get(bucket, work.slug, AccountState)
        behind = entry is None or (
            isinstance(event, AccountChanged) and entry.value.revision < event.revision
        )
        # A replica may lag behind the event; the bucket's leader does not.
        return await self._bus.get(bucket, work.slug, AccountState, newest=True) if behind else entry

    async def _status(self, slug: str) -> tuple[AccountStatus | None, int | None]:
        """Return the status record and what a conditional write of it needs to know."""
        key = subjects.status_key(self._cluster, slug)
        try:
            entry = await self._bus.get(subjects.STATUS_BUCKET, key, AccountStatus)
        except codec.CodecError:
            log.warning("status record is unreadable and is written anew", extra={"key": key})
            return None, None
        return (entry.value, entry.sequence) if entry else (None, 0)

    async def _converge(
        self, work: Work, state: AccountState, status: AccountStatus | None
    ) -> steps.Findings:
        plan = desired.objects(state, self._config.quota)
        client = self._client.guarded(work.lease.check)
        if isinstance(work.event, AccountChanged) and (todo := steps.recall(plan, state, status)) is not None:
            # Somebody touched the namespace since, or it is gone: look at everything.
            with contextlib.suppress(kube_errors.ConflictError, kube_errors.NotFoundError):
                return await passes.carry_out(client, plan, state, todo)
        seen = await observe.observe(
            client, plan.namespace["metadata"]["name"], state.installation, state.slug
        )
        reason = work.event.reason if isinstance(work.event, Recheck) else None
        found = steps.compare(plan, state, status, seen, adopt=reason is RecheckReason.ADOPT)
        if isinstance(found, steps.Findings):
            return found
        prune = reason is RecheckReason.PRUNE and state.deletion is not None and not found.paused
        if prune and found.nothing:
            return await self._prune(client, work, state, seen)
        _log_differences(state, found, seen)
        done = await passes.carry_out(client, plan, state, found)
        if prune and done.phase is None and found.namespace is not None:
            why = removal.kept(found.namespace, "it was not closed yet; the next resync looks again")
            return replace(done, reason=why.reason, message=why.message)
        return done

    async def _prune(
        self, client: kube.Client, work: Work, state: AccountState, seen: observed.Observed
    ) -> steps.Findings:
        """Delete the namespace of a deleted account, as it was just seen: closed, and ours."""
        namespace, event = seen.namespace, work.event
        if namespace is None or isinstance(event, AccountChanged):
            return steps.Findings()
        why = pruning.objection(
            state,
            namespace,
            planned_uid=event.namespace_uid,
            planned_incarnation=event.incarnation,
            now=self._clock(),
            grace_s=self._config.resync.prune_grace_s,
        )
        if why:
            return removal.kept(namespace, why)
        # The last look before the deletion: whoever re-created the account meanwhile keeps the data.
        newest = await self._bus.get(subjects.ACCOUNTS_BUCKET, work.slug, AccountState, newest=True)
        if newest is None or newest.value != state:
            return removal.kept(namespace, "the account has another state by now")
        return await removal.delete(client, namespace)

    async def _record(
        self,
        work: Work,
        subject: outcome.Subject,
        previous: AccountStatus | None,
        last: int | None,
        found: steps.Findings,
        *,
        handled: bool = True,
    ) -> None:
        """Write the status; conditional, so that a worker whose lease ran out cannot overwrite a newer one."""
        status = outcome.status(
            subject,
            previous,
            found,
            cluster=self._cluster,
            config=self._config.apply,
            now=self._clock(),
            handled_sequence=work.sequence if handled else 0,
        )
        key = subjects.status_key(self._cluster, work.slug)
        work.lease.check()
        try:
            await self._bus.put(subjects.STATUS_BUCKET, key, status, last=last)
        except codec.TooLargeError:
            # What was applied is then looked up in the cluster instead of remembered.
            await self._bus.put(subjects.STATUS_BUCKET, key, status.model_copy(update={"objects": {}}))
        log.info(
            "account handled",
            extra={
                "account": status.name,
                "revision": str(status.wanted),
                "phase": str(status.phase),
                "reason": status.reason,
                "error": status.message,
            },
        )
        if status.retry_at is not None:
            self._again.schedule(status)


def _is_settled(work: Work, state: AccountState, status: AccountStatus, now: datetime) -> bool:
    """Whether there is nothing to do now, by the records alone: one look, and no request to the API server."""
    if status.installation != state.installation or status.wanted < state.revision:
        return False
    if isinstance(work.event, AccountChanged):
        return status.settled or status.retry_at is not None  # if not settled, its retry is on its way
    if work.event.reason not in _OWN:
        return False
    # One that was asked for before the last attempt must not come before the time agreed on then (Retry-After).
    early = status.retry_at is not None and status.retry_at > now + _EARLY
    return status.settled or early


def _failure(error: errors.SpurEventsError) -> steps.Findings:
    """Return that the API server refused a request without which nothing else can be done for the account."""
    delay_s = error.retry_after_s if isinstance(error, errors.TemporaryError) else None
    return steps.Findings(phase=Phase.FAILED, reason="Namespace", message=str(error), retry_after_s=delay_s)


def _log_differences(state: AccountState, todo: steps.Steps, seen: observed.Observed) -> None:
    """Log what is about to be written over, and who else wrote it: a hand edit is taken back, with its name."""
    live = (seen.namespace, seen.quota, seen.limits, seen.role, seen.binding, *seen.service_accounts)
    for found in live:
        if found is not None and (fields := todo.fields.get(steps.key_of(found))):
            facts = {"account": state.name, "object": steps.key_of(found), "fields": fields}
            log.info("object differs", extra={**facts, "also_written_by": observed.other_managers(found)})
