"""The kubeconfig responder on a running pipeline: who gets a token, who does not and why, and when it dies."""

import asyncio
import base64
import json
import logging
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import nats.js.errors
import pytest
from aiohttp import web
from support import asking, members, pipeline, proxy, servers
from support import site as sites
from support.site import Site

from spur_events import errors, jetstream, services, settings
from spur_events.consumers import kubeconfig
from spur_events.consumers.kube import client as kube
from spur_events.consumers.plan import guard, marks
from spur_events.jetstream import caller, signin
from spur_events.local.controlplane import ControlPlane
from spur_events.local.nats import Nats
from spur_events.schemas import codec, names, subjects
from spur_events.schemas.access import Grant, KubeconfigReply, KubeconfigRequest, Refusal, RefusalCode
from spur_events.schemas.status import Phase, RelayStatus


def uid_of(token: str) -> str:
    payload = token.split(".")[1]
    found = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return str(found["kubernetes.io"]["serviceaccount"]["uid"])


# Granted


async def test_a_member_gets_a_token_for_her_namespace_and_no_other(
    site: Site, nats_server: Nats, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await site.add("lab", "alice")
    await site.add("other", "bob")
    alice = asking.as_user(site.config, nats_server, "alice", tmp_path)
    grant = await asking.ask(alice, site.cluster.name, "alice")
    assert isinstance(grant, Grant)
    assert (grant.account, grant.user, grant.namespace) == (site.name("lab"), "alice", site.namespace("lab"))
    account = await site.live("ServiceAccount", "lab", grant.service_account)
    assert account["metadata"]["uid"] == grant.service_account_uid == uid_of(grant.token)
    left = grant.expires_at - datetime.now(UTC)
    assert timedelta(minutes=58) < left <= timedelta(hours=1), "the default lifetime"
    async with asking.owner(grant, tmp_path) as client:
        await members.let_in(client, site.namespace("lab"))
        assert not await members.may_list_pods(client, site.namespace("other"))
    assert grant.token not in caplog.text
    assert grant.token not in repr(grant)


async def test_a_member_with_a_name_that_is_no_slug(site: Site, nats_server: Nats, tmp_path: Path) -> None:
    await site.add("Phys_Lab", "Alice.Smith")
    alice = asking.as_user(site.config, nats_server, "Alice.Smith", tmp_path)
    for account in ("", site.name("Phys_Lab"), names.slug(site.name("Phys_Lab"))):
        grant = await asking.ask(alice, site.cluster.name, "Alice.Smith", account=account)
        assert isinstance(grant, Grant)
        assert (grant.user, grant.account) == ("Alice.Smith", site.name("Phys_Lab"))


async def test_which_account_is_meant(site: Site) -> None:
    """C48: the default goes, the choice is asked for, nothing else is touched."""
    for account in ("bio", "lab", "zoo"):
        await site.add(account, "alice")
    refusal = await asking.refused(site, "alice")
    assert refusal.code is RefusalCode.ACCOUNT_NEEDED
    assert ", ".join(site.name(one) for one in ("bio", "lab", "zoo")) in refusal.message
    site.sql("UPDATE users SET default_account = account WHERE name = 'alice' AND account = '$lab'")
    await site.settled("lab")
    assert (await asking.granted(site, "alice")).account == site.name("lab")
    assert (await asking.granted(site, "alice", "zoo")).account == site.name("zoo")

    before = await site.live("ServiceAccount", "bio", names.service_account("alice"))
    site.sql("DELETE FROM users WHERE name = 'alice' AND account = '$lab'")
    await pipeline.published(site.config)
    assert (await asking.refused(site, "alice")).code is RefusalCode.ACCOUNT_NEEDED
    assert (await asking.refused(site, "alice", "lab")).code is RefusalCode.NOT_A_MEMBER
    site.sql("DELETE FROM users WHERE name = 'alice' AND account = '$zoo'")
    await pipeline.published(site.config)
    assert (await asking.granted(site, "alice")).account == site.name("bio"), "the only one that is left"
    assert before == await site.live("ServiceAccount", "bio", names.service_account("alice"))


async def test_a_token_that_is_still_good_is_not_made_anew(site: Site) -> None:
    await site.add("lab", "alice")
    first = await asking.granted(site, "alice")
    again = await asking.granted(site, "alice", held_uid=first.service_account_uid)
    assert (again.token, again.service_account_uid) == ("", first.service_account_uid)
    other = await asking.granted(site, "alice", held_uid="of somebody else")
    assert uid_of(other.token) == first.service_account_uid


async def test_a_paused_account(site: Site) -> None:
    await site.add("lab", "alice")
    await site.edit("Namespace", "lab", "", {"metadata": {"labels": {marks.RECONCILE: marks.PAUSED}}})
    await site.recheck("lab")
    await site.in_phase("lab", Phase.PAUSED)
    await asking.granted(site, "alice")
    site.sql("INSERT INTO users (name, account) VALUES ('bob', '$lab')")
    await pipeline.published(site.config)

    async def told() -> Refusal | None:
        found = await asking.ask(site.config.nats, site.cluster.name, "bob")
        return found if isinstance(found, Refusal) and found.code is RefusalCode.SERVICE_ACCOUNT else None

    refusal = await pipeline.eventually(told, "bob is told why he gets none")
    assert f"{marks.RECONCILE}={marks.PAUSED}" in refusal.message
    assert not refusal.temporary


# Removed, added again


async def test_removed_and_added_again(site: Site, tmp_path: Path) -> None:
    """C46: the old token is dead, hers is another, and what is held is not confirmed by name."""
    await site.add("lab", "alice")
    old = await asking.granted(site, "alice")
    site.sql("DELETE FROM users WHERE name = 'alice' AND account = '$lab'")
    await pipeline.published(site.config)
    site.sql("INSERT INTO users (name, account) VALUES ('alice', '$lab')")
    await site.settled("lab")
    new = await asking.granted(site, "alice", held_uid=old.service_account_uid)
    assert new.service_account_uid != old.service_account_uid
    async with asking.owner(old, tmp_path) as was, asking.owner(new, tmp_path) as now:
        await members.let_in(now, site.namespace("lab"))

        async def refused() -> bool:
            return not await members.may_list_pods(was, site.namespace("lab"))

        await pipeline.eventually(refused, "the old token is refused")


async def test_a_user_who_is_deleted_loses_all(site: Site, tmp_path: Path) -> None:
    """C47: every new request is refused once the change is on the bus, every token within the server's 10 s."""
    for account in ("one", "three", "two"):
        await site.add(account, "alice")
    grants = [await asking.granted(site, "alice", account) for account in ("one", "three", "two")]
    site.sql("DELETE FROM users WHERE name = 'alice'")
    await pipeline.published(site.config)
    for account in ("one", "three", "two"):
        assert (await asking.refused(site, "alice", account)).code is RefusalCode.UNKNOWN_USER
    for grant in grants:
        async with asking.owner(grant, tmp_path) as client:

            async def refused(client: kube.Client = client, grant: Grant = grant) -> bool:
                return not await members.may_list_pods(client, grant.namespace)

            await pipeline.eventually(refused, f"the token for {grant.account} is refused")


class _Interrupted(kube.Client):
    """The real API server; right after it made a token, `then` is called."""

    then: Any

    async def request(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        answer = await super().request(method, path, **given)
        if path.endswith("/token"):
            await self.then()
        return answer


async def test_a_removal_while_the_token_is_made(site: Site) -> None:
    """What was true before the token was made may be false after: then nobody gets it."""
    await site.add("lab", "alice")
    installation = await site.bus.check_topology()

    async def remove() -> None:
        site.sql("DELETE FROM users WHERE name = 'alice'")
        await pipeline.published(site.config)

    async def replace() -> None:
        await remove()
        site.sql("INSERT INTO users (name, account) VALUES ('alice', '$lab')")
        await pipeline.published(site.config)

    async with _Interrupted(site.config.kubernetes, kubeconfig.PART) as client:
        part = kubeconfig.Responder(site.config, site.bus, client, installation)
        for client.then, code in ((replace, RefusalCode.NOT_READY), (remove, RefusalCode.NOT_A_MEMBER)):
            answer = await part.answer("alice", KubeconfigRequest())
            assert isinstance(answer.reply, KubeconfigReply)
            assert isinstance(answer.reply.result, Refusal)
            assert answer.reply.result.code is code
            site.sql("DELETE FROM users WHERE name = 'alice'")
            site.sql("INSERT INTO users (name, account) VALUES ('alice', '$lab')")
            await site.settled("lab")


# Refused


async def test_who_is_nobody_and_who_is_not_in_the_account(site: Site) -> None:
    await site.add("lab", "alice")
    await site.add("secret", "bob")
    assert (await asking.refused(site, "nobody")).code is RefusalCode.UNKNOWN_USER
    there = await asking.refused(site, "alice", "secret")
    nowhere = await asking.refused(site, "alice", "unknown")
    assert there.code is nowhere.code is RefusalCode.NOT_A_MEMBER
    # It does not tell which accounts exist.
    assert there.message.replace("secret", "unknown") == nowhere.message


async def test_a_deleted_account(site: Site) -> None:
    await site.add("bio", "alice")
    await site.add("lab", "alice")
    await site.delete("lab")
    assert (await asking.refused(site, "alice", "lab")).code is RefusalCode.NOT_A_MEMBER


@pytest.mark.parametrize("lifetime_s", [1, 60, 599])
async def test_a_lifetime_that_kubernetes_refuses(site: Site, lifetime_s: int) -> None:
    """C45, second half."""
    await site.add("lab", "alice")
    refusal = await asking.refused(site, "alice", lifetime_s=lifetime_s)
    assert refusal.code is RefusalCode.LIFETIME
    assert "at least 600 s" in refusal.message or "less than 600 s" in refusal.message


async def test_a_lifetime_beyond_the_configured_one(site: Site) -> None:
    await site.add("lab", "alice")
    grant = await asking.granted(site, "alice", lifetime_s=2**40)
    assert grant.expires_at - datetime.now(UTC) <= timedelta(seconds=86400)


async def test_a_service_account_that_is_not_this_memberships(site: Site) -> None:
    await site.add("lab", "alice")
    name = names.service_account("alice")
    await site.edit("ServiceAccount", "lab", name, {"metadata": {"annotations": {marks.GENERATION: "x"}}})
    assert (await asking.refused(site, "alice")).code is RefusalCode.SERVICE_ACCOUNT
    await site.remove("ServiceAccount", "lab", name)
    refusal = await asking.refused(site, "alice")
    assert (refusal.code, refusal.temporary) == (RefusalCode.SERVICE_ACCOUNT, True)
    await site.recheck("lab")
    await asking.granted(site, "alice")


async def test_a_quota_that_is_not_in_force(site: Site) -> None:
    await site.add("lab", "alice")
    await site.remove("ResourceQuota", "lab", marks.QUOTA_NAME)
    refusal = await asking.refused(site, "alice")
    assert (refusal.code, refusal.temporary) == (RefusalCode.NOT_READY, True)
    assert "quota" in refusal.message


async def test_a_namespace_that_is_not_ours_or_on_its_way_out(site: Site) -> None:
    await site.add("lab", "alice")
    await site.edit("Namespace", "lab", "", {"metadata": {"labels": {marks.INSTALLATION: "another"}}})
    assert "not ours" in (await asking.refused(site, "alice")).message
    await site.edit(
        "Namespace",
        "lab",
        "",
        {"metadata": {"labels": {marks.INSTALLATION: await site.bus.check_topology()}}},
    )
    await site.pin("lab")
    await site.remove("Namespace", "lab")
    refusal = await asking.refused(site, "alice")
    assert refusal.code in {RefusalCode.NOT_READY, RefusalCode.SERVICE_ACCOUNT}
    path = f"/api/v1/namespaces/{site.namespace('lab')}/configmaps/pin"
    await site.cluster.patch(path, {"metadata": {"finalizers": []}})


async def test_a_guard_that_was_weakened(site: Site, nats_server: Nats) -> None:
    await site.add("lab", "alice")
    await site.guarded()
    binding = guard.manifests(await site.bus.check_topology())[1]
    path = f"/apis/{guard.GROUP}/v1/validatingadmissionpolicybindings/{binding['metadata']['name']}"
    await site.cluster.patch(path, {"spec": {"validationActions": ["Warn"]}})
    refusal = await asking.refused(site, "alice")
    assert refusal.code is RefusalCode.GUARD_MISSING
    assert "validationActions" in refusal.message
    name = f"{site.cluster.name}-x"
    careless = _on(site, nats_server, name, access={"require_guard": False})
    async with pipeline.background(services.apply(careless)), pipeline.part(services.kubeconfig, careless):

        async def granted() -> bool:
            return isinstance(await asking.ask(careless.nats, name, "alice"), Grant)

        await pipeline.eventually(granted, "without the guard, where that was asked for")


def _on(site: Site, nats_server: Nats, cluster: str, **groups: dict[str, Any]) -> settings.Settings:
    """Return the site's settings for another name of the same cluster, with credentials for that."""
    given = {
        "kubernetes": {**site.config.kubernetes.model_dump(), "cluster": cluster},
        "apply": site.config.apply.model_dump(),
    }
    url = site.config.database.url.get_secret_value()
    return pipeline.config(url, nats_server, **(given | groups))


async def test_an_account_that_the_cluster_has_not_got(site: Site, nats_server: Nats) -> None:
    await site.add("lab", "alice")
    other = _on(site, nats_server, f"{site.cluster.name}-x")
    async with pipeline.part(services.kubeconfig, other):
        refusal = await asking.ask(other.nats, other.kubernetes.cluster, "alice")
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.temporary) == (RefusalCode.NOT_READY, True)
    assert "spur-events run apply" in refusal.message


async def test_a_relay_that_is_silent(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> None:
    given = sites.config(database_url, nats_server, control_plane, unique)
    async with sites.running(given, unique) as found:
        await found.add("lab", "alice")
        await asking.granted(found, "alice")
    async with (
        jetstream.connect(given.nats, "test", "test") as bus,
        pipeline.part(services.kubeconfig, given),
    ):
        entry = await bus.get(subjects.STATUS_BUCKET, subjects.RELAY_KEY, RelayStatus)
        assert entry is not None
        for seconds, words in ((61, r"\b6\d s ago"), (-120, "clock")):
            at = datetime.now(UTC) - timedelta(seconds=seconds)
            beat = entry.value.model_copy(update={"at": at})
            await bus.put(subjects.STATUS_BUCKET, subjects.RELAY_KEY, beat)
            refusal = await asking.ask(given.nats, unique, "alice")
            assert isinstance(refusal, Refusal)
            assert refusal.code is RefusalCode.RELAY_SILENT
            assert re.search(words, refusal.message)
        # She is not a member any more, which nobody could say now: the same.
        assert isinstance(await asking.ask(given.nats, unique, "nobody"), Refusal)


# The cluster in trouble


async def test_an_api_server_that_fails_or_forbids(site: Site, nats_server: Nats, tmp_path: Path) -> None:
    """The real API server behind a proxy; the site's own responder goes past it."""
    await site.add("lab", "alice")
    name = f"{site.cluster.name}-x"
    upstream = site.config.kubernetes.kubeconfig
    assert upstream is not None
    async with proxy.before(upstream, tmp_path) as between:
        other = _on(
            site,
            nats_server,
            name,
            kubernetes={"cluster": name, "kubeconfig": between.kubeconfig, "timeout_s": 10.0},
        )
        async with pipeline.background(services.apply(other)), pipeline.part(services.kubeconfig, other):

            async def asked() -> Grant | Refusal:
                return await asking.ask(other.nats, name, "alice")

            async def granted() -> bool:
                return isinstance(await asked(), Grant)

            await pipeline.eventually(granted, "granted through the proxy")
            outcomes = {
                RefusalCode.CLUSTER_UNREACHABLE: proxy.refusal(503, "ServiceUnavailable", "no"),
                RefusalCode.MISCONFIGURED: proxy.refusal(403, "Forbidden", "no"),
                RefusalCode.SERVICE_ACCOUNT: proxy.refusal(409, "Conflict", "another UID"),
            }
            for code, response in outcomes.items():
                body, status = response.text, response.status

                async def rule(request: Any, body: Any = body, status: int = status) -> Any:
                    if request.method == "POST" and request.path.endswith("/token"):
                        return web.Response(status=status, text=body, content_type="application/json")
                    return None

                between.rule = rule
                refusal = await asked()
                assert isinstance(refusal, Refusal)
                assert refusal.code is code
                assert refusal.temporary is (code is not RefusalCode.MISCONFIGURED)

            async def hangs(request: Any) -> Any:
                return await proxy.never() if request.path.endswith(site.namespace("lab")) else None

            between.rule = hangs
            refusal = await asked()
            assert isinstance(refusal, Refusal)
            assert refusal.code is RefusalCode.CLUSTER_UNREACHABLE
            between.let_through()
            assert isinstance(await asked(), Grant)


async def test_rights_that_are_missing(site: Site, nats_server: Nats, tmp_path: Path) -> None:
    """With another service's kubeconfig: resync may make no tokens."""
    await site.add("lab", "alice")
    upstream = site.config.kubernetes.kubeconfig
    assert upstream is not None
    own = tmp_path / "kubeconfigs"
    own.mkdir()
    (own / "kubeconfig.kubeconfig").write_bytes((upstream / "resync.kubeconfig").read_bytes())
    installation = await site.bus.check_topology()
    given = _on(
        site, nats_server, site.cluster.name, kubernetes={"kubeconfig": own, "cluster": site.cluster.name}
    )
    async with kube.Client(given.kubernetes, kubeconfig.PART) as client:
        part = kubeconfig.Responder(given, site.bus, client, installation)
        answer = await part.answer("alice", KubeconfigRequest())
        assert not client._api.rest_client.pool_manager.connector._acquired, "no other request goes on"
    assert isinstance(answer.reply, KubeconfigReply)
    assert isinstance(answer.reply.result, Refusal)
    assert answer.reply.result.code is RefusalCode.MISCONFIGURED
    assert (answer.status, answer.word) == (503, "misconfigured")


async def test_a_lifetime_that_the_server_shortens(
    database_url: str, nats_server: Nats, unique: str, tmp_path: Path
) -> None:
    """C45, first half: the reply has the end that the server says."""
    plane = ControlPlane(
        tmp_path / "plane", durable=False, extra=["--service-account-max-token-expiration=1h"]
    )
    plane.start()
    try:
        # The services as the administrator: their own tokens are another test's.
        given = pipeline.config(
            database_url,
            nats_server,
            kubernetes={"cluster": unique, "kubeconfig": plane.kubeconfig},
            access={"max_token_lifetime_s": 2**31},
        )
        async with sites.running(given, unique) as found:
            await found.add("lab", "alice")
            grant = await asking.granted(found, "alice", lifetime_s=8760 * 3600)
        left = grant.expires_at - datetime.now(UTC)
        assert timedelta(minutes=58) < left <= timedelta(hours=1)
    finally:
        plane.kill()


# Where the API server is


async def test_address_and_ca(site: Site, tmp_path: Path) -> None:
    await site.add("lab", "alice")
    own = await asking.granted(site, "alice")
    installation = await site.bus.check_topology()

    async def grant(**access: Any) -> Grant | Refusal:
        given = site.config.model_copy(
            update={"access": settings.Access.model_validate(access | {"require_guard": False})}
        )
        async with kube.Client(given.kubernetes, kubeconfig.PART) as client:
            part = kubeconfig.Responder(given, site.bus, client, installation)
            answer = await part.answer("alice", KubeconfigRequest(held_uid=own.service_account_uid))
        assert isinstance(answer.reply, KubeconfigReply)
        return answer.reply.result

    assert own.server.startswith("https://127.0.0.1:")
    assert own.ca.startswith("-----BEGIN CERTIFICATE-----")
    bundle = tmp_path / "ca.crt"
    bundle.write_text(own.ca)
    named = await grant(server="https://k8s.example.org", ca=bundle)
    assert isinstance(named, Grant)
    assert (named.server, named.ca) == ("https://k8s.example.org", own.ca)
    trusted = await grant(server="https://k8s.example.org", system_ca=True)
    assert isinstance(trusted, Grant)
    assert (trusted.server, trusted.ca) == ("https://k8s.example.org", "")
    for text in ("no certificate", None):
        if text is None:
            bundle.unlink()
        else:
            bundle.write_text(text)
        refusal = await grant(ca=bundle)
        assert isinstance(refusal, Refusal)
        assert refusal.code is RefusalCode.MISCONFIGURED
        assert "SPUR_EVENTS_ACCESS_CA" in refusal.message


# Requests as they should not be


async def _raw(given: settings.Settings, part: str, subject: str, data: bytes, **more: Any) -> Any:
    client = await nats.connect(given.nats.url, **signin.options(given.nats, part))
    try:
        return await client.request(subject, data, timeout=10, **more)
    finally:
        await client.close()


async def test_payloads_that_cannot_be_read(site: Site) -> None:
    """C44: nothing in a payload says who asks, and nothing in it makes the service fail."""
    await site.add("lab", "alice")
    subject = subjects.kubeconfig(site.cluster.name, "alice")
    good = {"Spur-Type": "KubeconfigRequest"}
    payloads: list[tuple[bytes, dict[str, str] | None]] = [
        (b"", None),
        (b"\xff\xff\xff", good),
        (b'{"user": "bob"}', good),
        (b"x" * 100_000, good),
        (b"", good | {"Content-Encoding": "deflate"}),
        (b"", {"Spur-Type": "Recheck"}),
        (b"\x0a\x88\x27" + b"a" * 5000, good),
    ]
    for data, headers in payloads:
        reply = await _raw(site.config, "admin", subject, data, headers=headers)
        assert reply.headers["Nats-Service-Error-Code"] == "400"
        assert reply.headers["Nats-Service-Error"] == "bad-request"
    # An empty request is a good one: all fields have a default.
    assert (await _raw(site.config, "admin", subject, b"", headers=good)).headers.get(
        "Nats-Service-Error"
    ) is None
    wrong = await _raw(
        site.config, "admin", subjects.kubeconfig(site.cluster.name, "Alice"), b"", headers=good
    )
    assert wrong.headers["Nats-Service-Error"] == "bad-request"


async def test_an_answer_goes_to_an_inbox_and_nowhere_else(site: Site) -> None:
    """Not even an administrator of the pipeline can have the service write into a bucket or stream."""
    await site.add("lab", "alice")
    client = await nats.connect(site.config.nats.url, **signin.options(site.config.nats, "admin"))
    places = [f"$KV.{subjects.ACCOUNTS_BUCKET}.forged", "spur.change.0.forged", "", "_INBOX.other"]
    bucket = f"KV_{subjects.ACCOUNTS_BUCKET}"
    try:
        before = (await site.bus.mark(bucket)).last
        for place in places:
            for subject in (subjects.kubeconfig(site.cluster.name, "alice"), "$SRV.PING.spur-kubeconfig"):
                await client.publish(subject, b"", reply=place, headers={"Spur-Type": "KubeconfigRequest"})
        # What comes behind is answered, so what came before was handled.
        await client.request("$SRV.PING.spur-kubeconfig", b"", timeout=10)
        await asking.granted(site, "alice")
        assert before == (await site.bus.mark(bucket)).last
        with pytest.raises(nats.js.errors.NotFoundError):
            await site.bus._js.get_last_msg(subjects.EVENTS_STREAM, "spur.change.0.forged")
    finally:
        await client.close()


async def test_the_service_can_be_found_and_asked(site: Site) -> None:
    await site.add("lab", "alice")
    await asking.granted(site, "alice")
    await asking.refused(site, "nobody")
    ping = json.loads((await _raw(site.config, "admin", "$SRV.PING.spur-kubeconfig", b"")).data)
    assert ping["metadata"]["cluster"] == site.cluster.name
    info = json.loads((await _raw(site.config, "admin", "$SRV.INFO.spur-kubeconfig", b"")).data)
    assert [one["subject"] for one in info["endpoints"]] == [subjects.kubeconfig(site.cluster.name, "*")]
    told = (await _raw(site.config, "admin", "$SRV.STATS.spur-kubeconfig", b"")).data
    stats = json.loads(told)
    assert stats["endpoints"][0]["data"] == {"granted": 1, "refused": 1, "failed": 0}
    assert b"alice" not in told


async def test_many_at_once_over_two_responders(site: Site) -> None:
    await site.add("lab", "alice")
    async with (
        pipeline.part(services.kubeconfig, site.config),
        caller.caller(site.config.nats, "test") as calling,
    ):
        subject = subjects.kubeconfig(site.cluster.name, "alice")
        replies = await asyncio.gather(
            *(calling.ask(subject, KubeconfigRequest(), KubeconfigReply, 30, "x") for _ in range(100))
        )
    assert all(isinstance(reply.result, Grant) for reply in replies)


async def test_nobody_can_keep_the_others_waiting(site: Site, nats_server: Nats, tmp_path: Path) -> None:
    """More requests of one member than can be answered while another waits."""
    await site.add("lab", "alice", "bob")
    alice = asking.as_user(site.config, nats_server, "alice", tmp_path)
    bob = asking.as_user(site.config, nats_server, "bob", tmp_path)
    subject = subjects.kubeconfig(site.cluster.name, "alice")
    data, _ = codec.encode(KubeconfigRequest(), 4096)
    async with caller.caller(alice, "flood") as calling:
        for number in range(10_000):
            await calling._client.publish(subject, data, reply=f"_INBOX_alice.{number}")
        await calling._client.flush(30)
        assert isinstance(await asking.ask(bob, site.cluster.name, "bob"), Grant)
        # And she herself, once some of hers are answered.
        assert isinstance(await asking.ask(alice, site.cluster.name, "alice"), Grant)


async def test_nobody_there_and_not_permitted(site: Site, nats_server: Nats, tmp_path: Path) -> None:
    """C39 and C44: both are told at once, not by a time-out."""
    await site.add("lab", "alice")
    bob = asking.as_user(site.config, nats_server, "bob", tmp_path)
    with pytest.raises(caller.NobodyError, match="is not running"):
        await asking.ask(site.config.nats, "elsewhere", "alice")
    with pytest.raises(caller.NobodyError, match="is not running"):
        await asking.ask(bob, "elsewhere", "bob")
    with pytest.raises(errors.RefusedError, match="does not let you ask"):
        await asking.ask(bob, site.cluster.name, "alice")


async def test_a_connection_that_is_lost_while_waiting(site: Site, nats_server: Nats) -> None:
    client = await nats.connect(site.config.nats.url, **signin.options(site.config.nats, "test"))
    heard = asyncio.Event()

    async def never(_message: Any) -> None:
        heard.set()

    await client.subscribe(subjects.kubeconfig("silent", "*"), cb=never)
    await client.flush()
    asked = asyncio.create_task(asking.ask(site.config.nats, "silent", "alice"))
    await asyncio.wait_for(heard.wait(), 10)
    await client.close()
    nats_server.kill()
    try:
        with pytest.raises((errors.UnreachableError, errors.TimedOutError)):
            await asked
    finally:
        nats_server.start()
