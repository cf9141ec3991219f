"""What became of the events that a resync published, read from the status bucket."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from spur_events import jetstream
from spur_events.schemas import subjects
from spur_events.schemas.resync import DELETIONS, Item
from spur_events.schemas.status import SETTLED, AccountStatus, Phase

_POLL_S = 0.2
#: Without any answer for so long, the rest is given up: no apply process takes events.
STALL_S = 60.0
_FINE = SETTLED | {Phase.PAUSED}
_DELETED = frozenset({Phase.PRUNED, Phase.TERMINATING})


class Answers:
    """The answers to the events of one resync."""

    def __init__(self, bus: jetstream.Bus, cluster: str, stall_s: float = STALL_S) -> None:
        self._bus = bus
        self._prefix = f"{cluster}."
        self._stall_s = stall_s
        self._expected: dict[str, tuple[int, Item, int]] = {}
        self._before = 0
        self._ended: dict[int, Item] = {}

    async def begin(self) -> None:
        """Remember where the status bucket is: only records written later are answers."""
        self._before = await self._bus.last_sequence(f"KV_{subjects.STATUS_BUCKET}")

    def expect(self, number: int, item: Item, sequence: int) -> None:
        """Wait for the handling of the event with this sequence, for the item of this number."""
        self._expected[item.slug] = (number, item, sequence)

    async def answers(self) -> AsyncIterator[int]:
        """Yield how many are still waited for, whenever some were answered, until none is or nothing moves."""
        moved_s = time.monotonic()
        while self._expected:
            answered = await self._look()
            if answered:
                moved_s = time.monotonic()
                yield len(self._expected)
            elif time.monotonic() - moved_s > self._stall_s:
                self._give_up()
            else:
                await asyncio.sleep(_POLL_S)

    def applied_to(self, items: Sequence[Item]) -> list[Item]:
        """Return the items with their outcomes."""
        return [self._ended.get(number, item) for number, item in enumerate(items)]

    async def _look(self) -> int:
        answered = 0
        async for key, entry in self._bus.each(subjects.STATUS_BUCKET, AccountStatus, self._prefix):
            slug = key.removeprefix(self._prefix)
            if slug not in self._expected or not isinstance(entry, jetstream.Entry):
                continue
            number, item, sequence = self._expected[slug]
            status = entry.value
            if entry.sequence <= self._before or not status.answers(sequence):
                continue
            del self._expected[slug]
            self._ended[number] = _ended(item, status)
            answered += 1
        return answered

    def _give_up(self) -> None:
        text = f"no answer for {self._stall_s:.0f} s; is 'spur-events run apply' running?"
        for number, item, _ in self._expected.values():
            self._ended[number] = item.model_copy(update={"outcome": text, "failed": True})
        self._expected.clear()


def _ended(item: Item, status: AccountStatus) -> Item:
    deletion = item.action in DELETIONS
    fine = status.phase in _FINE or (status.phase is Phase.TERMINATING and deletion)
    text = str(status.phase).lower()
    if status.message:
        text = f"{text}: {status.message}"
    if kept := deletion and status.phase not in _DELETED and fine:
        text = text.replace("closed", "kept", 1) if status.phase is Phase.CLOSED else f"kept: {text}"
    return item.model_copy(update={"outcome": text, "failed": not fine, "carried_out": fine and not kept})
