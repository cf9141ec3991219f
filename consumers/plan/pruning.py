"""Whether the namespace of a deleted account may be deleted now: everything that speaks against it.

Pure. `plan.resync` asks when it plans; `converge` asks again, with fresh reads, at the moment of the deletion. That
the account is a tombstone, and that its namespace is closed and marked as its tombstone says, is `steps.compare`'s
business and comes first.

Clocks: the time of the deletion comes from the database's clock, `now` from the cluster side's. They are compared for
the grace only: a skew makes it shorter or longer by as much, and never decides whether something is deleted at all.
"""

from datetime import datetime, timedelta

from spur_events.consumers.plan import marks, observed
from spur_events.schemas.accounts import AccountState


def orphaned_at(namespace: marks.Manifest) -> datetime | None:
    """Return since when a namespace is marked as an orphan; None if it is not, or not readably."""
    text = (namespace["metadata"].get("annotations") or {}).get(marks.ORPHANED_AT, "")
    try:
        at = datetime.fromisoformat(text)
    except (ValueError, TypeError):
        return None
    return at if at.tzinfo is not None else None


def due(namespace: marks.Manifest, grace_s: float) -> datetime | None:
    """Return when the grace of an orphaned namespace ends; None where it has not begun."""
    at = orphaned_at(namespace)
    return None if at is None else at + timedelta(seconds=grace_s)


def wish(namespace: marks.Manifest) -> str:
    """Return the person's wish that keeps a namespace from being deleted; empty where there is none."""
    if observed.is_paused(namespace):
        return f"{marks.RECONCILE}={marks.PAUSED}"
    if observed.is_retained(namespace):
        return f"{marks.RETAIN}={marks.RETAINED}"
    return ""


def objection(
    state: AccountState,
    namespace: marks.Manifest,
    *,
    planned_uid: str,
    planned_incarnation: str,
    now: datetime,
    grace_s: float,
) -> str:
    """Return why a closed namespace may not be deleted now, in words; empty if it may.

    Args:
        state: the account's newest state.
        namespace: as just read.
        planned_uid: UID of the namespace that the plan was about.
        planned_incarnation: of the account that the plan was about.
        now: by the clock of this process.
        grace_s: seconds that the namespace of a deleted account is kept.
    """
    metadata = namespace["metadata"]
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    found = []
    if state.deletion is None:
        found.append("the account exists")
    if planned_uid != metadata["uid"]:
        found.append(
            f"another namespace has the name by now (UID {metadata['uid']}, not {planned_uid or 'none'})"
        )
    if not planned_incarnation == state.incarnation == annotations.get(marks.INCARNATION):
        found.append("the plan was about an earlier account of the name")
    if not marks.labels(state.installation, state.slug).items() <= labels.items():
        found.append("it does not carry this installation's marks")
    if kept_by := wish(namespace):
        found.append(f"it carries {kept_by}")
    until = due(namespace, grace_s)
    if until is None:
        found.append(f"it does not say since when it is an orphan ({marks.ORPHANED_AT})")
    elif now < until:
        found.append(f"its grace ends at {until.isoformat(timespec='seconds')}")
    return "; ".join(found)
