"""What the worker does with what its handler says, without a server: the bus and the message are recorded."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from spur_events import errors, jetstream, settings
from spur_events.consumers import lease, verdicts, worker
from spur_events.schemas import codec, subjects
from spur_events.schemas.events import Recheck, RecheckReason

_SUBJECT = subjects.recheck("default", "bio", 16)
_EVENT = Recheck(installation="i", slug="bio", reason=RecheckReason.RESYNC)


class Message:
    """An event that records how it was answered."""

    def __init__(self, data: bytes, headers: Mapping[str, str], said: list[object]) -> None:
        self.subject, self.data, self.headers = _SUBJECT, data, headers
        self.sequence, self.deliveries = 7, 2
        self._said = said

    async def done(self) -> None:
        self._said.append("done")

    async def again(self, after_s: float) -> None:
        self._said.append(("again", after_s))

    async def working(self, _timeout_s: float) -> None:
        self._said.append("working")


class Bus:
    """A bus that records what is published and parked."""

    partitions = 16

    def __init__(self, said: list[object], *, parks: bool = True) -> None:
        self._said = said
        self._parks = parks

    async def park(self, _message: object, subject: str, detail: str) -> None:
        if not self._parks:
            raise errors.UnreachableError("NATS is away")
        self._said.append(("parked", subject, detail))

    async def publish(self, subject: str, model: object, *, message_id: str) -> int:
        self._said.append(("published", subject, model, message_id))
        return 1


async def process(
    answer: verdicts.Verdict | Exception,
    *,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    parks: bool = True,
) -> list[object]:
    """Process one event with a handler that answers so; return what was said to the bus, in order."""
    said: list[object] = []

    async def handle(_work: worker.Work) -> verdicts.Verdict:
        if isinstance(answer, Exception):
            raise answer
        return answer

    encoded, own = codec.encode(_EVENT)
    message = Message(encoded if data is None else data, own if headers is None else headers, said)
    part = worker.Worker(settings.Settings(), cast("Any", Bus(said, parks=parks)), "i", handle)
    await part._process(cast("jetstream.Message", message), asyncio.get_running_loop().time())
    return said


async def test_done_is_acknowledged() -> None:
    assert await process(verdicts.Done()) == ["done"]


async def test_again_is_handed_out_later() -> None:
    assert await process(verdicts.Again(after_s=3.0)) == [("again", 3.0)]


async def test_a_parked_event_ends_after_its_copy_is_stored() -> None:
    said = await process(verdicts.Park(reason="state", detail="why"))
    assert said == [("parked", "spur.parked.default.state", "why"), "done"]


async def test_an_event_whose_copy_cannot_be_stored_stays() -> None:
    assert await process(verdicts.Park(reason="state", detail="why"), parks=False) == []


async def test_a_temporary_error_answers_nothing() -> None:
    assert await process(errors.UnreachableError("NATS is away")) == []


async def test_a_fault_of_ours_is_parked_and_does_not_stop_the_partition() -> None:
    said = await process(ZeroDivisionError("oops"))
    assert said == [("parked", "spur.parked.default.fault", "ZeroDivisionError: oops"), "done"]


async def test_a_lost_lease_answers_nothing_and_asks_for_another_look() -> None:
    """A write that was under way when the process froze may have landed on a newer state."""
    said = await process(lease.LostError("late"))
    model = Recheck(installation="i", slug="bio", reason=RecheckReason.RESYNC)
    assert said == [("published", _SUBJECT, model, "lost.default.bio.7.2")]


@pytest.mark.parametrize(
    ("data", "headers", "reason"),
    [
        (b"", {}, "unreadable"),
        (b"\xff\x00junk", {codec.TYPE_HEADER: "Recheck"}, "unreadable"),
        (b"x", {codec.TYPE_HEADER: "Novel"}, "unreadable"),
        (*codec.encode(_EVENT.model_copy(update={"installation": "other"})), "installation"),
        (*codec.encode(_EVENT.model_copy(update={"slug": "chem"})), "subject"),
    ],
)
async def test_what_is_not_ours_or_not_readable_is_parked(
    data: bytes, headers: dict[str, str], reason: str
) -> None:
    said = await process(verdicts.Done(), data=data, headers=headers)
    assert said[0][1] == f"spur.parked.default.{reason}"  # type: ignore[index]
    assert said[1:] == ["done"]
