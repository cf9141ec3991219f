"""The status record that follows from a pass: the account's next one, given its last one. Pure.

`converge` calls it and writes the record. What the phases mean: proto/spur/events/v1/status.proto.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from spur_events import retrying, settings
from spur_events.consumers.plan import steps
from spur_events.schemas import names
from spur_events.schemas.accounts import AccountState, Revision
from spur_events.schemas.status import SETTLED, AccountStatus, Phase

#: What a slug without any state wants: older than every state, so that the first one that comes is applied.
NO_REVISION = Revision(0, 0)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Whom a status is about. `state` is None where the bucket has none; `sequence` is the bucket's own."""

    slug: str
    name: str
    installation: str
    state: AccountState | None = None
    sequence: int = 0

    @property
    def wanted(self) -> Revision:
        """The revision that the cluster should be at."""
        return self.state.revision if self.state is not None else NO_REVISION


def status(
    subject: Subject,
    previous: AccountStatus | None,
    found: steps.Findings,
    *,
    cluster: str,
    config: settings.Apply,
    now: datetime,
    handled_sequence: int,
) -> AccountStatus:
    """Return the next status record.

    Args:
        subject: the account, with the state that was looked at.
        previous: its record so far.
        found: what the pass came to.
        cluster: whose cluster's record it is.
        config: how long to wait between attempts.
        now: for the times in the record.
        handled_sequence: of the event that was handled, in the stream; 0 where it has to come again.
    """
    state, wanted = subject.state, subject.wanted
    phase = _phase(state, found)
    done = phase in SETTLED
    reason, message = found.reason, found.message
    if phase is Phase.INVALID and state is not None and state.allocation is not None:
        reason, message = "MalformedAllocation", state.allocation.problem
    same = previous is not None and (previous.phase, previous.reason) == (phase, reason)
    since = previous.since if same and previous else now
    attempts, retry_at = 0, None
    if not done and found.retry:
        if phase is Phase.TERMINATING:
            # A wait, not an error: nothing is counted, and the longer it lasts the less often one looks.
            waited_s = (now - since).total_seconds()
            delay_s = min(max(waited_s, config.retry_min_s), config.retry_max_s)
        else:
            again = previous is not None and previous.wanted == wanted and previous.phase is phase
            attempts = (previous.attempts if again and previous else 0) + 1
            delay_s = retrying.backoff_s(attempts, config.retry_min_s, config.retry_max_s)
        retry_at = now + timedelta(seconds=max(delay_s, found.retry_after_s or 0.0))
    retained = previous.retained if previous and found.retained is None else bool(found.retained)
    return AccountStatus(
        cluster=cluster,
        name=subject.name,
        installation=subject.installation,
        wanted=wanted,
        applied=wanted if done else previous.applied if previous else None,
        phase=phase,
        reason=reason,
        message=message,
        since=since,
        namespace=names.namespace_of_slug(subject.slug),
        namespace_uid=found.namespace_uid or (previous.namespace_uid if previous else ""),
        namespace_version=found.namespace_version,
        # Where nothing could be looked at, what is known of marks that were taken off must not be lost.
        objects=previous.objects if previous and phase is Phase.FAILED else found.objects,
        not_enforced=found.not_enforced,
        over_quota=found.over_quota,
        attempts=attempts,
        retry_at=retry_at,
        state_sequence=subject.sequence,
        handled_sequence=max(handled_sequence, previous.handled_sequence if previous else 0),
        retained=retained,
    )


def _phase(state: AccountState | None, found: steps.Findings) -> Phase:
    if found.phase is not None:
        return found.phase
    if state is None or state.deletion is not None:
        return Phase.CLOSED
    if state.allocation is not None and state.allocation.problem:
        return Phase.INVALID
    return Phase.APPLIED
