"""The commands as processes, with something missing or wrong: one line that says what to check, no traceback."""

import subprocess
from pathlib import Path

import pytest
from support import pipeline, processes, servers

from spur_events import settings
from spur_events.identity import serverconf, site
from spur_events.local.nats import Nats

#: Nothing listens on port 1 of this machine.
_NOBODY_DATABASE = "postgresql://spur:hunter2@127.0.0.1:1/spur"
_NOBODY_NATS = "nats://127.0.0.1:1"


def run(given: settings.Settings | None, *words: str, **variables: str) -> tuple[int, str, list[str]]:
    """Run a command; return exit code, standard output and the lines on standard error."""
    environment = processes.environment(given or settings.Settings()) | variables
    ended = subprocess.run(
        [str(processes.SCRIPTS / words[0]), *words[1:]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in ended.stderr + ended.stdout
    assert "hunter2" not in ended.stderr + ended.stdout
    return ended.returncode, ended.stdout, ended.stderr.splitlines()


def one_line(lines: list[str]) -> str:
    """Return the only line that is no log record (those are JSON objects); it must be the last."""
    told = [line for line in lines if not line.startswith("{")]
    assert len(told) == 1, lines
    assert lines[-1] == told[0]
    assert told[0].startswith("spur-events: ")
    return told[0]


def kubeconfig(folder: Path) -> Path:
    """Return a kubeconfig for an API server that is not there."""
    path = folder / "kubeconfig"
    path.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n"
        "clusters: [{name: x, cluster: {server: 'https://127.0.0.1:1'}}]\n"
        "users: [{name: x, user: {token: x}}]\n"
        "contexts: [{name: x, context: {cluster: x, user: x}}]\n",
        "utf-8",
    )
    return path


@pytest.mark.parametrize("words", [("db", "migrate"), ("run", "relay")])
def test_no_database(words: tuple[str, ...]) -> None:
    code, out, lines = run(None, "spur-events", *words, SPUR_EVENTS_DATABASE_URL=_NOBODY_DATABASE)
    told = one_line(lines)
    assert (code, out) == (1, "")
    assert "127.0.0.1:1, database spur" in told
    assert "check SPUR_EVENTS_DATABASE_URL and that the server runs" in told


def test_a_database_that_refuses_the_password(database_url: str) -> None:
    wrong = database_url.partition("@")[2]
    code, _, lines = run(
        None,
        "spur-events",
        "db",
        "migrate",
        SPUR_EVENTS_DATABASE_URL=f"postgresql://postgres:hunter2@{wrong}",
    )
    assert code == 1
    assert "password authentication failed" in one_line(lines)


def test_a_database_url_that_is_none() -> None:
    code, _, lines = run(None, "spur-events", "db", "migrate", SPUR_EVENTS_DATABASE_URL="nonsense")
    assert code == 1
    assert "SPUR_EVENTS_DATABASE_URL" in one_line(lines)


def test_a_database_without_our_schema_asks_for_the_migration(
    empty_database_url: str, nats_server: Nats
) -> None:
    code, _, lines = run(pipeline.config(empty_database_url, nats_server), "spur-events", "run", "relay")
    assert code == 1
    assert "run 'spur-events db migrate'" in one_line(lines)


def test_no_nats_for_the_relay(database_url: str, nats_server: Nats) -> None:
    given = pipeline.config(database_url, nats_server)
    code, _, lines = run(given, "spur-events", "run", "relay", SPUR_EVENTS_NATS_URL=_NOBODY_NATS)
    told = one_line(lines)
    assert code == 1
    assert _NOBODY_NATS in told
    assert "check SPUR_EVENTS_NATS_URL and that the server runs" in told


def test_no_nats_for_apply(control_plane: servers.Cluster) -> None:
    code, _, lines = run(
        None,
        *("spur-events", "run", "apply"),
        SPUR_EVENTS_NATS_URL=_NOBODY_NATS,
        SPUR_EVENTS_KUBERNETES_KUBECONFIG=str(control_plane.kubeconfigs),
    )
    told = one_line(lines)
    assert code == 1
    assert _NOBODY_NATS in told
    assert "check SPUR_EVENTS_NATS_URL" in told


@pytest.mark.parametrize("command", ["status", "events"])
def test_no_nats_for_what_only_reads(command: str) -> None:
    code, out, lines = run(None, "spur-events", command, SPUR_EVENTS_NATS_URL=_NOBODY_NATS)
    told = one_line(lines)
    assert (code, out) == (1, "")
    assert _NOBODY_NATS in told
    assert "check SPUR_EVENTS_NATS_URL" in told


@pytest.mark.parametrize("command", ["status", "events"])
def test_a_state_folder_where_nothing_runs(command: str, tmp_path: Path) -> None:
    code, out, lines = run(None, "spur-events", command, "--state-dir", str(tmp_path))
    told = one_line(lines)
    assert (code, out) == (1, "")
    assert str(tmp_path) in told
    assert "spur-events up" in told


def test_nats_that_refuses_the_credentials(nats_server: Nats, database_url: str, tmp_path: Path) -> None:
    other = site.Site.create(tmp_path / "site", serverconf.Server(), clusters=["default"], partitions=1)
    given = pipeline.config(database_url, nats_server, nats={"credentials": other.credentials})
    code, _, lines = run(given, "spur-events", "run", "relay")
    told = one_line(lines)
    assert code == 1
    assert "refuses the credentials" in told
    assert "SPUR_EVENTS_NATS_CREDENTIALS" in told


def test_no_kubernetes(database_url: str, nats_server: Nats, tmp_path: Path) -> None:
    given = pipeline.config(database_url, nats_server, kubernetes={"kubeconfig": kubeconfig(tmp_path)})
    code, _, lines = run(given, "spur-events", "run", "apply")
    told = one_line(lines)
    assert code == 1
    assert "https://127.0.0.1:1" in told
    assert "SPUR_EVENTS_KUBERNETES_KUBECONFIG" in told


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "no Kubernetes cluster is configured"),
        ({"SPUR_EVENTS_KUBERNETES_KUBECONFIG": "/nowhere"}, "kubeconfig /nowhere does not exist"),
        ({"KUBECONFIG": "/dev/null"}, "/dev/null"),
    ],
)
def test_no_usable_kubeconfig(
    database_url: str, nats_server: Nats, variables: dict[str, str], expected: str
) -> None:
    given = pipeline.config(database_url, nats_server)
    code, _, lines = run(given, "spur-events", "run", "apply", **variables)
    told = one_line(lines)
    assert code == 1
    assert expected in told
    assert "KUBECONFIG" in told


@pytest.mark.parametrize("words", [("db", "migrate"), ("run", "relay"), ("run", "apply"), ("run", "all")])
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SPUR_EVENTS_NATS_PARTITIONS", "many"),
        ("SPUR_EVENTS_NATS_ADDRESS", "x"),
        ("SPUR_EVENTS_KUBERNETES_CLUSTER", "West Side"),
        ("SPUR_EVENTS_CONFIG", "/nowhere.toml"),
    ],
)
def test_bad_settings(words: tuple[str, ...], variable: str, value: str) -> None:
    code, out, lines = run(None, "spur-events", *words, **{variable: value})
    assert (code, out) == (1, "")
    assert variable in one_line(lines)


def test_a_migrated_database_is_told_so(database_url: str, nats_server: Nats) -> None:
    code, out, lines = run(pipeline.config(database_url, nats_server), "spur-events", "db", "migrate")
    assert (code, out, lines) == (0, "nothing to do: the database is up to date\n", [])
