"""`spur-events resync` and `adopt` as an administrator runs them: the console script against running services."""

import asyncio
import json
import os
import pty
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support import compare, pipeline, processes, resyncs, servers, site

from spur_events import jetstream, services, settings
from spur_events.consumers.plan import marks
from spur_events.local.nats import Nats
from spur_events.schemas import names
from spur_events.schemas.resync import ResyncReport
from spur_events.schemas.status import Phase


@pytest.fixture
def given(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> settings.Settings:
    resync = {"prune_grace_s": 0}
    return site.config(database_url, nats_server, control_plane, unique, resync=resync)


@pytest.fixture
async def here(given: settings.Settings, unique: str) -> AsyncIterator[site.Site]:
    async with resyncs.running(given, unique) as made:
        yield made


async def command(
    given: settings.Settings, *words: str, terminal: str | None = None
) -> tuple[int, str, list[str]]:
    """Run `spur-events`; return exit code, standard output and the lines on standard error.

    With `terminal` its standard input is one, on which that was typed.
    """
    return await asyncio.to_thread(_command, given, words, terminal)


def _command(
    given: settings.Settings, words: tuple[str, ...], terminal: str | None
) -> tuple[int, str, list[str]]:
    keyboard = screen = -1
    if terminal is not None:
        keyboard, screen = pty.openpty()
        os.write(keyboard, terminal.encode())
    try:
        ended = subprocess.run(
            [str(processes.SCRIPTS / "spur-events"), *words],
            env=processes.environment(given),
            stdin=subprocess.DEVNULL if terminal is None else screen,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        for descriptor in (keyboard, screen):
            if descriptor >= 0:
                os.close(descriptor)
    assert "Traceback" not in ended.stderr + ended.stdout
    return ended.returncode, ended.stdout, ended.stderr.splitlines()


async def drifted(here: site.Site) -> None:
    """One of each: an edited account, a deleted one, and one as it should be."""
    for account in ("bio", "chem", "old"):
        await here.add(account, "alice")
    await here.delete("old")
    await here.edit("ResourceQuota", "bio", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "500"}}})


def plan_of(here: site.Site, out: str) -> list[str]:
    """Return the lines about this test's namespaces; the cluster is shared."""
    return [line for line in out.splitlines() if f"({here.namespace('')}" in line]


async def exists(here: site.Site, account: str) -> bool:
    found = await here.get("Namespace", account)
    return found is not None and "deletionTimestamp" not in found["metadata"]


async def test_a_dry_run_shows_the_plan_and_changes_nothing(here: site.Site) -> None:
    await drifted(here)
    before = await resyncs.versions(here)
    code, out, lines = await command(here.config, "resync", "--dry-run")
    assert (code, lines) == (0, [])
    change, prune = plan_of(here, out)
    bio, old = here.name("bio"), here.name("old")
    assert change.startswith(f"change       {bio} ({here.namespace('bio')}): ")
    assert f"ResourceQuota/{marks.QUOTA_NAME}" in change
    assert "pods" in change
    assert prune.startswith(f"prune        {old} ({here.namespace('old')}): orphan since ")
    last = out.splitlines()[-1]
    assert last.startswith(f"plan for 2 accounts on cluster {here.cluster.name}: 1 change, 1 prune")
    assert "1 unchanged" in last
    assert await resyncs.versions(here) == before


async def test_deletions_need_a_yes(here: site.Site) -> None:
    """Without a terminal nobody can be asked; the rest is carried out all the same."""
    await drifted(here)
    code, out, _ = await command(here.config, "resync")
    assert code == 3
    assert "done: 1, failed: 0" in out
    assert out.splitlines()[-1] == "1 deletions were not carried out: run it with --yes"
    assert await exists(here, "old")
    quota = await here.live("ResourceQuota", "bio", marks.QUOTA_NAME)
    assert "pods" not in quota["spec"]["hard"]
    # On a terminal one is asked; an empty answer is a no.
    for typed in ("n\n", "\n"):
        code, out, _ = await command(here.config, "resync", terminal=typed)
        assert code == 3
        assert "1 namespaces would be deleted" in out
        assert await exists(here, "old")
    code, out, _ = await command(here.config, "resync", terminal="y\n")
    assert code == 0
    await here.in_phase("old", Phase.PRUNED)
    await compare.whole(here.bus, here.config, here.cluster)


async def test_yes_deletes_and_then_there_is_nothing_to_do(here: site.Site) -> None:
    await drifted(here)
    code, out, _ = await command(here.config, "resync", "--yes")
    assert code == 0
    assert "done: 2, failed: 0" in out
    await here.in_phase("old", Phase.PRUNED)
    await compare.whole(here.bus, here.config, here.cluster)
    code, out, _ = await command(here.config, "resync")
    assert code == 0
    assert plan_of(here, out) == []
    assert "done: 0, failed: 0" in out


async def test_unexplained_namespaces_need_a_yes_too(here: site.Site) -> None:
    await here.add("bio", "alice")
    labels = marks.labels(await here.bus.check_topology(), names.slug(here.name("left")))
    metadata = {"name": here.namespace("left"), "labels": labels}
    await here.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    code, out, _ = await command(here.config, "resync", "--yes")
    assert code == 0
    assert "unexplained" in plan_of(here, out)[0]
    for terminal in (None, "n\n"):
        code, out, _ = await command(here.config, "resync", "--prune-unexplained", terminal=terminal)
        assert code == 3
        assert "1 deletions were not carried out" in out
        assert await exists(here, "left")
    code, out, _ = await command(here.config, "resync", "--prune-unexplained", "--yes")
    assert code == 0
    assert "done: 1, failed: 0" in out
    assert not await exists(here, "left")


async def test_json_is_one_report(here: site.Site) -> None:
    await drifted(here)
    for words, code in ((("--dry-run",), 0), ((), 3), (("--yes",), 0)):
        ended, out, lines = await command(here.config, "resync", "--json", *words)
        assert ended == code
        report = ResyncReport.model_validate(json.loads(out))
        assert report.cluster == here.cluster.name
        assert any(line.startswith("plan for 2 accounts") for line in lines)
    items = resyncs.items(report, here)
    assert items["old"].carried_out
    assert report.dry_run is False


async def test_an_account_that_cannot_be_written_is_named_and_fails_the_command(here: site.Site) -> None:
    await here.add("bio", "alice")
    await here.add("chem", "alice")
    wrong = {"metadata": {"annotations": {marks.REVISION: "9.1"}}}
    await here.edit("Namespace", "bio", "", wrong)
    await here.edit("ResourceQuota", "chem", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "500"}}})
    code, out, _ = await command(here.config, "resync")
    conflict = [line for line in plan_of(here, out) if line.startswith("conflict")]
    assert len(conflict) == 1
    assert "records revision 9.1" in conflict[0]
    assert "done: 1, failed: 0" in out
    assert code == 0


async def test_nobody_resyncs_the_cluster(given: settings.Settings) -> None:
    async with pipeline.relay(given):
        code, out, lines = await command(given, "resync")
    assert (code, out) == (1, "")
    assert len(lines) == 1
    assert lines[0].startswith(f"spur-events: nobody resyncs cluster '{given.kubernetes.cluster}'")
    assert "spur-events run resync" in lines[0]


async def test_another_cluster_that_nobody_resyncs(here: site.Site) -> None:
    code, out, lines = await command(here.config, "resync", "--cluster", "elsewhere")
    assert (code, out) == (1, "")
    assert lines[0].startswith("spur-events: nobody resyncs cluster 'elsewhere'")


async def test_without_a_relay_drift_is_undone_and_nothing_is_deleted(
    given: settings.Settings, unique: str
) -> None:
    async with resyncs.running(given, unique) as here:
        await drifted(here)
    async with (
        pipeline.background(services.apply(given)),
        pipeline.background(services.resync(given)),
        jetstream.connect(given.nats, "test", "test") as bus,
        pipeline.cluster(given) as cluster,
    ):
        here = site.Site(config=given, bus=bus, cluster=cluster, prefix=unique)
        code, out, _ = await command(given, "resync", "--yes", "--prune-unexplained")
        assert code == 3
        assert "no relay leads" in out
        assert "done: 1, failed: 0" in out
        assert await exists(here, "old")
        assert await cluster.hard(here.name("bio")) == {"requests.cpu": "4"}


async def test_three_commands_at_once_do_the_work_once(here: site.Site) -> None:
    """Each gets an answer, although the last report of a cluster is soon that of another request."""
    await drifted(here)
    commands = [asyncio.create_task(command(here.config, "resync", "--yes")) for _ in range(3)]
    ended = await asyncio.gather(*commands)
    assert {code for code, _, _ in ended} == {0}, ended
    await here.in_phase("old", Phase.PRUNED)
    slugs = [event.slug for event in await resyncs.rechecks(here.bus, here.cluster.name)]
    assert slugs.count(names.slug(here.name("bio"))) == 1
    await compare.whole(here.bus, here.config, here.cluster)


async def test_a_resync_that_waits_for_its_writers_is_followed_to_its_end(
    given: settings.Settings, unique: str
) -> None:
    async with resyncs.running(given, unique) as here:
        await here.add("bio", "alice")
        await here.edit("ResourceQuota", "bio", marks.QUOTA_NAME, {"spec": {"hard": {"pods": "500"}}})
    async with (
        pipeline.relay(given),
        pipeline.background(services.resync(given)),
        jetstream.connect(given.nats, "test", "test") as bus,
    ):
        first = asyncio.create_task(command(given, "resync"))

        async def waits() -> bool:
            found = await resyncs.report(bus, unique)
            return found is not None and found.state == "running" and not found.dry_run

        await pipeline.eventually(waits, "the first one waits for the writers")
        second = asyncio.create_task(command(given, "resync"))
        async with pipeline.background(services.apply(given)):
            results = await asyncio.gather(first, second)
    assert [code for code, _, _ in results] == [0, 0], results


async def test_status_shows_the_last_resync_with_its_age(here: site.Site) -> None:
    await drifted(here)
    assert (await command(here.config, "resync", "--dry-run"))[0] == 0
    code, out, _ = await command(here.config, "status")
    assert code == 0
    last = next(line for line in out.splitlines() if line.startswith("last resync"))
    assert last.startswith(f"last resync of {here.cluster.name}: done, ")
    assert " s ago" in last
    code, out, _ = await command(here.config, "status", "--json")
    found: dict[str, Any] = json.loads(out)
    assert found["resyncs"][0]["cluster"] == here.cluster.name
    assert 0 <= found["resyncs"][0]["age_s"] < 60


async def test_adopt(here: site.Site) -> None:
    """An unmarked namespace, with what is in it; then a resync finds nothing more to do."""
    metadata = {"name": here.namespace("bio"), "labels": {"team": "x"}}
    await here.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    uid = (await here.live("Namespace", "bio"))["metadata"]["uid"]
    here.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    await here.in_phase("bio", Phase.CONFLICT)
    code, out, lines = await command(here.config, "adopt", here.name("bio"))
    assert (code, lines) == (0, [])
    assert out == f"{here.namespace('bio')} belongs to account {here.name('bio')} now (applied)\n"
    after = (await here.live("Namespace", "bio"))["metadata"]
    assert (after["uid"], after["labels"]["team"]) == (uid, "x")
    await compare.whole(here.bus, here.config, here.cluster)
    code, out, _ = await command(here.config, "resync")
    assert (code, plan_of(here, out)) == (0, [])


async def test_adopt_of_a_missing_account(here: site.Site) -> None:
    await here.add("old")
    await here.delete("old")
    for account in ("nobody", "old"):
        code, out, lines = await command(here.config, "adopt", here.name(account))
        assert (code, out) == (1, "")
        assert len(lines) == 1
        assert lines[0].startswith(f"spur-events: no account '{here.name(account)}' in the database; add it")
        assert lines[0].endswith(f"sacctmgr add account name={here.name(account)}")


async def test_adopt_of_another_installations_namespace(here: site.Site) -> None:
    theirs = marks.labels("another", names.slug(here.name("bio")))
    await here.create(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": here.namespace("bio"), "labels": theirs},
        }
    )
    before = await here.live("Namespace", "bio")
    here.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    await here.in_phase("bio", Phase.CONFLICT)
    code, out, lines = await command(here.config, "adopt", here.name("bio"))
    assert (code, out) == (1, "")
    assert "belongs to installation another" in lines[-1]
    assert await here.live("Namespace", "bio") == before
