"""The only module that imports tenacity: how often, how long and after which errors something is tried again.

Every retry is reported through one hook, with the policy's name and the error. Work on an account is not
retried here: its retry is a later event (design rule 20).
"""

import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from spur_events import errors

log = logging.getLogger(__name__)
T = TypeVar("T")

_WENT_WELL_S = 10.0


def backoff_s(attempts: int, minimum_s: float, maximum_s: float) -> float:
    """Return the seconds to wait after so many failed attempts in a row: exponential, with full jitter."""
    return jittered_s(min(maximum_s, minimum_s * 2.0 ** min(attempts - 1, 30)))


def jittered_s(seconds: float) -> float:
    """Return a pause of about that length, so that many processes do not come back at the same moment."""
    return random.uniform(seconds / 2, seconds)  # noqa: S311 - spreads load, guards nothing


def _wait_s(error: BaseException | None, failures: int) -> float:
    """Return what the other side asked for (Retry-After), else a jittered exponential wait up to 5 s."""
    if isinstance(error, errors.TemporaryError) and error.retry_after_s is not None:
        return error.retry_after_s
    return backoff_s(failures, 0.2, 5.0)


async def call(
    policy: str,
    attempts: int,
    work: Callable[[], Awaitable[T]],
    *,
    unless: tuple[type[errors.TemporaryError], ...] = (),
) -> T:
    """Run `work` up to `attempts` times while it raises TemporaryError, but not after one of `unless`.

    The last error is raised as it is.
    """
    async for attempt in tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=lambda state: _wait_s(
            state.outcome.exception() if state.outcome else None, state.attempt_number
        ),
        retry=tenacity.retry_if_exception(
            lambda error: isinstance(error, errors.TemporaryError) and not isinstance(error, unless)
        ),
        before_sleep=_report(policy),
        reraise=True,
    ):
        with attempt:
            return await work()
    raise AssertionError("unreachable: tenacity returns or raises")


async def within(
    policy: str,
    seconds: float,
    work: Callable[[], Awaitable[T]],
    *,
    unless: tuple[type[errors.TemporaryError], ...] = (),
) -> T:
    """Run `work` while it raises TemporaryError and the time is not up, but not after one of `unless`.

    For a person who waits for it: the last error is raised as it is, and the attempts are not worth a warning.
    """
    async for attempt in tenacity.AsyncRetrying(
        stop=tenacity.stop_before_delay(seconds),
        wait=lambda state: backoff_s(state.attempt_number, 0.1, 1.0),
        retry=tenacity.retry_if_exception(
            lambda error: isinstance(error, errors.TemporaryError) and not isinstance(error, unless)
        ),
        before_sleep=_report(policy, logging.DEBUG),
        reraise=True,
    ):
        with attempt:
            return await work()
    raise AssertionError("unreachable: tenacity returns or raises")


async def forever(policy: str, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` until it returns; after a TemporaryError, however often it comes, try again.

    Failures count in a row: work that went well for a while starts again with the shortest wait.
    """
    failures = 0

    def wait(state: tenacity.RetryCallState) -> float:
        nonlocal failures
        error = state.outcome.exception() if state.outcome else None
        lasted_s = time.monotonic() - began_s
        failures = 1 if lasted_s > _WENT_WELL_S else failures + 1
        return _wait_s(error, failures)

    async for attempt in tenacity.AsyncRetrying(
        wait=wait,
        retry=tenacity.retry_if_exception_type(errors.TemporaryError),
        before_sleep=_report(policy),
        reraise=True,
    ):
        began_s = time.monotonic()
        with attempt:
            return await work()
    raise AssertionError("unreachable: tenacity returns or raises")


def _report(policy: str, level: int = logging.WARNING) -> Callable[[tenacity.RetryCallState], None]:
    def report(state: tenacity.RetryCallState) -> None:
        log.log(
            level,
            "trying again",
            extra={
                "policy": policy,
                "attempt": state.attempt_number,
                "wait_s": round(state.upcoming_sleep, 2),
                "error": str(state.outcome.exception()) if state.outcome else "",
            },
        )

    return report
