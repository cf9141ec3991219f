"""What a resync needs to know and what it reports: the domain models behind a few records of `spur-status`."""

import hashlib
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum

from spur_events.schemas.accounts import AccountState, Frozen


class Checkpoint(Frozen):
    """What the bucket holds, as its only writer knows it (design rule 12).

    `database_accounts` is as of the last audit. `unexplained` are slugs of accounts in the bucket that the
    database neither has nor recorded as deleted.
    """

    installation: str
    epoch: int
    revision: int
    database_accounts: int
    bucket_accounts: int
    tombstones: int
    digest: str
    unexplained: tuple[str, ...] = ()
    at: datetime
    audited_at: datetime


class Contents:
    """Count and digest of a set of states, kept up to date one state at a time, in any order."""

    def __init__(self, states: Iterable[AccountState] = ()) -> None:
        self._sum = 0
        self._hashes: dict[str, int] = {}
        self._deleted: set[str] = set()
        for state in states:
            self.add(state)

    def add(self, state: AccountState) -> None:
        """Put a state in the place of the account's last one."""
        slug = state.slug
        text = f"{state.installation} {state.revision} {slug}"
        new = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
        self._sum = (self._sum - self._hashes.get(slug, 0) + new) % 2**256
        self._hashes[slug] = new
        self._deleted.discard(slug)
        if state.deletion is not None:
            self._deleted.add(slug)

    @property
    def accounts(self) -> int:
        """Accounts that are not deleted."""
        return len(self._hashes) - len(self._deleted)

    @property
    def tombstones(self) -> int:
        """Deleted accounts."""
        return len(self._deleted)

    @property
    def digest(self) -> str:
        """The same for the same states at the same revisions, and for nothing else."""
        return f"{self._sum:064x}"


class Action(StrEnum):
    """What a resync does about an account or a namespace, or why it does nothing."""

    CREATE = "create"
    CHANGE = "change"
    REVOKE = "revoke"
    CLOSE = "close"
    PRUNE = "prune"
    PRUNE_UNEXPLAINED = "prune_unexplained"
    CONFLICT = "conflict"
    UNEXPLAINED = "unexplained"
    TERMINATING = "terminating"
    ORPHANED = "orphaned"
    RETAINED = "retained"
    PAUSED = "paused"
    FOREIGN = "foreign"


#: What changes something in the cluster; the others are only told.
WORK = frozenset(
    {
        Action.CREATE,
        Action.CHANGE,
        Action.REVOKE,
        Action.CLOSE,
        Action.PRUNE,
        Action.PRUNE_UNEXPLAINED,
    }
)
#: What deletes a namespace, and the data in it.
DELETIONS = frozenset({Action.PRUNE, Action.PRUNE_UNEXPLAINED})


class Item(Frozen):
    """One line of a plan. `details` say what differs, or why nothing is done.

    At the end of a run, `carried_out` items were answered by their account's writer, and `outcome` says how; an
    outcome of any other item says why it was not carried out.
    """

    action: Action
    slug: str
    account: str = ""
    namespace: str
    details: tuple[str, ...] = ()
    namespace_uid: str = ""
    incarnation: str = ""
    outcome: str = ""
    failed: bool = False
    carried_out: bool = False


class RunState(StrEnum):
    """How far a resync is, or how it ended."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"


class ResyncReport(Frozen):
    """A resync: running, or the last one of a cluster. `waiting` items are not answered yet."""

    id: str
    cluster: str
    installation: str
    state: RunState
    dry_run: bool = False
    prune: bool = False
    prune_unexplained: bool = False
    requested_by: str = ""
    started_at: datetime
    at: datetime
    message: str = ""
    accounts: int = 0
    unchanged: int = 0
    reads: int = 0
    waiting: int = 0
    items: tuple[Item, ...] = ()
