"""Puts batches on the bus: each account's state into the bucket, then the events that say what changed.

The leading relay owns one. It knows what the bucket holds, since nobody else writes there, and says so in the
checkpoint after every batch (design rule 12).
"""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from datetime import UTC, datetime

from spur_events import errors, jetstream, retrying, settings
from spur_events.producers import audit, outbox
from spur_events.schemas import codec, names, subjects
from spur_events.schemas.accounts import AccountState, Revision
from spur_events.schemas.events import AccountChanged, Change
from spur_events.schemas.resync import Checkpoint, Contents

log = logging.getLogger(__name__)

_PUBLISH_ATTEMPTS = 5
_CONCURRENCY = 64
#: Unexplained accounts that a checkpoint names; it counts them all.
_NAMED = 500


class FencedError(errors.TemporaryError):
    """The bucket holds a newer revision than this relay's: another relay leads, or the database is older."""


class Publisher:
    """What one lead publishes."""

    def __init__(self, config: settings.Relay, bus: jetstream.Bus) -> None:
        self._config = config
        self._bus = bus
        self._sequences: dict[str, int] = {}
        self._contents = Contents()
        self._newest = Revision(0, 0)
        self._last_sequence = 0
        self._unexplained: set[str] = set()
        self.refused: dict[str, str] = {}

    @property
    def revision(self) -> int:
        """Highest revision number that the bucket holds."""
        return self._newest.number

    def start_from(self, found: audit.Audit) -> None:
        """Take over what an audit found in the bucket."""
        self._sequences = dict(found.sequences)
        self._contents = found.contents
        self._newest = found.newest
        self._last_sequence = max(found.sequences.values(), default=0)
        self._unexplained = set(found.unexplained)

    async def is_as_left(self) -> bool:
        """Whether the bucket is what this publisher left there, as far as its extent tells."""
        messages, last = await self._bus.extent(f"KV_{subjects.ACCOUNTS_BUCKET}")
        return messages == len(self._sequences) and last == self._last_sequence

    async def publish(self, batch: outbox.Batch) -> None:
        """Publish a batch, and return when everything is acknowledged.

        Raises:
            FencedError: if the bucket holds something newer.
            TemporaryError: if the bus does not answer; what was published already is published again.
        """
        limit = asyncio.Semaphore(_CONCURRENCY)
        outcomes = await asyncio.gather(
            *(
                self._publish(limit, batch.states.get(name), name, changes)
                for name, changes in batch.changes.items()
            ),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def write_checkpoint(self, owner: outbox.Installation, audited_at: datetime) -> Checkpoint:
        """Say what the bucket holds now."""
        checkpoint = Checkpoint(
            installation=owner.id,
            epoch=owner.epoch,
            revision=self._newest.number,
            # The bucket mirrors the database, and has those that only it knows.
            database_accounts=self._contents.accounts - len(self._unexplained),
            bucket_accounts=self._contents.accounts,
            tombstones=self._contents.tombstones,
            digest=self._contents.digest,
            unexplained=tuple(sorted(self._unexplained)[:_NAMED]),
            at=datetime.now(UTC),
            audited_at=audited_at,
        )
        await self._bus.put(subjects.STATUS_BUCKET, subjects.CHECKPOINT_KEY, checkpoint)
        return checkpoint

    async def _publish(
        self, limit: asyncio.Semaphore, state: AccountState | None, name: str, changes: Sequence[Change]
    ) -> None:
        if state is None:
            log.warning("account is neither stored nor recorded as deleted", extra={"account": name})
            return
        slug = names.slug(name)
        async with limit:
            try:
                await self._put(slug, state)
            except codec.TooLargeError as error:
                # It must not block the others (design section 4); `status` shows it.
                self.refused[slug] = str(error)
                log.warning(
                    "account is too large to be published", extra={"account": name, "error": str(error)}
                )
                return
            self.refused.pop(slug, None)
            size = self._config.changes_per_event
            parts = [changes[start : start + size] for start in range(0, len(changes), size)]
            for number, part in enumerate(parts, 1):
                event = AccountChanged(
                    installation=state.installation,
                    revision=state.revision,
                    name=name,
                    changes=tuple(part),
                    part=number,
                    parts=len(parts),
                )
                await self._announce(slug, event)

    async def _put(self, slug: str, state: AccountState) -> None:
        """Write a state over an older one of ours; conditional, so that a second relay cannot undo it."""

        async def attempt() -> int:
            return await self._bus.put(
                subjects.ACCOUNTS_BUCKET, slug, state, last=self._sequences.get(slug, 0)
            )

        for _ in range(_PUBLISH_ATTEMPTS):
            try:
                self._sequences[slug] = await retrying.call(
                    "put state",
                    _PUBLISH_ATTEMPTS,
                    attempt,
                    unless=(jetstream.StaleError, jetstream.MissingError),
                )
            except jetstream.StaleError:
                # Also where only the acknowledgement of our own write was lost.
                live = await self._live(slug)
                self._sequences[slug] = live.sequence if live else 0
                if live and live.value == state:
                    self._note(slug, state)
                    return
                if live and live.value.revision >= state.revision:
                    raise FencedError(
                        f"bucket holds revision {live.value.revision} of {slug}, this relay has {state.revision}"
                    ) from None
            else:
                self._note(slug, state)
                return
        raise errors.TemporaryError(f"state of {slug} is written by somebody else all the time")

    def _note(self, slug: str, state: AccountState) -> None:
        self._contents.add(state)
        self._newest = max(self._newest, state.revision)
        self._last_sequence = max(self._last_sequence, self._sequences[slug])
        self._unexplained.discard(slug)

    async def _live(self, slug: str) -> jetstream.Entry[AccountState] | None:
        return await self._bus.get(subjects.ACCOUNTS_BUCKET, slug, AccountState, newest=True)

    async def _announce(self, slug: str, event: AccountChanged) -> None:
        message_id = f"{event.installation}.{event.revision}.{event.part}"
        trace = hashlib.sha256(message_id.encode("ascii")).hexdigest()

        async def attempt() -> int:
            return await self._bus.publish(
                subjects.change(slug, self._bus.partitions),
                event,
                message_id=message_id,
                headers={"traceparent": f"00-{trace[:32]}-{trace[32:48]}-01"},
            )

        # A missing stream is not waited for: the relay starts again and makes it.
        await retrying.call("publish event", _PUBLISH_ATTEMPTS, attempt, unless=(jetstream.MissingError,))
