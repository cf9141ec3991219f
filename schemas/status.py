"""How far a cluster is with an account: the domain models behind the records of bucket `spur-status`."""

from datetime import datetime
from enum import StrEnum

from spur_events.schemas import names
from spur_events.schemas.accounts import Frozen, Revision


class Phase(StrEnum):
    """Where an account stands on a cluster (proto/spur/events/v1/status.proto says what each one means)."""

    APPLIED = "Applied"
    PENDING = "Pending"
    INVALID = "Invalid"
    DEGRADED = "Degraded"
    CONFLICT = "Conflict"
    TERMINATING = "Terminating"
    FAILED = "Failed"
    CLOSED = "Closed"
    PAUSED = "Paused"
    PRUNED = "Pruned"


#: Phases in which the cluster is as the state wants it.
SETTLED = frozenset({Phase.APPLIED, Phase.INVALID, Phase.CLOSED, Phase.PRUNED})


class AccountStatus(Frozen):
    """An account on a cluster, as its one writer last left it. Times are UTC."""

    cluster: str
    name: str
    installation: str
    wanted: Revision
    applied: Revision | None = None
    phase: Phase
    reason: str = ""
    message: str = ""
    since: datetime
    namespace: str
    namespace_uid: str = ""
    namespace_version: str = ""
    objects: dict[str, str] = {}
    not_enforced: tuple[str, ...] = ()
    over_quota: tuple[str, ...] = ()
    attempts: int = 0
    retry_at: datetime | None = None
    state_sequence: int = 0
    handled_sequence: int = 0
    retained: bool = False

    @property
    def slug(self) -> str:
        """The account's label-safe name."""
        return names.slug(self.name)

    @property
    def settled(self) -> bool:
        """Whether the cluster is as the newest state that was looked at wants it."""
        return self.phase in SETTLED and self.applied == self.wanted

    def answers(self, sequence: int) -> bool:
        """Whether the event with this stream sequence was handled; pending, it is in force in a moment."""
        return self.handled_sequence >= sequence and self.phase is not Phase.PENDING


#: Seconds after which a relay that gave no heartbeat is not trusted any more (design rule 18).
RELAY_STALE_S = 60.0


class RelayStatus(Frozen):
    """The relay's heartbeat."""

    installation: str
    epoch: int
    host: str
    pid: int
    at: datetime
    revision: int
    refused: dict[str, str] = {}
