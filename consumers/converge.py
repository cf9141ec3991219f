"""One account on one cluster: makes its objects what its state in the bucket says, and writes down how it went.

`worker` hands events over; the planner says what should be there; kube.apply writes. The order of the rules
(design section 3): nothing older than what the namespace records; nobody else's namespace; revocation before
everything else; an error with one object does not stop the others.
"""

import contextlib
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from spur_events import errors, jetstream, retrying, settings
from spur_events.consumers import lease, retries, verdicts
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors as kube_errors
from spur_events.consumers.passes import Findings, carry_out, compare, recall
from spur_events.consumers.plan import desired
from spur_events.consumers.worker import Work
from spur_events.schemas import codec, names, subjects
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.events import AccountChanged, RecheckReason
from spur_events.schemas.status import AccountStatus, Phase

log = logging.getLogger(__name__)

_STATE = jetstream.Entry[AccountState]
#: Timers are not exact.
_EARLY = timedelta(milliseconds=50)
#: What every account of the cluster shares is not an account's failure: the event waits, and is asked for again.
_OUTAGE_S = (0.5, 5.0)


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
        if state is None:
            # The bucket was emptied: the relay fills it again, and says so with an event.
            return verdicts.Done()
        status, last = await self._status(work.slug)
        if status is not None and _is_settled(work, state.value, status, self._clock()):
            return verdicts.Done()
        try:
            found = await self._converge(work, state.value, status)
        except kube_errors.UnreachableError as error:
            await self._record(work, state, status, last, _outage(error))
            return verdicts.Again(after_s=retrying.backoff_s(work.deliveries, *_OUTAGE_S))
        except lease.LostError:
            raise
        except errors.SpurEventsError as error:
            # Nothing could be looked at: this account's trouble, and its partition must not wait for it.
            found = _unread(error)
        await self._record(work, state, status, last, found)
        return verdicts.Done()

    async def _state(self, work: Work) -> _STATE | None:
        bucket, event = subjects.ACCOUNTS_BUCKET, work.event
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

    async def _converge(self, work: Work, state: AccountState, status: AccountStatus | None) -> Findings:
        plan = desired.objects(state, self._config.quota)
        client = self._client.guarded(work.lease.check)
        if isinstance(work.event, AccountChanged) and (steps := recall(plan, state, status)) is not None:
            # Somebody touched the namespace since, or it is gone: look at everything.
            with contextlib.suppress(kube_errors.ConflictError, kube_errors.NotFoundError):
                return await carry_out(client, plan, state, steps)
        steps_or_findings = await compare(client, plan, state, status)
        if isinstance(steps_or_findings, Findings):
            return steps_or_findings
        try:
            return await carry_out(client, plan, state, steps_or_findings)
        except (kube_errors.ConflictError, kube_errors.NotFoundError) as error:
            return Findings(phase=Phase.FAILED, reason="Namespace", message=str(error))

    async def _record(
        self,
        work: Work,
        state: _STATE,
        previous: AccountStatus | None,
        last: int | None,
        found: Findings,
    ) -> None:
        """Write the status; conditional, so that a worker whose lease ran out cannot overwrite a newer one."""
        status = self._next_status(state, previous, found)
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
                "account": state.value.name,
                "revision": str(state.value.revision),
                "phase": str(status.phase),
                "reason": status.reason,
                "error": status.message,
            },
        )
        if status.retry_at is not None:
            self._again.schedule(status)

    def _next_status(self, state: _STATE, previous: AccountStatus | None, found: Findings) -> AccountStatus:
        now = self._clock()
        wanted = state.value.revision
        phase = _phase(state.value, found)
        done = phase in {Phase.APPLIED, Phase.INVALID, Phase.CLOSED}
        attempts = 0
        retry_at = None
        if not done and found.retry:
            same = previous is not None and previous.wanted == wanted and previous.phase is phase
            attempts = (previous.attempts if same and previous else 0) + 1
            apply = self._config.apply
            delay_s = retrying.backoff_s(attempts, apply.retry_min_s, apply.retry_max_s)
            retry_at = now + timedelta(seconds=max(delay_s, found.retry_after_s or 0.0))
        reason, message = found.reason, found.message
        if phase is Phase.INVALID and state.value.allocation is not None:
            reason, message = "MalformedAllocation", state.value.allocation.problem
        unchanged = previous is not None and (previous.phase, previous.reason) == (phase, reason)
        return AccountStatus(
            cluster=self._cluster,
            name=state.value.name,
            installation=state.value.installation,
            wanted=wanted,
            applied=wanted if done else previous.applied if previous else None,
            phase=phase,
            reason=reason,
            message=message,
            since=previous.since if unchanged and previous else now,
            namespace=names.namespace(state.value.name),
            namespace_uid=found.namespace_uid or (previous.namespace_uid if previous else ""),
            namespace_version=found.namespace_version,
            objects=found.objects,
            not_enforced=found.not_enforced,
            over_quota=found.over_quota,
            attempts=attempts,
            retry_at=retry_at,
            state_sequence=state.sequence,
        )


def _is_settled(work: Work, state: AccountState, status: AccountStatus, now: datetime) -> bool:
    """Whether there is nothing to do now, by the records alone: one look, and no request to the API server."""
    if status.installation != state.installation or status.wanted < state.revision:
        return False
    if isinstance(work.event, AccountChanged):
        return status.settled or status.retry_at is not None  # if not settled, its retry is on its way
    if work.event.reason not in {RecheckReason.RETRY, RecheckReason.BEHIND}:
        return False
    # One that was asked for before the last attempt must not come before the time agreed on then (Retry-After).
    early = status.retry_at is not None and status.retry_at > now + _EARLY
    return status.settled or early


def _phase(state: AccountState, found: Findings) -> Phase:
    if found.phase is not None:
        return found.phase
    if state.deletion is not None:
        return Phase.CLOSED
    if state.allocation is not None and state.allocation.problem:
        return Phase.INVALID
    return Phase.APPLIED


def _unread(error: errors.SpurEventsError) -> Findings:
    delay_s = error.retry_after_s if isinstance(error, errors.TemporaryError) else None
    return Findings(phase=Phase.FAILED, reason="Unreadable", message=str(error), retry_after_s=delay_s)


def _outage(error: errors.TemporaryError) -> Findings:
    return Findings(phase=Phase.FAILED, reason="Unreachable", message=str(error), retry=False)
