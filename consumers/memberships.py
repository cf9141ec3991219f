"""Who is in which accounts: the bucket turned around, kept in memory and brought up to date at each question.

`consumers.kubeconfig` asks. It only says where to look: what counts is the account's state, which the caller reads
anew. One request to the server tells whether anything was written since; then just that is read.
"""

import asyncio
import logging
from collections import defaultdict
from datetime import datetime

from spur_events import jetstream
from spur_events.consumers.plan.access import Membership
from spur_events.schemas import subjects
from spur_events.schemas.accounts import AccountState

log = logging.getLogger(__name__)

_STREAM = f"KV_{subjects.ACCOUNTS_BUCKET}"


class Memberships:
    """The accounts of every user, by slugs."""

    def __init__(self, bus: jetstream.Bus) -> None:
        self._bus = bus
        self._one_at_a_time = asyncio.Lock()
        self._made_at: datetime | None = None
        self._forget()

    def _forget(self) -> None:
        self._last = 0
        self._members: dict[str, tuple[str, ...]] = {}  # of each key of the bucket, deleted ones included
        self._accounts: dict[str, dict[str, Membership]] = defaultdict(dict)

    async def of(self, user_slug: str) -> tuple[Membership, ...]:
        """Return the accounts that a user is in, by all that was in the bucket when this was called.

        Raises:
            TemporaryError: if the bucket cannot be read.
        """
        async with self._one_at_a_time:
            await self._update()
            return tuple(self._accounts.get(user_slug, {}).values())

    async def _update(self) -> None:
        mark = await self._bus.mark(_STREAM)
        if mark.last < self._last or mark.made_at != self._made_at:  # another bucket under the same name
            self._forget()
            self._made_at = mark.made_at
        await self._read(mark)
        if self._last == mark.last and len(self._members) != mark.messages:  # keys were purged
            self._forget()
            await self._read(mark)

    async def _read(self, mark: jetstream.Mark) -> None:
        if mark.last <= self._last or not mark.messages:
            return
        newest = self._bus.since(subjects.ACCOUNTS_BUCKET, AccountState, self._last)
        async for key, sequence, entry in newest:
            self._take(key, entry)
            self._last = sequence

    def _take(self, key: str, entry: jetstream.Entry[AccountState] | jetstream.Damaged | None) -> None:
        for user in self._members.get(key, ()):
            self._accounts[user].pop(key, None)
            if not self._accounts[user]:
                del self._accounts[user]
        self._members[key] = ()
        if isinstance(entry, jetstream.Damaged):
            log.warning("unreadable state", extra={"account": key, "error": entry.problem})
        elif entry is not None and entry.value.deletion is None:
            for member in entry.value.members:
                self._accounts[member.slug][key] = Membership(
                    name=entry.value.name, is_default=member.is_default
                )
            self._members[key] = tuple(member.slug for member in entry.value.members)
