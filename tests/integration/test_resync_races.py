"""Accounts that are deleted and made again while resyncs prune: no live namespace is lost, nothing is left behind."""

import asyncio
import random
import time
from collections import defaultdict
from datetime import UTC, datetime

import pytest
from support import compare, pipeline, resyncs, servers, site

from spur_events import errors, postgres, settings
from spur_events.consumers.kube import observe
from spur_events.consumers.plan import marks
from spur_events.local.nats import Nats
from spur_events.schemas import names
from spur_events.schemas.resync import Action, ResyncReport, RunState
from spur_events.schemas.status import Phase

_ACCOUNTS = 20
_WRITERS = 4
#: On a busy machine no resync may end while the first round is written: it must race, so there is another.
_ROUNDS = 10
_SEQUENCES = 200
_SEED = 4
_Statements = list[tuple[str, tuple[str, ...]]]


def write(given: settings.Settings, prefix: str, seed: int, sequences: int) -> None:
    """Delete and make accounts again; the last thing that happens to one is either."""
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    with postgres.connect(given.database, f"writer {seed}") as connection:
        for number in range(sequences):
            account = f"{prefix}a{rng.randrange(_ACCOUNTS)}"
            delete: _Statements = [
                ("DELETE FROM users WHERE account = %s", (account,)),
                ("DELETE FROM accounts WHERE name = %s", (account,)),
            ]
            insert: _Statements = [
                (
                    "INSERT INTO accounts (name, grp_tres) VALUES (%s, %s) ON CONFLICT DO NOTHING",
                    (account, f"cpu={seed * 1000 + number}"),
                ),
                (
                    "INSERT INTO users (name, account) VALUES (%s, %s) ON CONFLICT DO NOTHING",
                    ("alice", account),
                ),
            ]
            if rng.random() < 0.2:
                commit(given, connection, delete + insert)
            else:
                commit(given, connection, delete)
                time.sleep(rng.choice((0.0, 0.05, 0.2, 0.8)))
                if rng.random() < 0.85:
                    commit(given, connection, insert)
            time.sleep(rng.choice((0.0, 0.05, 0.3)))


def commit(
    given: settings.Settings,
    connection: postgres.Connection,
    statements: _Statements,
) -> None:
    """Run a transaction; again where it met another writer. One that another writer has overtaken is skipped."""
    while True:
        try:
            with postgres.translated(given.database), connection.transaction():
                for statement, parameters in statements:
                    connection.execute(statement.encode(), parameters)
        except postgres.ConflictError:
            continue
        except errors.PermanentError:
            return  # a member in an account that is gone by now
        return


class Watch:
    """Sees which namespace each incarnation of each account has: it must never be another one."""

    def __init__(self, here: site.Site, installation: str) -> None:
        self._here = here
        self._selector = marks.selector(installation)
        self.uids: dict[tuple[str, str], set[str]] = defaultdict(set)

    async def look(self) -> None:
        for found in await observe.list_all(self._here.cluster.client, "Namespace", selector=self._selector):
            metadata = found["metadata"]
            incarnation = (metadata.get("annotations") or {}).get(marks.INCARNATION, "")
            self.uids[metadata["name"], incarnation].add(metadata["uid"])

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(0.05)

    def check(self) -> None:
        lost = {key: uids for key, uids in self.uids.items() if len(uids) > 1}
        assert not lost, f"deleted while the account lived: {lost}"


async def resync_for_ever(here: site.Site, reports: list[ResyncReport]) -> None:
    while True:
        asked = await resyncs.ask(here.bus, here.cluster.name)
        reports.append(await resyncs.ended(here.bus, here.cluster.name, asked))


@pytest.fixture
def given(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> settings.Settings:
    """No grace, and no resync that comes by itself."""
    groups = {"prune_grace_s": 0}
    return site.config(database_url, nats_server, control_plane, unique, resync=groups)


async def test_two_hundred_deletions_and_re_creations_race_with_resyncs(
    given: settings.Settings, unique: str
) -> None:
    async with site.running(given, unique) as here:
        last = _ACCOUNTS - 1
        here.sql(
            f"INSERT INTO accounts (name, grp_tres) SELECT '$a' || n, 'cpu=4' FROM generate_series(0, {last}) n;"
            " INSERT INTO accounts (name, grp_tres) VALUES ('$witness', 'cpu=4')"
        )
        await compare.whole(here.bus, given, here.cluster)
        watch = Watch(here, await here.bus.check_topology())
        await watch.look()
        reports: list[ResyncReport] = []
        async with (
            pipeline.background(watch.run()),
            pipeline.background(resync_for_ever(here, reports)) as resyncing,
        ):
            for round_number in range(_ROUNDS):
                await asyncio.gather(
                    *(
                        asyncio.to_thread(
                            write,
                            given,
                            unique,
                            _SEED * 100 + round_number * 10 + number,
                            _SEQUENCES // _WRITERS,
                        )
                        for number in range(_WRITERS)
                    )
                )
                assert not resyncing.done()
                pruned = [i for r in reports for i in r.items if i.action is Action.PRUNE and i.carried_out]
                if pruned:
                    break
        print(f"{len(reports)} resyncs, {len(pruned)} pruned, {[str(r.state) for r in reports]}")  # noqa: T201
        assert pruned, reports
        await finish(here)
        await watch.look()
        watch.check()


async def finish(here: site.Site) -> None:
    """Resync until nothing is left to do, and compare everything."""
    await resyncs.run(here)  # behind one that was asked for before, and may still prune
    stored = await compare.whole(here.bus, here.config, here.cluster)
    before = {
        name: (await here.cluster.get("Namespace", names.namespace(name)) or {})
        .get("metadata", {})
        .get("uid")
        for name, state in stored.items()
        if state.deletion is None
    }

    async def nothing_left() -> bool:
        found = await resyncs.run(here)
        assert found.state is RunState.DONE, found
        return resyncs.items(found, here) == {}

    await pipeline.eventually(nothing_left, "nothing is left to do")
    stored = await compare.whole(here.bus, here.config, here.cluster)
    live = await compare.objects(here.cluster, await here.bus.check_topology(), ["Namespace"])
    assert {name for _, _, name in live} == {names.namespace(name) for name in before}
    for name, uid in before.items():
        metadata = live["Namespace", "", names.namespace(name)]["metadata"]
        assert (metadata["uid"], metadata.get("deletionTimestamp")) == (uid, None)
    for name, state in stored.items():
        status = await pipeline.status(here.bus, here.config, name)
        assert status is not None
        assert status.phase is (Phase.APPLIED if state.deletion is None else Phase.PRUNED)


async def test_an_account_that_returns_at_the_moment_of_its_prune(
    given: settings.Settings, unique: str
) -> None:
    """It keeps its namespace, unless all was over before its return was on the bus."""
    async with resyncs.running(given, unique) as here:
        await here.add("bio", "alice")
        uid = (await here.live("Namespace", "bio"))["metadata"]["uid"]
        for _ in range(10):
            closed = await here.delete("bio")
            assert closed.phase is Phase.CLOSED
            # Committed before the resync is asked for, published at about the time of its plan.
            here.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
            committed = datetime.now(UTC)
            asked = await resyncs.ask(here.bus, here.cluster.name)
            found = await resyncs.ended(here.bus, here.cluster.name, asked)
            assert found.state in {RunState.DONE, RunState.REFUSED}, found
            await here.settled("bio")
            metadata = (await here.live("Namespace", "bio"))["metadata"]
            if metadata["uid"] != uid:
                # The plan and the deletion were both before the account's new state was on the bus.
                assert datetime.fromisoformat(metadata["creationTimestamp"]) >= committed.replace(
                    microsecond=0
                )
                assert [item.action for item in found.items if item.carried_out] == [Action.PRUNE]
            uid = metadata["uid"]
        await compare.whole(here.bus, given, here.cluster)
