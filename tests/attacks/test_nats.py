"""A researcher, and each service, tries on NATS what is not hers: with plain clients, and the credentials that she has.

What the commands make of a refusal is not the matter here, nor what the cluster refuses (test_members.py).
"""

import asyncio
import contextlib
import json
import os
import pwd
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.msg import Msg
from support import natsclients, pipeline

from spur_events import jetstream, munge, services, settings
from spur_events.identity import claims, keys, roles
from spur_events.jetstream import signin
from spur_events.local.munge import Munge
from spur_events.local.nats import Nats
from spur_events.schemas import codec, names, subjects
from spur_events.schemas.accounts import AccountState

STREAMS = ("SPUR_EVENTS", "SPUR_PARKED", "KV_spur-accounts", "KV_spur-status")
ME = pwd.getpwuid(os.geteuid()).pw_name


def config(server: Nats, **groups: Any) -> settings.Settings:
    return pipeline.config("postgresql://nobody", server, **groups)


def creds(server: Nats, part: str) -> Path:
    return server.credentials("default", 16) / f"{part}.creds"


@pytest.fixture
async def site(nats_server: Nats) -> Nats:
    """Return a server with streams and buckets, and something in them."""
    given = config(nats_server)
    async with jetstream.connect(given.nats, "test", "relay") as bus:
        await bus.ensure_topology("a")
    async with natsclients.someone(nats_server, creds(nats_server, "test")) as anybody:
        js = anybody.client.jetstream()
        for subject in ("spur.change.0.bio", "$KV.spur-accounts.bio", "$KV.spur-status.default.bio"):
            await js.publish(subject, b"as it was")
    return nats_server


async def last(server: Nats) -> dict[str, int]:
    """Return how far each stream is: a write of anybody shows."""
    async with jetstream.connect(config(server).nats, "test", "test") as bus:
        return {stream: await bus.last_sequence(stream) for stream in STREAMS}


Bob = Callable[[], contextlib.AbstractAsyncContextManager[tuple[natsclients.Someone, str]]]


@pytest.fixture(params=["credentials", "munge"])
def bob(request: pytest.FixtureRequest, site: Nats, munge_server: Munge) -> Bob:
    """Yield a researcher's connection and her slug: by a file, and without any."""

    @contextlib.asynccontextmanager
    async def by_file() -> AsyncIterator[tuple[natsclients.Someone, str]]:
        async with natsclients.someone(site, site.site.add_user("bob")) as one:
            yield one, "bob"

    @contextlib.asynccontextmanager
    async def by_munge() -> AsyncIterator[tuple[natsclients.Someone, str]]:
        given = config(
            site,
            nats={"url": site.url, "munge_socket": munge_server.socket},
            auth={"keys": site.site.folder / "auth"},
        )
        async with pipeline.part(services.auth, given):
            proof = munge.encode(signin.MUNGE_PAYLOAD, munge_server.socket)
            slug = names.slug(ME)
            async with natsclients.someone(site, inbox=f"_INBOX_{slug}", user=ME, password=proof) as one:
                yield one, slug

    return by_file if request.param == "credentials" else by_munge


NOT_FOR_USERS = [
    "spur.kubeconfig.default.alice",
    "spur.kubeconfig.default.admin",
    "spur.kubeconfig.default.",
    "spur.kubeconfig.default",
    "spur.kubeconfig.default.{me}.alice",
    "spur.kubeconfig..{me}",
    "spur.kubeconfig.default.*",
    "spur.kubeconfig.>",
    "spur.change.0.bio",
    "spur.recheck.default.0.bio",
    "spur.resync.default",
    "spur.guard.default",
    "spur.audit",
    "spur.parked.default.state",
    "$KV.spur-accounts.bio",
    "$KV.spur-status.default.bio",
    "$JS.API.INFO",
    "$JS.API.STREAM.NAMES",
    "$JS.API.STREAM.INFO.KV_spur-accounts",
    "$JS.API.STREAM.MSG.GET.KV_spur-accounts",
    "$JS.API.DIRECT.GET.KV_spur-accounts.$KV.spur-accounts.bio",
    "$JS.API.STREAM.CREATE.MINE",
    "$JS.API.STREAM.DELETE.SPUR_EVENTS",
    "$JS.API.CONSUMER.CREATE.SPUR_EVENTS",
    "$JS.ACK.SPUR_EVENTS.apply-default-0.1.1.1.1.0",
    "$SRV.PING",
    "$SYS.REQ.USER.AUTH",
    "$SYS.REQ.CLAIMS.UPDATE",
    "$SYS.REQ.SERVER.PING",
    "_INBOX_alice.x",
    "_INBOX_admin.x",
    "_INBOX_kubeconfig-default.x",
    "_R_.x.y",
]
NOT_TO_BE_HEARD = [
    ">",
    "*",
    "*.>",
    "_INBOX_alice.>",
    "_INBOX.>",
    "_R_.>",
    "$SRV.>",
    "$SYS.>",
    "$JS.>",
    "$KV.>",
    "spur.>",
    "spur.kubeconfig.>",
    "spur.kubeconfig.default.{me}",
    "spur.kubeconfig.default.alice",
]


async def test_a_user_reaches_her_own_subject_and_nothing_else(site: Nats, bob: Bob) -> None:
    before = await last(site)
    async with bob() as (one, me):
        assert await one.may_publish(f"spur.kubeconfig.default.{me}")
        assert await one.may_publish(f"spur.kubeconfig.another.{me}")
        let = []
        for subject in NOT_FOR_USERS:
            try:
                if await one.may_publish(subject.format(me=me)):
                    let.append(subject)
            except nats.errors.BadSubjectError:  # the client itself refuses
                continue
        assert let == []
        heard = [subject for subject in NOT_TO_BE_HEARD if await one.may_subscribe(subject.format(me=me))]
        assert heard == []
        with pytest.raises(nats.errors.Error):
            await one.client.jetstream(timeout=1).account_info()
    assert await last(site) == before


async def test_a_forged_reply_subject_writes_nowhere(site: Nats, bob: Bob) -> None:
    """Even if the service were naive and answered wherever a request wants it."""
    before = await last(site)
    asked = 0
    async with (
        natsclients.someone(site, creds(site, "kubeconfig")) as service,
        natsclients.someone(site, creds(site, "admin")) as admin,
        bob() as (one, me),
    ):

        async def naive(message: Msg) -> None:
            nonlocal asked
            asked += 1
            await service.client.publish(message.reply, b"a token of bob's")

        await service.client.subscribe("spur.kubeconfig.default.*", cb=naive)
        await service.client.flush()
        his = await admin.listen("_INBOX_admin.>")
        forged = [
            "spur.change.0.bio",
            "spur.recheck.default.0.bio",
            "spur.resync.default",
            "spur.audit",
            "$KV.spur-accounts.bio",
            "$KV.spur-status.default.bio",
            "$JS.API.STREAM.DELETE.SPUR_EVENTS",
            "$JS.API.STREAM.PURGE.KV_spur-accounts",
            "_INBOX_admin.x",
            "_INBOX_kubeconfig-default.x",
        ]
        for reply in forged:
            await one.client.publish(f"spur.kubeconfig.default.{me}", b"x", reply=reply)
        await one.client.flush()

        async def all_asked() -> bool:
            return asked == len(forged)

        await pipeline.eventually(all_asked, "the service got all requests")
        for each in (service, admin):
            await each.client.flush()
        assert his == []
    assert await last(site) == before


async def test_answers_reach_whoever_asked_alone(site: Nats, bob: Bob) -> None:
    async with (
        natsclients.someone(site, creds(site, "kubeconfig")) as service,
        natsclients.someone(site, site.site.add_user("alice")) as alice,
        bob() as (one, me),
    ):

        async def answer(message: Msg) -> None:
            await service.client.publish(message.reply, b"a token of alice's")

        await service.client.subscribe("spur.kubeconfig.default.*", cb=answer)
        await service.client.flush()
        heard = await one.listen(f"_INBOX_{me}.>")
        reply = await alice.client.request("spur.kubeconfig.default.alice", b"", timeout=10)
        assert reply.data == b"a token of alice's"
        await one.client.flush()
        assert heard == []
        with pytest.raises(nats.errors.NoRespondersError):  # and of another cluster nobody answers
            await alice.client.request("spur.kubeconfig.another.alice", b"", timeout=10)


async def test_what_is_directed_at_another_inbox_is_nobodys_answer(site: Nats, bob: Bob) -> None:
    """The account of users is one: bob may have *his own* answer sent to alice's inbox, but not to her request."""
    async with (
        natsclients.someone(site, creds(site, "kubeconfig")) as service,
        natsclients.someone(site, site.site.add_user("alice")) as alice,
        bob() as (one, me),
    ):
        waiting: list[Msg] = []

        async def answer(message: Msg) -> None:
            if message.subject.endswith(".alice"):
                waiting.append(message)
            else:
                await service.client.publish(message.reply, b"a token of bob's")

        await service.client.subscribe("spur.kubeconfig.default.*", cb=answer)
        await service.client.flush()
        inbox = await alice.listen("_INBOX_alice.>")
        request = asyncio.ensure_future(
            alice.client.request("spur.kubeconfig.default.alice", b"", timeout=pipeline.PATIENCE_S)
        )

        async def asked() -> bool:
            return bool(waiting)

        await pipeline.eventually(asked, "her request is there")
        tries = ["_INBOX_alice", "_INBOX_alice.x", "_INBOX_alice.x.y"]
        for reply in tries:
            await one.client.publish(f"spur.kubeconfig.default.{me}", b"x", reply=reply)
        await one.client.flush()

        async def arrived() -> bool:
            return any(message.data == b"a token of bob's" for message in inbox)

        await pipeline.eventually(arrived, "what bob may do: his own answer, in her inbox")
        assert not request.done()
        await service.client.publish(waiting[0].reply, b"a token of alice's")
        assert (await request).data == b"a token of alice's"


#: What no part may do at all.
FOR_NOBODY = [
    "$JS.API.STREAM.DELETE.KV_spur-accounts",
    "$JS.API.STREAM.PURGE.KV_spur-accounts",
    "$JS.API.STREAM.PURGE.SPUR_EVENTS",
    "$JS.API.STREAM.MSG.DELETE.KV_spur-accounts",
    "$JS.API.STREAM.RESTORE.MINE",
    "$JS.API.STREAM.SNAPSHOT.KV_spur-accounts",
    "$JS.API.STREAM.CREATE.MINE",
    "$JS.API.CONSUMER.DELETE.SPUR_EVENTS.apply-default-0",
    "$JS.API.CONSUMER.CREATE.SPUR_EVENTS",
    "$JS.API.CONSUMER.DURABLE.CREATE.SPUR_EVENTS.mine",
    "$SYS.REQ.CLAIMS.DELETE",
    "$SYS.REQ.SERVER.PING",
    "_INBOX_alice.x",
    "_INBOX_relay.x",
    "_INBOX_other.x",
    "_R_.x.y",
]
WRITES = {
    "state": "$KV.spur-accounts.bio",
    "change": "spur.change.0.bio",
    "heartbeat": "$KV.spur-status.relay",
    "checkpoint": "$KV.spur-status.checkpoint",
    "status": "$KV.spur-status.default.bio",
    "status elsewhere": "$KV.spur-status.other.bio",
    "guard report": "$KV.spur-status._part.default.apply",
    "resync part": "$KV.spur-status._part.default.resync",
    "kubeconfig part": "$KV.spur-status._part.default.kubeconfig",
    "part elsewhere": "$KV.spur-status._part.other.apply",
    "resync report": "$KV.spur-status._resync.default.x",
    "recheck": "spur.recheck.default.0.bio",
    "recheck elsewhere": "spur.recheck.other.0.bio",
    "resync request": "spur.resync.default",
    "resync elsewhere": "spur.resync.other",
    "audit": "spur.audit",
    "guard request": "spur.guard.default",
    "guard elsewhere": "spur.guard.other",
    "kubeconfig request": "spur.kubeconfig.default.alice",
    "parked": "spur.parked.default.state",
    "parked elsewhere": "spur.parked.other.state",
    "take events": "$JS.API.CONSUMER.MSG.NEXT.SPUR_EVENTS.apply-default-0",
    "take events elsewhere": "$JS.API.CONSUMER.MSG.NEXT.SPUR_EVENTS.apply-other-0",
    "acknowledge events": "$JS.ACK.SPUR_EVENTS.apply-default-0.1.1.1.1.0",
    "acknowledge events elsewhere": "$JS.ACK.SPUR_EVENTS.apply-other-0.1.1.1.1.0",
    "take resync requests": "$JS.API.CONSUMER.MSG.NEXT.SPUR_EVENTS.resync-default",
    "change a stream": "$JS.API.STREAM.UPDATE.SPUR_EVENTS",
    "push accounts": "$SYS.REQ.CLAIMS.UPDATE",
}
MAY = {
    "relay": {"state", "change", "heartbeat", "checkpoint", "change a stream"},
    "apply": {"status", "guard report", "recheck", "parked", "take events", "acknowledge events"},
    "resync": {
        "resync part",
        "resync report",
        "recheck",
        "resync request",
        "audit",
        "guard request",
        "parked",
        "take resync requests",
    },
    "kubeconfig": {"kubeconfig part"},
    "admin": {
        "recheck",
        "recheck elsewhere",
        "resync request",
        "resync elsewhere",
        "audit",
        "guard request",
        "guard elsewhere",
        "kubeconfig request",
        "take events",
        "take events elsewhere",
        "take resync requests",
    },
    "auth": set(),
    "system": {"push accounts"},
}
LISTENS = {
    "relay": {"spur.audit"},
    "apply": {"spur.guard.default"},
    "resync": set(),
    "kubeconfig": {"spur.kubeconfig.default.*", "$SRV.>"},
    "admin": set(),
    "auth": {"$SYS.REQ.USER.AUTH"},
    "system": set(),
}
EARS = [
    "spur.audit",
    "spur.guard.default",
    "spur.guard.other",
    "spur.kubeconfig.default.*",
    "spur.kubeconfig.other.*",
    "$SRV.>",
    "$SYS.REQ.USER.AUTH",
    ">",
    "spur.>",
    "$KV.>",
    "$JS.>",
    "$SYS.>",
    "_R_.>",
    "_INBOX_alice.>",
    "_INBOX_other.>",
]


@pytest.mark.parametrize("part", MAY)
async def test_a_part_may_do_its_own_work_and_nothing_else(part: str, site: Nats) -> None:
    file = site.site.credentials / "system.creds" if part == "system" else creds(site, part)
    async with natsclients.someone(site, file) as one:
        # A wrong payload, so that what is let through does nothing.
        did = {what for what, subject in WRITES.items() if await one.may_publish(subject, data=b"not ours")}
        assert did == MAY[part]
        assert [subject for subject in FOR_NOBODY if await one.may_publish(subject, data=b"{")] == []
        assert {subject for subject in EARS if await one.may_subscribe(subject)} == LISTENS[part]
        assert await one.may_subscribe(f"_INBOX_{signin.claims(file)['name']}.x")


@pytest.mark.parametrize("part", ["apply", "resync", "kubeconfig"])
async def test_the_server_plants_no_state_for_whoever_may_read(part: str, site: Nats) -> None:
    """JetStream answers wherever a request names, in its own right: no answer may be what a part has written."""
    given = config(site)
    direct = "$JS.API.DIRECT.GET"
    own = {
        "apply": "$KV.spur-status.default.mine",
        "resync": "$KV.spur-status._resync.default.mine",
        "kubeconfig": "$KV.spur-status._part.default.kubeconfig",
    }[part]
    async with (
        natsclients.someone(site, creds(site, part)) as one,
        jetstream.connect(given.nats, "t", "test") as bus,
    ):
        js = one.client.jetstream(timeout=5)
        forged = AccountState.model_validate(
            {
                "name": "evil",
                "installation": "a",
                "revision": {"epoch": 9, "number": 9},
                "incarnation": "x",
            }
        )
        data, headers = codec.encode(forged, 100_000)
        await js.publish(own, data, headers=headers)
        planted = "$KV.spur-accounts.evil"
        last_by = json.dumps({"last_by_subj": own}).encode()
        for subject, payload in (
            (f"{direct}.KV_spur-status.{own}", b""),
            (f"{direct}.KV_spur-status", last_by),
            ("$JS.API.STREAM.MSG.GET.KV_spur-status", last_by),
            ("$JS.API.STREAM.INFO.KV_spur-status", b""),
            (f"{direct}.KV_spur-accounts.$KV.spur-accounts.bio", b""),
        ):
            await one.client.publish(subject, payload, reply=planted)
        if part != "kubeconfig":
            recheck = "spur.recheck.default.0.evil"
            await js.publish(recheck, data, headers=headers)
            durable = "apply-default-0" if part == "apply" else "resync-default"
            wanted = {"name": durable, "durable_name": durable, "filter_subjects": [recheck]}
            wanted |= {"ack_policy": "explicit", "deliver_policy": "all"}
            request = {"stream_name": "SPUR_EVENTS", "config": wanted}
            create = f"$JS.API.CONSUMER.CREATE.SPUR_EVENTS.{durable}"
            await one.client.request(create, json.dumps(request).encode(), timeout=5)
            await one.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.SPUR_EVENTS.{durable}", b"", reply=planted)
        await one.client.flush()
        await stands_still(bus)
        with contextlib.suppress(codec.CodecError):
            found = await bus.get(subjects.ACCOUNTS_BUCKET, "evil", AccountState, newest=True)
            assert found is None, "a state was planted"
        entries = await bus.read_all(subjects.ACCOUNTS_BUCKET, AccountState)
        assert all(isinstance(entry, jetstream.Damaged) for entry in entries.values())


@pytest.mark.parametrize("part", ["apply", "resync", "kubeconfig", "admin"])
async def test_a_state_that_a_reader_had_overwritten_is_repaired(
    part: str, database_url: str, nats_server: Nats
) -> None:
    """What remains: an answer of the server, of whatever is in it, in the place of a state."""
    given = pipeline.config(database_url, nats_server)
    async with pipeline.relay(given) as (_, bus):
        pipeline.execute(
            given, "INSERT INTO accounts (name, grp_tres) VALUES ('bio', 'cpu=4'), ('chem', 'cpu=8')"
        )

        async def whole() -> bool:
            with contextlib.suppress(codec.CodecError):
                states = [await pipeline.state(bus, name) for name in ("bio", "chem")]
                return [state.name for state in states if state] == ["bio", "chem"]
            return False

        await pipeline.eventually(whole, "both are published")
        before = await bus.last_sequence("KV_spur-accounts")
        async with natsclients.someone(nats_server, creds(nats_server, part)) as thief:
            await thief.client.publish(
                "$JS.API.STREAM.INFO.KV_spur-accounts", b"", reply="$KV.spur-accounts.bio"
            )
            await thief.client.flush()

        async def overwritten() -> bool:
            return await bus.last_sequence("KV_spur-accounts") > before

        await pipeline.eventually(overwritten, "the answer is there")
        await pipeline.eventually(whole, "the relay has put the state back")


async def stands_still(bus: jetstream.Bus) -> None:
    """Wait until the bucket has stood still for a while: what an attack of a moment ago writes has come."""
    seen = -1
    stood = time.monotonic()
    while time.monotonic() < stood + 1:
        now = await bus.last_sequence("KV_spur-accounts")
        if now != seen:
            seen, stood = now, time.monotonic()
        await asyncio.sleep(0.05)


async def test_who_holds_the_users_key_makes_plain_users_and_nothing_else(site: Nats, tmp_path: Path) -> None:
    account = {name: site.site.key(name).public for name in roles.accounts()}
    signer = site.site.key("USERS.user")

    async def let_in(**different: Any) -> bool:
        key = keys.make(keys.Kind.USER)
        given: dict[str, Any] = {"account": account["USERS"], "name": "bob", **different}
        file = tmp_path / "made.creds"
        file.write_text(claims.credentials(claims.user(signer, key.public, **given), key))
        try:
            async with natsclients.someone(site, file) as one:
                assert not await one.may_publish("spur.kubeconfig.default.alice")
                assert not await one.may_publish("$KV.spur-accounts.bio")
                assert not await one.may_subscribe(">")
                return True
        except (nats.errors.Error, TimeoutError, OSError):
            return False

    assert await let_in()
    assert await let_in(tags=("role:user-admin", "role:admin", "cluster:default"))  # tags alone give nothing
    assert not await let_in(permissions={"pub": {"allow": ["spur.>"]}, "sub": {}})
    for name in ("PIPELINE", "SYSTEM", "AUTH"):
        assert not await let_in(account=account[name])


async def test_the_sentinel_alone_may_do_nothing(site: Nats, munge_server: Munge) -> None:
    given = config(
        site,
        nats={"url": site.url, "munge_socket": munge_server.socket},
        auth={"keys": site.site.folder / "auth"},
    )
    async with pipeline.part(services.auth, given):
        no: dict[str, Any] = {}
        for options in (no, {"user": "root", "password": ""}, {"token": "x"}):
            with pytest.raises((nats.errors.Error, TimeoutError)):
                async with natsclients.someone(site, **options):
                    pass
        with pytest.raises((nats.errors.Error, TimeoutError)):
            async with natsclients.someone(site, site.site.credentials / "sentinel.creds"):
                pass


async def test_without_credentials_nobody_is_let_in(site: Nats) -> None:
    with pytest.raises((nats.errors.Error, TimeoutError)):
        async with natsclients.someone(site):
            pass
