"""`spur-events revoke`: every token of a member dies, she stays a member, and nobody else notices."""

import os
from pathlib import Path

import psycopg
import pytest
from support import members, pipeline, servers
from support.site import Site

from spur_events import errors, postgres, revoke_command, settings
from spur_events.local.nats import Nats
from spur_events.producers import revocation, rows
from spur_events.schemas import names

ME = rows.Actor(os_user="root", uid=os.getuid())


def revoke(site: Site, user: str, account: str | None) -> list[revocation.Revoked]:
    with postgres.connect(site.config.database) as connection:
        return revocation.revoke(connection, ME, user, account)


async def test_tokens_die_and_the_member_gets_new_ones(
    site: Site, control_plane: servers.Cluster, tmp_path: Path
) -> None:
    await site.add("lab", "alice", "bob")
    old = await members.token(site, "lab", "alice")
    bobs = await members.token(site, "lab", "bob")
    async with (
        members.client(control_plane.kubeconfig, old, tmp_path) as alice,
        members.client(control_plane.kubeconfig, bobs, tmp_path) as bob,
    ):
        await members.let_in(alice, site.namespace("lab"))
        before = await site.live("ServiceAccount", "lab", names.service_account("alice"))
        revoke(site, "alice", site.name("lab"))
        await site.settled("lab")
        after = await site.live("ServiceAccount", "lab", names.service_account("alice"))
        assert before["metadata"]["uid"] != after["metadata"]["uid"]

        async def refused() -> bool:
            return not await members.may_list_pods(alice, site.namespace("lab"))

        # The API server remembers for 10 s that the token was good, and alice is still a member.
        await pipeline.eventually(refused, "the old token is refused")
        await members.let_in(bob, site.namespace("lab"))
    new = await members.token(site, "lab", "alice")
    async with members.client(control_plane.kubeconfig, new, tmp_path) as alice:
        assert await members.may_list_pods(alice, site.namespace("lab"))


async def test_one_account_or_all_of_them(site: Site) -> None:
    for account in ("one", "two"):
        await site.add(account, "alice")
    assert [found.account for found in revoke(site, "alice", site.name("two"))] == [site.name("two")]
    assert [found.account for found in revoke(site, "Alice", None)] == [site.name("one"), site.name("two")]


async def test_the_trail_says_who_revoked(site: Site) -> None:
    await site.add("lab", "alice")
    revoke(site, "alice", None)
    await site.settled("lab")
    _, change = (await pipeline.changes(site.bus, site.name("lab")))[-1]
    assert (change.kind, change.user, change.actor.os_user) == ("member_revoked", "alice", "root")


async def test_nobody_elses_membership_changes(site: Site) -> None:
    await site.add("lab", "alice")
    for user, account in (("bob", None), ("alice", "elsewhere"), ("", None)):
        with pytest.raises(errors.PermanentError, match="is not a member"):
            revoke(site, user, account)
    await pipeline.published(site.config)
    assert [change.kind for _, change in await pipeline.changes(site.bus, site.name("lab"))] == [
        "account_added",
        "member_added",
    ]


async def test_the_command_waits_until_every_cluster_has_it(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    await site.add("lab", "alice")
    before = await site.live("ServiceAccount", "lab", names.service_account("alice"))
    await revoke_command.wait(site.config, revoke(site, "alice", None), 60)
    after = await site.live("ServiceAccount", "lab", names.service_account("alice"))
    assert before["metadata"]["uid"] != after["metadata"]["uid"]
    told = f"every token of alice in {site.name('lab')} is dead on {site.cluster.name}"
    assert told in capsys.readouterr().out


async def test_no_cluster_that_carries_it_out(database_url: str, nats_server: Nats, unique: str) -> None:
    given = pipeline.config(database_url, nats_server)
    pipeline.execute(given, f"INSERT INTO accounts (name) VALUES ('{unique}')")
    pipeline.execute(given, f"INSERT INTO users (name, account) VALUES ('alice', '{unique}')")
    async with pipeline.relay(given):
        await pipeline.published(given)
    with pytest.raises(errors.TimedOutError, match="the relay has not published it"):
        await revoke_command.wait(given, revoke_in(given.database, "alice"), 0.5)


def revoke_in(database: settings.Database, user: str) -> list[revocation.Revoked]:
    with postgres.connect(database) as connection:
        return revocation.revoke(connection, ME, user, None)


async def test_only_those_who_were_given_the_right(database_url: str, unique: str) -> None:
    """The rights that docs/operations.md names are enough, and without EXECUTE nobody revokes."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"INSERT INTO accounts (name) VALUES ('{unique}')".encode())
        connection.execute(f"INSERT INTO users (name, account) VALUES ('alice', '{unique}')".encode())
        connection.execute(f"CREATE ROLE {unique}".encode())
        connection.execute(f"GRANT USAGE ON SCHEMA spur_events TO {unique}".encode())
        connection.execute(f"SET ROLE {unique}".encode())
        call = "select count(*) from spur_events.revoke_member('alice', null)"
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(call)
        connection.execute(b"RESET ROLE")
        connection.execute(
            f"GRANT EXECUTE ON FUNCTION spur_events.revoke_member(text, text) TO {unique}".encode()
        )
        connection.execute(f"SET ROLE {unique}".encode())
        assert connection.execute(call).fetchone() == (1,)
        connection.execute(b"RESET ROLE")
        connection.execute(f"DROP OWNED BY {unique}; DROP ROLE {unique}".encode())
