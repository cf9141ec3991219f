"""Users without any credentials file: the auth callout, with a real nats-server and a real munged."""

import asyncio
import contextlib
import logging
import os
import pwd
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.msg import Msg
from support import natsclients, pipeline, servers, tcp

from spur_events import errors, jetstream, munge, services, settings
from spur_events.consumers import auth
from spur_events.identity import claims, keys
from spur_events.jetstream import caller, signin
from spur_events.local.munge import Munge
from spur_events.local.nats import Nats
from spur_events.schemas import codec, names
from spur_events.schemas.access import KubeconfigReply, KubeconfigRequest, Refusal, RefusalCode

ME = pwd.getpwuid(os.geteuid()).pw_name
MINE = f"spur.kubeconfig.default.{names.slug(ME)}"
THEIRS = "spur.kubeconfig.default.alice"


def service_settings(server: Nats, munged: Munge, **of_auth: Any) -> settings.Settings:
    """Return what the auth service is given on its host."""
    given = {"keys": server.site.folder / "auth", **of_auth}
    return pipeline.config(
        "postgresql://nobody", server, nats={"url": server.url, "munge_socket": munged.socket}, auth=given
    )


def user_settings(server: Nats, munged: Munge) -> settings.Nats:
    """Return what a researcher has: an address, and munge."""
    return settings.Nats(url=server.url, munge=True, munge_socket=munged.socket)


@contextlib.asynccontextmanager
async def answered(config: settings.Settings) -> AsyncIterator[None]:
    """Answer requests for kubeconfigs in the place of the service."""
    assert config.nats.credentials is not None
    async with natsclients.someone(config.nats.url, config.nats.credentials / "kubeconfig.creds") as service:

        async def answer(message: Msg) -> None:
            request = codec.decode(KubeconfigRequest, message.data, message.headers)
            reply = KubeconfigReply(result=Refusal(code=RefusalCode.UNKNOWN_USER, message=request.account))
            data, headers = codec.encode(reply, service.client.max_payload)
            await service.client.publish(message.reply, data, headers=headers)

        await service.client.subscribe("spur.kubeconfig.default.*", cb=answer)
        await service.client.flush()
        yield


async def ask(mine: settings.Nats, subject: str = MINE) -> str:
    async with caller.caller(mine, "a user") as connection:
        reply = await connection.ask(
            subject, KubeconfigRequest(account="physics"), KubeconfigReply, 10, "the service"
        )
    assert isinstance(reply.result, Refusal)
    return reply.result.message


async def is_answered(mine: settings.Nats, subject: str = MINE) -> None:
    """Wait for an answer: a credential has to be made, and to be checked, in less than two seconds each."""

    async def asked() -> bool:
        with contextlib.suppress(errors.MisconfiguredError, errors.UnreachableError):
            return await ask(mine, subject) == "physics"
        return False

    await pipeline.eventually(asked, "an answer")


async def logged(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Wait until the auth service has told its reason: the server may have given up on it before."""

    async def told() -> bool:
        return any(reason in str(record.__dict__.get("reason")) for record in caplog.records)

    await pipeline.eventually(told, f"the log says why: {reason}")


async def test_a_user_without_any_file_asks_for_herself_and_for_nobody_else(
    nats_server: Nats, munge_server: Munge
) -> None:
    config = service_settings(nats_server, munge_server)
    mine = user_settings(nats_server, munge_server)
    assert signin.identity(mine, "user") == names.slug(ME)
    async with pipeline.part(services.auth, config), answered(config):
        await is_answered(mine)
        await is_answered(mine)  # each connection with another credential
        with pytest.raises(errors.RefusedError, match="does not let you ask"):
            await ask(mine, THEIRS)


async def test_credentials_files_work_beside_it(nats_server: Nats, munge_server: Munge) -> None:
    config = service_settings(nats_server, munge_server)
    mine = settings.Nats(url=nats_server.url, credentials=nats_server.site.add_user("alice"))
    async with pipeline.part(services.auth, config), answered(config):
        await is_answered(mine, THEIRS)
        await is_answered(user_settings(nats_server, munge_server))


async def test_administrators_of_the_settings_ask_for_anybody(nats_server: Nats, munge_server: Munge) -> None:
    config = service_settings(nats_server, munge_server, admins=(ME,))
    async with pipeline.part(services.auth, config), answered(config):
        await is_answered(user_settings(nats_server, munge_server), THEIRS)


async def test_a_server_that_knows_no_default_sentinel(nats_server: Nats, munge_server: Munge) -> None:
    config = service_settings(nats_server, munge_server)
    sentinel = nats_server.site.credentials / "sentinel.creds"
    mine = settings.Nats(
        url=nats_server.url, munge=True, munge_socket=munge_server.socket, credentials=sentinel
    )
    async with pipeline.part(services.auth, config), answered(config):
        await is_answered(mine)


def made(munged: Munge, *options: str, payload: str = signin.MUNGE_PAYLOAD) -> str:
    command = ["munge", f"--socket={munged.socket}", f"--string={payload}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


async def replayed(munged: Munge) -> str:
    credential = made(munged)
    await munge.decode(credential, munged.socket)
    return credential


async def expired(munged: Munge) -> str:
    credential = made(munged, "--ttl=1")
    end = time.time() + 2
    while time.time() < end:
        await asyncio.sleep(0.1)
    return credential


async def of_another_key(_munged: Munge) -> str:
    with servers.own_munge() as other:
        return made(other)


async def for_another_service(munged: Munge) -> str:
    return made(munged, payload="")


async def changed(munged: Munge) -> str:
    credential = made(munged)
    return credential[:-10] + ("A" if credential[-10] != "A" else "B") + credential[-9:]


async def garbage(_munged: Munge) -> str:
    return "MUNGE:" + "A" * 200 + ":"


async def endless(_munged: Munge) -> str:
    return "MUNGE:" + "A" * 50_000 + ":"


async def a_password(_munged: Munge) -> str:
    return "hunter2 --help"


async def nothing(_munged: Munge) -> str:
    return ""


BAD: dict[Callable[[Munge], Any], str] = {
    replayed: "Replayed credential",
    expired: "Expired credential",
    of_another_key: "Invalid credential",
    for_another_service: "made for something else",
    changed: "credential",
    garbage: "credential",
    endless: "",
    a_password: "not a MUNGE credential",
    nothing: "no MUNGE credential",
}


@pytest.mark.parametrize("kind", BAD, ids=lambda kind: kind.__name__)
async def test_refused(
    kind: Callable[[Munge], Any], nats_server: Nats, munge_server: Munge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config = service_settings(nats_server, munge_server)
    credential = await kind(munge_server)
    async with pipeline.part(services.auth, config), answered(config):
        with pytest.raises((nats.errors.Error, OSError)) as refused:
            async with natsclients.someone(nats_server, user=ME, password=credential):
                pass
        if BAD[kind]:
            assert "authorization" in str(refused.value).lower()
            await logged(caplog, BAD[kind])
        said = "\n".join(str(record.__dict__) for record in caplog.records)
        assert credential == "" or credential not in said
        await is_answered(user_settings(nats_server, munge_server))  # nobody else suffers


async def test_another_name_than_ones_own_is_refused(
    nats_server: Nats, munge_server: Munge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with pipeline.part(services.auth, service_settings(nats_server, munge_server)):
        with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
            async with natsclients.someone(nats_server, user="alice", password=made(munge_server)):
                pass
        await logged(caplog, "asks for another name")
        async with natsclients.someone(nats_server, user="", password=made(munge_server)) as anybody:
            assert await anybody.may_publish(MINE)
            assert not await anybody.may_publish(THEIRS)


async def test_a_uid_without_a_name_is_refused(
    nats_server: Nats, munge_server: Munge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with pipeline.part(services.auth, service_settings(nats_server, munge_server)):
        mine = user_settings(nats_server, munge_server)
        options = signin.options(mine, "user")
        inbox = options.pop("inbox_prefix")

        def unknown(uid: int) -> None:
            raise KeyError(uid)

        monkeypatch.setattr(pwd, "getpwuid", unknown)
        with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
            async with natsclients.someone(nats_server, inbox=inbox, **options):
                pass
        await logged(caplog, "has no name on this machine")


async def test_the_connection_ends_with_its_session(nats_server: Nats, munge_server: Munge) -> None:
    config = service_settings(nats_server, munge_server)
    short = config.auth.model_copy(update={"session_s": 3})  # less than the setting allows
    async with (
        pipeline.part(services.auth, config.model_copy(update={"auth": short})),
        natsclients.someone(nats_server, user=ME, password=made(munge_server)) as mine,
    ):

        async def ended() -> bool:
            return mine.client.is_closed

        await pipeline.eventually(ended, "the server ends the connection")


async def test_a_lost_connection_comes_back_with_a_fresh_credential(
    nats_server: Nats, munge_server: Munge
) -> None:
    cuts = 0

    def cut(data: bytes) -> bytes:
        nonlocal cuts
        if cuts > 0:
            cuts -= 1
            raise ConnectionResetError
        return data

    options = signin.options(user_settings(nats_server, munge_server), "user")
    options |= {"allow_reconnect": True, "max_reconnect_attempts": -1, "reconnect_time_wait": 0.1}
    async with (
        pipeline.part(services.auth, service_settings(nats_server, munge_server)),
        tcp.between("127.0.0.1", nats_server.port, cut) as port,
        natsclients.someone(f"nats://127.0.0.1:{port}", inbox=options.pop("inbox_prefix"), **options) as mine,
    ):
        for number in range(1, 4):
            cuts = 1

            async def back(number: int = number) -> bool:
                if mine.client.is_connected:
                    with contextlib.suppress(nats.errors.Error):
                        await mine.client.flush(1)
                return mine.client.is_connected and mine.client.stats["reconnects"] == number

            await pipeline.eventually(back, "signed in again")
            assert await mine.may_publish(MINE)
            assert not await mine.may_publish(THEIRS)


async def test_several_services_share_and_one_is_enough(nats_server: Nats, munge_server: Munge) -> None:
    config = service_settings(nats_server, munge_server)
    mine = user_settings(nats_server, munge_server)
    async with pipeline.part(services.auth, config), answered(config):
        async with pipeline.part(services.auth, config):
            for _ in range(6):
                await ask(mine)
        for _ in range(3):
            await ask(mine)


async def test_a_munged_that_is_away_comes_back(nats_server: Nats, munge_server: Munge) -> None:
    config = service_settings(nats_server, munge_server)
    credential = made(munge_server)
    async with pipeline.part(services.auth, config), answered(config):
        munge_server.stop()
        with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
            async with natsclients.someone(nats_server, user=ME, password=credential):
                pass
        with pytest.raises(errors.MisconfiguredError, match="munged runs"):
            await ask(user_settings(nats_server, munge_server))
        munge_server.start()
        await is_answered(user_settings(nats_server, munge_server))


async def test_without_the_service_a_person_is_told(nats_server: Nats, munge_server: Munge) -> None:
    with pytest.raises(errors.MisconfiguredError, match="refuses"):
        await ask(user_settings(nats_server, munge_server))


async def test_questions_that_no_server_asked_are_not_answered(
    nats_server: Nats, munge_server: Munge
) -> None:
    config = service_settings(nats_server, munge_server)
    async with jetstream.connect(config.nats, "auth", "auth") as bus:
        service = auth.Auth(config, bus)
        server, user = keys.make(keys.Kind.SERVER), keys.make(keys.Kind.USER)
        account = nats_server.site.key("AUTH").public

        def question(issuer: keys.Key = server, **different: Any) -> bytes:
            content = {
                "server_id": {"id": server.public},
                "user_nkey": user.public,
                "connect_opts": {"user": ME, "pass": made(munge_server)},
            }
            content |= different.pop("content", {})
            given = {
                "subject": account,
                "kind": "authorization_request",
                "audience": "nats-authorization-request",
                "expires": int(time.time()) + 5,
                "content": content,
            }
            return claims.sign(issuer, **{**given, **different}).encode("ascii")

        assert await service.answer(question()) is not None
        other = keys.make(keys.Kind.SERVER)
        whole = question()
        for wrong in (
            b"",
            b"\xff\x00",
            b"a.b.c",
            whole[:-2],
            question(other),
            question(keys.make(keys.Kind.ACCOUNT)),
            question(user, content={"server_id": {"id": user.public}}),
            question(subject=nats_server.site.key("USERS").public),
            question(kind="authorization_response"),
            question(audience="somebody"),
            question(expires=int(time.time()) - 1),
            question(content={"user_nkey": "UABC"}),
            question(content={"server_id": None}),
            question(content={"server_id": "x"}),
            question(expires="soon"),
        ):
            assert await service.answer(wrong) is None


async def test_keys_that_are_not_there_are_named(nats_server: Nats, munge_server: Munge) -> None:
    for given in ({"keys": None}, {"keys": nats_server.folder}):
        with pytest.raises(errors.MisconfiguredError, match="SPUR_EVENTS_AUTH_KEYS"):
            await services.auth(service_settings(nats_server, munge_server, **given))


async def test_what_is_wrong_at_the_start_ends_it(
    nats_server: Nats, munge_server: Munge, tmp_path: Path
) -> None:
    """It would be ready, and let nobody in."""
    given = service_settings(nats_server, munge_server)
    nowhere = given.nats.model_copy(update={"munge_socket": tmp_path / "nowhere"})
    with pytest.raises(errors.SpurEventsError, match="munge"):
        await asyncio.wait_for(services.auth(given.model_copy(update={"nats": nowhere})), pipeline.PATIENCE_S)
    assert given.nats.credentials is not None
    others = given.nats.model_copy(update={"credentials": given.nats.credentials / "relay.creds"})
    with pytest.raises(errors.MisconfiguredError, match=r"(?i)permissions violation.*CREDENTIALS"):
        await asyncio.wait_for(services.auth(given.model_copy(update={"nats": others})), pipeline.PATIENCE_S)
