"""Requests in turns, so that nobody can make the others wait."""

import asyncio

import pytest

from spur_events.jetstream import handling


class Desk:
    """Takes requests (asker, number) and ends one when it is told to."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, int]] = []
        self.places = asyncio.Semaphore(0)

    async def respond(self, request: tuple[str, int]) -> None:
        self.taken.append(request)
        await self.places.acquire()

    async def end(self, number: int) -> None:
        for _ in range(number):
            self.places.release()
        for _ in range(10):
            await asyncio.sleep(0)


async def test_askers_take_turns_and_none_has_all_places() -> None:
    desk = Desk()
    async with handling.at_once(3, desk.respond, whose=lambda one: one[0], each=2, waiting=100) as handle:
        for number in range(5):
            await handle(("alice", number))
        await handle(("bob", 0))
        await handle(("carol", 0))
        await desk.end(0)
        assert desk.taken == [("alice", 0), ("alice", 1), ("bob", 0)]
        await desk.end(1)
        await desk.end(1)
        assert desk.taken[3:] == [("alice", 2), ("carol", 0)]
        await desk.end(10)
        assert sorted(desk.taken) == [*(("alice", number) for number in range(5)), ("bob", 0), ("carol", 0)]


async def test_a_flood_is_dropped_and_the_next_asker_is_served(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    async with handling.at_once(4, desk.respond, whose=lambda one: one[0], each=2, waiting=3) as handle:
        for number in range(1000):
            await handle(("alice", number))
        await handle(("bob", 0))
        await desk.end(0)
        assert desk.taken == [("alice", 0), ("alice", 1), ("bob", 0)]
        await desk.end(1000)
        assert [number for asker, number in desk.taken if asker == "alice"] == [0, 1, 2, 3, 4]
        await handle(("alice", 1000))
        await desk.end(0)
        assert desk.taken[-1] == ("alice", 1000), "and she again, when her turn has come"
    assert len([one for one in caplog.messages if "too many requests" in one]) == 1


async def test_a_request_that_fails_frees_its_place() -> None:
    taken = []

    async def respond(request: int) -> None:
        taken.append(request)
        raise asyncio.CancelledError

    async with handling.at_once(1, respond, waiting=10) as handle:
        for number in range(3):
            await handle(number)
        for _ in range(10):
            await asyncio.sleep(0)
    assert taken == [0, 1, 2]


async def test_at_the_end_what_is_in_hand_is_answered_and_what_waits_is_dropped() -> None:
    desk = Desk()
    async with handling.at_once(1, desk.respond, waiting=10) as handle:
        await handle(("alice", 0))
        await handle(("alice", 1))
        asyncio.get_running_loop().call_later(0.05, desk.places.release)
    assert desk.taken == [("alice", 0)]
