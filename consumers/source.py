"""The bucket as the source of a resync, and how far it may be trusted (design rule 12).

What is in the bucket is always true of itself; what is *not* in it may be missing for other reasons than a deletion.
So everything that is there is carried out, and nothing is deleted while there is a doubt.
"""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime

from spur_events import jetstream
from spur_events.schemas import codec, subjects
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.resync import Checkpoint, Contents
from spur_events.schemas.status import RELAY_STALE_S, RelayStatus

#: An audit reads the whole database and the whole bucket.
AUDIT_TIMEOUT_S = 120.0
_ATTEMPTS = 40
_PAUSE_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Source:
    """The bucket, read whole, with what its writer says of it."""

    states: dict[str, AccountState]
    contents: Contents
    checkpoint: Checkpoint | None
    relay: RelayStatus | None
    installation: str
    read_at: datetime
    damaged: tuple[str, ...] = ()

    @property
    def unexplained(self) -> tuple[str, ...]:
        """Slugs in the bucket that the database neither has nor recorded as deleted."""
        return self.checkpoint.unexplained if self.checkpoint is not None else ()

    def doubt(self, ours: int, others: int, *, override: bool) -> str:
        """Return why nothing may be deleted, with the numbers on both sides and the way out; empty if it may.

        Args:
            ours: how many namespaces in the cluster carry this installation's mark.
            others: how many carry the mark of another installation, or of spur itself.
            override: a person said that what the source lacks is to be deleted (--prune-unexplained).
        """
        torn = self._torn()
        if torn:
            return f"nothing was deleted: {torn}"
        if override or self.checkpoint is None:
            return ""
        way_out = (
            "if the accounts are really gone, 'spur-events resync --prune-unexplained' closes and removes what"
            " they left; otherwise check SPUR_EVENTS_DATABASE_URL of the relay and its role's rights"
        )
        have = f"source has {self.checkpoint.database_accounts} accounts"
        # Nothing known and nothing ours, but a cluster in use: most likely another database than it follows.
        fresh = not (ours or self.contents.tombstones)
        if not self.checkpoint.database_accounts and (ours > self.contents.tombstones or (fresh and others)):
            theirs = f" ({others} of them not this installation's)" if others else ""
            has = f"cluster has {ours + others} namespaces of accounts{theirs}"
            return f"nothing was deleted: {have}, {has}; {way_out}"
        if self.unexplained:
            missing = self.contents.accounts - self.checkpoint.database_accounts
            return (
                f"nothing was deleted: {have}, the bucket has {self.contents.accounts} and the cluster {ours}"
                f" namespaces: {missing} accounts are gone without a recorded deletion"
                f" ({', '.join(self.unexplained[:5])}{', ...' if missing > 5 else ''}); {way_out}"  # noqa: PLR2004
            )
        return ""

    def _torn(self) -> str:
        check = self.checkpoint
        if check is None:
            return "the relay has written no checkpoint yet; start it, or look at its log"
        if check.installation != self.installation:
            return f"the checkpoint is of installation {check.installation}, this is {self.installation}"
        if self.damaged:
            return f"{len(self.damaged)} states in the bucket cannot be read ({', '.join(self.damaged[:5])})"
        if check.digest != self.contents.digest:
            return (
                f"the bucket holds {self.contents.accounts} accounts and {self.contents.tombstones} deleted ones,"
                f" its relay left {check.bucket_accounts} and {check.tombstones} there: it was torn or restored;"
                " the relay's next audit fills it again"
            )
        age_s = (self.read_at - self.relay.at).total_seconds() if self.relay is not None else None
        if age_s is None or age_s > RELAY_STALE_S:
            said = "never" if age_s is None else f"{age_s:.0f} s ago"
            return (
                f"the relay was last heard of {said}: whether the {self.contents.accounts} accounts in the bucket are"
                " still those of the database is unknown; start it, or look at its log"
            )
        return ""


async def read(bus: jetstream.Bus, installation: str) -> Source:
    """Read the bucket whole; again while it does not match its checkpoint, since the relay may be writing."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            await asyncio.sleep(_PAUSE_S)
        found = await _once(bus, installation)
        if found.checkpoint is None or found.checkpoint.digest == found.contents.digest:
            break
    return found


async def _once(bus: jetstream.Bus, installation: str) -> Source:
    checkpoint: Checkpoint | None = None
    relay: RelayStatus | None = None
    try:
        entry = await bus.get(subjects.STATUS_BUCKET, subjects.CHECKPOINT_KEY, Checkpoint, newest=True)
        checkpoint = entry.value if entry else None
        beat = await bus.get(subjects.STATUS_BUCKET, subjects.RELAY_KEY, RelayStatus)
        relay = beat.value if beat else None
    except codec.CodecError:
        pass  # as if there were none: nothing is deleted then
    entries = await bus.read_all(subjects.ACCOUNTS_BUCKET, AccountState)
    states = {slug: one.value for slug, one in entries.items() if isinstance(one, jetstream.Entry)}
    return Source(
        states=states,
        contents=Contents(states.values()),
        checkpoint=checkpoint,
        relay=relay,
        installation=installation,
        read_at=datetime.now(UTC),
        damaged=tuple(slug for slug, one in entries.items() if isinstance(one, jetstream.Damaged)),
    )
