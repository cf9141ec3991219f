"""`spur-events nats`, typed as an administrator does, and a real nats-server that runs what it made."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nats.errors
import pytest
import trustme
from support import natsclients, pipeline, processes

from spur_events import errors, jetstream, settings
from spur_events.identity import claims, keys, roles, serverconf
from spur_events.identity import site as sites
from spur_events.jetstream import caller, signin
from spur_events.local import child, folder
from spur_events.local import nats as local_nats
from spur_events.schemas import subjects

OWN = "spur.kubeconfig.default.alice"

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def site_folder(tmp_path: Path) -> Path:
    return tmp_path / "etc" / "site"


@pytest.fixture
def port() -> int:
    return folder.free_port()


@pytest.fixture
def run(site_folder: Path, port: int) -> Run:
    """Type `spur-events nats ...`; returns exit code, and what was printed."""

    def typed(*words: str) -> tuple[int, str]:
        where = () if "--dir" in words else ("--dir", str(site_folder))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPUR_EVENTS_")}
        done = subprocess.run(
            [processes.SCRIPTS / "spur-events", "nats", *words, *where],
            env={**kept, "SPUR_EVENTS_NATS_URL": f"nats://127.0.0.1:{port}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "SU" not in [word[:2] for word in done.stdout.split() if len(word) > 50], "a seed is printed"
        return done.returncode, done.stdout + done.stderr

    return typed


class Server:
    """nats-server with the configuration of a site, as it is."""

    def __init__(self, config: Path, port: int, log: Path) -> None:
        self.url = f"nats://127.0.0.1:{port}"
        self._config = config
        self._port = port
        self._child = child.Child(log, "nats-server")

    def start(self) -> None:
        command: list[str | Path] = [local_nats.binary(), "--config", self._config]
        self._child.spawn(command, death_signal=signal.SIGTERM)
        self._child.wait_ready(lambda: not folder.is_free(self._port), 30)

    def kill(self) -> None:
        self._child.kill()


@pytest.fixture
def server(run: Run, site_folder: Path, port: int, tmp_path: Path) -> Iterator[Server]:
    """Yield a running server of a fresh site."""
    code, told = run("init", "--listen", f"127.0.0.1:{port}")
    assert code == 0, told
    made = Server(site_folder / "server" / serverconf.CONFIG, port, tmp_path)
    made.start()
    yield made
    made.kill()


def config(url: str, credentials: Path) -> settings.Nats:
    return settings.Nats(url=url, credentials=credentials)


def test_what_init_makes_is_private_and_says_what_is_next(run: Run, site_folder: Path, port: int) -> None:
    code, told = run("init", "--listen", f"127.0.0.1:{port}", "--cluster", "alpha", "--cluster", "beta")
    assert code == 0
    for word in ("nats-server --config", "SPUR_EVENTS_NATS_CREDENTIALS", "nats user add", "keys"):
        assert word in told
    parts = {"relay", "apply", "resync", "kubeconfig", "auth", "admin"}
    assert {path.stem for path in (site_folder / "creds").glob("*.creds")} == parts | {"system", "sentinel"}
    assert {path.stem for path in (site_folder / "creds" / "beta").iterdir()} == {
        "apply",
        "resync",
        "kubeconfig",
    }
    for path in [site_folder, *site_folder.rglob("*")]:
        public = path.parent == site_folder / "server" and path.is_file()
        assert public or path.stat().st_mode & 0o077 == 0, path
    for path in (site_folder / "server").glob("*.conf"):
        assert "\nS" not in path.read_text()
        assert "SEED" not in path.read_text()
    assert signin.claims(site_folder / "creds" / "apply.creds")["name"] == "apply-alpha"
    assert signin.claims(site_folder / "creds" / "beta" / "apply.creds")["name"] == "apply-beta"


def test_an_existing_site_stays_as_it_is(run: Run, site_folder: Path) -> None:
    assert run("init")[0] == 0
    before = {path: path.read_bytes() for path in site_folder.rglob("*") if path.is_file()}
    code, told = run("init")
    assert code == 3
    assert "already" in told
    assert {path: path.read_bytes() for path in site_folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["init", "--listen", "4222"], "HOST:PORT"),
        (["init", "--listen", "0.0.0.0:99999"], "HOST:PORT"),
        (["init", "--cluster", "Not_A_Label"], "cluster"),
        (["init", "--tls-cert", "/nowhere/cert.pem"], "go together"),
        (["init", "--tls-cert", "/nowhere/cert.pem", "--tls-key", "/nowhere/key.pem"], "not a file"),
        (["user", "add", ""], "not a user's name"),
        (["user", "add", "two words"], "not a user's name"),
        (["user", "add", "line\nbreak"], "not a user's name"),
        (["user", "add", "x" * 300], "not a user's name"),
        (["user", "add", "alice", "--days", "-1"], "days"),
        (["service", "nobody"], "nobody"),
        (["service", "apply", "--cluster", "a.b"], "cluster"),
    ],
)
def test_usage(words: list[str], told: str, run: Run, site_folder: Path) -> None:
    code, said = run(*words)
    assert code == 2
    assert told in said
    assert not site_folder.exists()


@pytest.mark.parametrize("words", [["user", "add", "alice"], ["user", "revoke", "alice"], ["update"]])
def test_without_a_site_it_says_so(words: list[str], run: Run) -> None:
    code, told = run(*words)
    assert code == 1
    assert "nats init" in told


async def test_a_user_is_added_and_revoked_while_the_server_runs(
    run: Run, server: Server, site_folder: Path
) -> None:
    code, told = run("user", "add", "alice")
    assert code == 0, told
    file = site_folder / "users" / "alice.creds"
    assert str(file) in told
    assert file.stat().st_mode & 0o077 == 0
    assert run("user", "add", "bob", "--days", "30")[0] == 0
    bob = site_folder / "users" / "bob.creds"
    assert signin.claims(bob)["exp"] - signin.claims(bob)["iat"] == 30 * 86400
    assert signin.identity(config(server.url, file), "user") == "alice"
    kept = file.read_text()
    async with natsclients.someone(server.url, file) as alice, natsclients.someone(server.url, bob) as other:
        assert await alice.may_publish(OWN)
        assert not await other.may_publish(OWN)

        code, told = await asyncio.to_thread(run, "user", "revoke", "alice")
        assert code == 0, told

        async def ended() -> bool:
            return alice.client.is_closed

        await pipeline.eventually(ended, "her connection ends")
        assert other.client.is_connected
        assert not await other.may_publish(OWN)
    file.write_text(kept)
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        async with natsclients.someone(server.url, file):
            pass
    code, told = run("user", "revoke", "alice")
    assert code == 2
    assert "MUNGE" in told

    # The server remembers it over a restart, and new credentials of the same user work.
    server.kill()
    server.start()
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        async with natsclients.someone(server.url, file):
            pass
    assert run("user", "add", "alice")[0] == 0
    async with natsclients.someone(server.url, file) as alice:
        assert await alice.may_publish(OWN)


async def test_a_revocation_that_the_server_could_not_be_told_is_made_up_for(
    run: Run, server: Server, site_folder: Path
) -> None:
    assert run("user", "add", "alice")[0] == 0
    file = site_folder / "users" / "alice.creds"
    kept = file.read_text()
    server.kill()
    code, told = run("user", "revoke", "alice")
    assert code == 1
    assert "does not know it yet" in told
    assert "nats update" in told
    server.start()  # its configuration has the revocation already; its own store has the account from before
    code, told = run("update")
    assert code == 0, told
    file.write_text(kept)
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        async with natsclients.someone(server.url, file):
            pass


async def test_an_administrator_of_users_asks_for_anybody(run: Run, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "carol.creds"
    assert run("user", "add", "carol", "--admin", "-o", str(file))[0] == 0
    assert signin.identity(config(server.url, file), "user") is None
    async with natsclients.someone(server.url, file) as carol:
        assert await carol.may_publish(OWN)
        assert not await carol.may_publish("spur.change.0.bio")
        assert not await carol.may_subscribe("_INBOX_alice.>")


async def test_a_name_that_is_no_label(run: Run, server: Server, site_folder: Path) -> None:
    code, told = run("user", "add", "Ève.O'Neil")
    assert code == 0, told
    assert "lower case" in told
    (file,) = (site_folder / "users").iterdir()
    slug = signin.identity(config(server.url, file), "user")
    assert slug is not None
    async with natsclients.someone(server.url, file) as eve:
        assert await eve.may_publish(f"spur.kubeconfig.alpha.{slug}")
        assert not await eve.may_publish("spur.kubeconfig.alpha.eve")


async def test_credentials_for_a_second_cluster(run: Run, server: Server, site_folder: Path) -> None:
    code, told = run("service", "apply", "--cluster", "beta")
    assert code == 0
    file = site_folder / "creds" / "beta" / "apply.creds"
    assert str(file) in told
    async with natsclients.someone(server.url, file) as beta:
        assert await beta.may_publish("$KV.spur-status.beta.bio")
        assert not await beta.may_publish("$KV.spur-status.default.bio")


@pytest.mark.usefixtures("server")
def test_credentials_are_written_over_credentials_and_nothing_else(
    run: Run, site_folder: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "notes"
    mine.write_text("mine")
    key = site_folder / "keys" / "operator.nk"
    inside = site_folder / "auth" / "alice.creds"
    nowhere = tmp_path / "no" / "alice.creds"
    before = key.read_text()
    for path in (mine, key, inside, nowhere, tmp_path):
        for words in (("user", "add", "alice"), ("service", "relay")):
            code, told = run(*words, "-o", str(path))
            assert (code, str(path) in told, len(told.splitlines())) == (3, True, 1), told
    assert (mine.read_text(), key.read_text(), inside.exists()) == ("mine", before, False)
    assert run("user", "revoke", "alice")[0] == 2, "none was made"
    for _ in range(2):
        assert run("user", "add", "alice", "-o", str(tmp_path / "alice.creds"))[0] == 0


@pytest.mark.usefixtures("server")
def test_keys_that_cannot_be_read_keep_no_change_from_being_told_later(run: Run, site_folder: Path) -> None:
    assert run("user", "add", "alice")[0] == 0
    key = site_folder / "keys" / "operator.nk"
    kept = key.read_text()
    key.write_text("nonsense")
    code, told = run("user", "revoke", "alice")
    assert (code, "then run 'spur-events nats update'" in told) == (1, True)
    key.write_text(kept)
    assert run("update")[0] == 0


def test_a_folder_with_any_name(tmp_path: Path, port: int, run: Run) -> None:
    folder = tmp_path / 'Rechenzentrum "Süd" 中'
    code, told = run("init", "--listen", f"127.0.0.1:{port}", "--dir", str(folder))
    assert code == 0, told
    made = Server(folder / "server" / serverconf.CONFIG, port, tmp_path)
    made.start()
    made.kill()


async def test_a_second_auth_service_is_known_at_once(run: Run, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "auth.creds"
    code, told = run("service", "auth", "-o", str(file))
    assert code == 0, told
    async with natsclients.someone(server.url, file) as second:
        assert await second.may_subscribe("$SYS.REQ.USER.AUTH")


async def test_a_rotated_key_ends_what_the_old_one_signed(
    run: Run, server: Server, site_folder: Path, tmp_path: Path
) -> None:
    creds = site_folder / "creds"
    stolen = tmp_path / "stolen.creds"
    stolen.write_text((creds / "resync.creds").read_text())
    given = config(server.url, creds)
    async with (
        jetstream.connect(given, "test", "apply") as other,
        jetstream.connect(given, "test", "resync") as bus,
        natsclients.someone(server.url, stolen) as thief,
    ):
        code, told = await asyncio.to_thread(run, "rotate", "resync")
        assert code == 0, told

        async def ended() -> bool:
            return thief.client.is_closed

        async def back() -> bool:
            return bus.connected and bus._client.stats["reconnects"] > 0

        await pipeline.eventually(ended, "the old key's connections end")
        await pipeline.eventually(back, "the service comes back by its new file")
        assert other.connected
        assert other._client.stats["reconnects"] == 0
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        async with natsclients.someone(server.url, stolen):
            pass


async def test_a_connection_that_the_server_ends_for_good_ends_its_part(
    server: Server, site_folder: Path, tmp_path: Path
) -> None:
    site, key = sites.Site(site_folder), keys.make(keys.Kind.USER)
    account = site.key(roles.PIPELINE)
    token = claims.user(
        account,
        key.public,
        account=account.public,
        name="short",
        permissions={},
        expires=int(time.time()) + 6,
    )
    file = tmp_path / "short.creds"
    file.write_text(claims.credentials(token, key))

    async def part() -> None:
        async with jetstream.connect(config(server.url, file), "test"):
            await asyncio.Event().wait()

    async with asyncio.timeout(pipeline.PATIENCE_S):
        with pytest.raises(errors.MisconfiguredError, match=r"ended the connection.*expired"):
            await part()


async def test_tls(run: Run, site_folder: Path, port: int, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    stranger.cert_pem.write_to_path(tmp_path / "stranger.pem")
    tls = ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    assert run("init", "--listen", f"127.0.0.1:{port}", *tls)[0] == 0
    made = Server(site_folder / "server" / serverconf.CONFIG, port, tmp_path)
    made.start()
    try:
        given = config(made.url, site_folder / "creds").model_copy(update={"ca": tmp_path / "ca.pem"})
        async with jetstream.connect(given, "test", "relay") as bus:
            await bus.ensure_topology("x")
            assert await bus.last_sequence(subjects.EVENTS_STREAM) == 0
        for wrong, told in (
            ({"ca": tmp_path / "stranger.pem"}, "certificate"),
            ({"ca": None}, "certificate"),
            ({"ca": None, "url": f"tls://127.0.0.1:{port}"}, "certificate"),
            ({"url": f"nats://127.0.0.2:{port}"}, "127.0.0.2"),
            ({"ca": tmp_path / "cert.key"}, "SPUR_EVENTS_NATS_CA"),
        ):
            with pytest.raises(errors.SpurEventsError, match=told):
                async with jetstream.connect(given.model_copy(update=wrong), "test", "relay"):
                    pass
        by_address = given.model_copy(update={"url": f"tls://127.0.0.1:{port}"})
        async with jetstream.connect(by_address, "test", "apply"):
            pass
    finally:
        made.kill()


async def test_a_server_that_offers_no_tls_learns_nothing(
    server: Server, site_folder: Path, tmp_path: Path
) -> None:
    """Somebody in the middle could take the server's word for it away. A CA asks for TLS, and so does an address."""
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    plain = config(server.url, site_folder / "creds")
    for update in ({"ca": tmp_path / "ca.pem"}, {"url": server.url.replace("nats:", "tls:")}):
        given = plain.model_copy(update=update)
        for connecting in (jetstream.connect(given, "test", "admin"), caller.caller(given, "test", "admin")):
            with pytest.raises(errors.MisconfiguredError, match="offers no TLS"):
                async with connecting:
                    pass


def test_without_tls_on_a_network_init_warns(run: Run) -> None:
    code, told = run("init", "--listen", "0.0.0.0:4222")
    assert code == 0
    assert "clear text" in told
