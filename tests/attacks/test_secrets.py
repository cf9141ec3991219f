"""No token is written down anywhere: all parts as processes, tokens made and taken back, then all is read."""

import contextlib
from pathlib import Path

import psycopg
from support import asking, leaks, pipeline, processes, servers
from support import site as sites
from support.site import Site

from spur_events import jetstream, postgres, settings
from spur_events.jetstream import caller
from spur_events.local.nats import Nats
from spur_events.producers import revocation, rows
from spur_events.schemas.access import Grant

PARTS = ("relay", "apply", "resync", "kubeconfig")


async def test_no_token_is_in_logs_streams_buckets_or_the_database(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str, tmp_path: Path
) -> None:
    given = sites.config(database_url, nats_server, control_plane, unique)
    await pipeline.may_guard(given)
    logs = tmp_path / "logs"
    logs.mkdir()
    with contextlib.ExitStack() as stack:
        for part in PARTS:
            stack.enter_context(processes.Service(part, given, logs / f"{part}.log"))
        async with pipeline.cluster(given) as cluster:
            grants = await _use(given, nats_server, cluster, unique, tmp_path)
    # The parts have ended: whatever they had to say is written.
    assert leaks.files_with_tokens(logs, nats_server.folder / "jetstream", nats_server.log) == []
    with psycopg.connect(database_url) as connection, connection.cursor() as cursor:
        tables = cursor.execute(
            "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables"
            " WHERE schemaname IN ('public', 'spur_events')"
        ).fetchall()
        for (table,) in tables:
            with cursor.copy(f"COPY {table} TO STDOUT".encode()) as copy:
                assert not leaks.tokens_in(b"".join(map(bytes, copy))), table
    assert len(tables) > 8
    # The search finds what it should: each of these was a token.
    assert all(leaks.tokens_in(f"before {grant.token} after".encode()) for grant in grants)
    assert "kubeconfig granted" in (logs / "kubeconfig.log").read_text()
    assert "kubeconfig refused" in (logs / "kubeconfig.log").read_text()


async def _use(
    given: settings.Settings, nats_server: Nats, cluster: pipeline.Cluster, unique: str, folder: Path
) -> list[Grant]:
    """Ask for tokens and be refused, be revoked, be removed."""
    async with jetstream.connect(given.nats, "test", "test") as bus:
        site = Site(config=given, bus=bus, cluster=cluster, prefix=unique)
        await site.add("lab", "alice", "bob")
        alice = asking.as_user(given, nats_server, "alice", folder)

        async def ready() -> bool:
            with contextlib.suppress(caller.NobodyError):
                return isinstance(await asking.ask(alice, cluster.name, "alice"), Grant)
            return False

        await pipeline.eventually(ready, "the kubeconfig service has started, and the guard is in force")
        grants = []
        for request in ({}, {"lifetime_s": 600}, {"account": site.name("lab")}):
            found = await asking.ask(alice, cluster.name, "alice", **request)
            assert isinstance(found, Grant)
            grants.append(found)
        for request in ({"lifetime_s": 1}, {"account": grants[0].token[:200]}, {"held_uid": grants[0].token}):
            await asking.ask(alice, cluster.name, "alice", **request)
        with postgres.connect(given.database) as connection:
            revocation.revoke(connection, rows.Actor(os_user="root"), "alice", None)
        await site.settled("lab")
        site.sql("DELETE FROM users WHERE name = 'alice'")
        await site.settled("lab")
        await asking.refused(site, "alice")
    return grants
