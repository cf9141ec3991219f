"""How often, how long and after which errors something is tried again; nothing here really waits."""

import asyncio
from collections.abc import Callable

import pytest

from spur_events import errors, retrying


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the waits that were asked for; they pass at once."""
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return asked


class Work:
    """Fails with each of the given errors in turn, then returns 7."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.calls = 0

    async def __call__(self) -> int:
        self.calls += 1
        if self._failures:
            raise self._failures.pop(0)
        return 7


def temporary(retry_after_s: float | None = None) -> errors.TemporaryError:
    return errors.TemporaryError("later", retry_after_s=retry_after_s)


async def test_it_returns_what_the_work_returns(waits: list[float]) -> None:
    assert await retrying.call("p", 3, Work(temporary(), temporary())) == 7
    assert len(waits) == 2


async def test_it_gives_up_after_so_many_attempts_with_the_last_error(waits: list[float]) -> None:
    last = temporary()
    work = Work(temporary(), temporary(), last, temporary())
    with pytest.raises(errors.TemporaryError) as caught:
        await retrying.call("p", 3, work)
    assert caught.value is last
    assert work.calls == 3
    assert len(waits) == 2


@pytest.mark.parametrize(
    "failure", [errors.PermanentError("no"), errors.MisconfiguredError("no"), ValueError("no")]
)
@pytest.mark.parametrize(
    "policy", [lambda work: retrying.call("p", 3, work), lambda work: retrying.forever("p", work)]
)
async def test_what_will_not_go_away_is_not_tried_again(
    failure: Exception, policy: Callable[[Work], asyncio.Future[int]], waits: list[float]
) -> None:
    work = Work(failure)
    with pytest.raises(type(failure)):
        await policy(work)
    assert work.calls == 1
    assert waits == []


async def test_an_excepted_error_is_raised_at_once(waits: list[float]) -> None:
    work = Work(errors.UnreachableError("away"))
    with pytest.raises(errors.UnreachableError):
        await retrying.call("p", 3, work, unless=(errors.UnreachableError,))
    assert work.calls == 1
    assert waits == []


async def test_what_the_other_side_asks_for_wins(waits: list[float]) -> None:
    await retrying.call("p", 4, Work(temporary(30.0), temporary(0.0), temporary(31.5)))
    await retrying.forever("p", Work(temporary(47.0)))
    assert waits == [30.0, 0.0, 31.5, 47.0]


async def test_forever_means_however_often(waits: list[float]) -> None:
    work = Work(*(temporary() for _ in range(200)))
    assert await retrying.forever("p", work) == 7
    assert work.calls == 201
    assert max(waits) <= 5.0
    assert min(waits[10:]) >= 2.5


@pytest.mark.parametrize(
    ("attempts", "low", "high"), [(1, 0.5, 1.0), (2, 1.0, 2.0), (4, 4.0, 8.0), (9, 5.0, 10.0)]
)
def test_waits_double_up_to_the_maximum_with_jitter(attempts: int, low: float, high: float) -> None:
    found = [retrying.backoff_s(attempts, 1.0, 10.0) for _ in range(200)]
    assert low <= min(found) < max(found) <= high


def test_any_number_of_attempts_has_a_wait() -> None:
    assert 5.0 <= retrying.backoff_s(10**9, 1.0, 10.0) <= 10.0


async def test_each_retry_is_reported_with_policy_and_error(
    waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    await retrying.call("put state", 2, Work(temporary(1.0)))
    (record,) = caplog.records
    assert (record.policy, record.attempt, record.wait_s, record.error) == ("put state", 1, 1.0, "later")  # type: ignore[attr-defined]
    assert waits == [1.0]


async def test_within_gives_up_when_the_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    tried = 0

    async def work() -> None:
        nonlocal tried
        tried += 1
        raise errors.TemporaryError("not now")

    with pytest.raises(errors.TemporaryError, match="not now"):
        await retrying.within("test", 0.5, work)
    assert tried > 1
    assert not caplog.records, "a person waits for it: she is told by the error"


async def test_within_ends_at_success_and_at_what_is_not_worth_it() -> None:
    failures = [errors.TemporaryError("once")]

    async def work() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert await retrying.within("test", 5, work) == "done"
    failures.append(errors.UnreachableError("away"))
    with pytest.raises(errors.UnreachableError):
        await retrying.within("test", 5, work, unless=(errors.UnreachableError,))
