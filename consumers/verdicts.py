"""How the handling of an event ends, as a value: made by handlers, carried out by consumers.worker alone."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Done:
    """Acknowledge: the account is settled, or its retry is an event of its own."""


@dataclass(frozen=True, kw_only=True)
class Again:
    """Hand the same event out again after so many seconds; the partition waits.

    Only for trouble that every account of the cluster shares.
    """

    after_s: float


@dataclass(frozen=True, kw_only=True)
class Park:
    """Never to be processed: keep a copy in SPUR_PARKED. `reason` is one subject token, `detail` a sentence."""

    reason: str
    detail: str


Verdict = Done | Again | Park
