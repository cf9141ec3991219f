"""What an account is to look like: the domain model behind a key of bucket `spur-accounts`."""

from datetime import datetime
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict

from spur_events.schemas import names, tres


class Frozen(BaseModel):
    """Base of all domain models: immutable, and strict about what they are given."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Revision(NamedTuple):
    """Orders the states of an account: first by epoch, then by number. Never a clock (design rule 3)."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the revision that `str` wrote, or None for any other text."""
        epoch, _, number = text.partition(".")
        if epoch.isdecimal() and number.isdecimal():
            return cls(int(epoch), int(number))
        return None


class Member(Frozen):
    """A user in an account. `generation` changes with every new membership of the same user."""

    name: str
    generation: str
    is_default: bool = False

    @property
    def slug(self) -> str:
        """The user's label-safe name."""
        return names.slug(self.name)


class Allocation(Frozen):
    """What `grptres` says; `problem` says why the stored text is malformed, `limits` are then the last good."""

    limits: tres.Limits = {}
    problem: str = ""


class Deletion(Frozen):
    """The record of an account's deletion."""

    at: datetime
    by: str


class AccountState(Frozen):
    """An account's whole desired state at a revision; a tombstone where `deletion` is set.

    `allocation` is None where the account never had one: that is not the same as an allocation without
    limits (design rules 5 and 6).
    """

    installation: str
    revision: Revision
    name: str
    incarnation: str
    deletion: Deletion | None = None
    description: str = ""
    organization: str = ""
    parent: str = ""
    allocation: Allocation | None = None
    members: tuple[Member, ...] = ()

    @property
    def slug(self) -> str:
        """The account's label-safe name."""
        return names.slug(self.name)
