"""Our error tree. Drivers' own exceptions stop at the borders (postgres, jetstream, consumers.kube).

A message says what is wrong, where, and what to do: it is printed as it stands, without a traceback.
"""


class SpurEventsError(Exception):
    """Base of all errors that are told to a person. `exit_code` is what a command ends with."""

    exit_code = 1


class TemporaryError(SpurEventsError):
    """May go away by itself. `retry_after_s` is what the other side asked for, if it did."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnreachableError(TemporaryError):
    """A server does not answer: the message names the address and what to check."""


class PermanentError(SpurEventsError):
    """Will not go away by trying again: the input or the other side's answer is wrong."""


class UsageError(SpurEventsError):
    """The command line or a value in it is wrong; nothing was stored."""

    exit_code = 2


class MisconfiguredError(SpurEventsError):
    """A setting, or something that exists already on a server, does not fit; the message names it."""


class RefusedError(SpurEventsError):
    """A safety rule says no (exit code 3)."""

    exit_code = 3


class TimedOutError(SpurEventsError):
    """Something was waited for and did not happen in time (exit code 4)."""

    exit_code = 4
