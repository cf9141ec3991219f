"""`up`, `env` and `down` with a service that does nothing: ready, resumed, killed, stopped, side by side."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spur_events import errors, settings
from spur_events import postgres as border
from spur_events.local import child, supervisor
from spur_events.local.state import State

_UP = """
import asyncio, os, sys
from pathlib import Path
from spur_events import errors, settings
from spur_events.local import supervisor
from spur_events.producers import migrate as migration

async def run_services(variables, ready):
    if os.environ.get("FAIL") == "services":
        raise errors.MisconfiguredError("the services do not like it here")
    ready()
    await asyncio.Event().wait()

def migrate(variables):
    assert os.environ["SPUR_EVENTS_DATABASE_URL"] == variables["SPUR_EVENTS_DATABASE_URL"]
    if os.environ.get("FAIL") == "migrate":
        raise RuntimeError("a bug")
    migration.migrate(settings.load().database)

folder, detach, kubeconfig = sys.argv[1:]
try:
    supervisor.up(Path(folder), detach=bool(detach), kubeconfig=Path(kubeconfig) if kubeconfig else None,
                  migrate=migrate, run_services=run_services)
except errors.SpurEventsError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def _until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


class Up:
    """Calls `up` in a process, with a given cluster unless `own_cluster`."""

    def __init__(self, tmp_path: Path) -> None:
        self._kubeconfig = tmp_path / "kubeconfig"
        self._kubeconfig.touch()
        self.folders: set[Path] = set()

    def command(self, folder: Path, *, detach: bool, own_cluster: bool) -> list[str | Path]:
        self.folders.add(folder)
        kubeconfig = "" if own_cluster else self._kubeconfig
        return [sys.executable, "-W", "error", "-c", _UP, folder, "1" if detach else "", kubeconfig]

    def __call__(
        self, folder: Path, *, own_cluster: bool = False, fail: str = ""
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(folder, detach=True, own_cluster=own_cluster),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "FAIL": fail},
        )

    def ok(self, folder: Path, **options: Any) -> str:
        done = self(folder, **options)
        assert done.returncode == 0, done.stderr
        return done.stderr


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    made = Up(tmp_path)
    yield made
    for folder in made.folders:
        supervisor.down(folder)


def _pids(folder: Path) -> dict[str, int]:
    postgres, nats, plane = State(folder).servers()
    assert plane is not None
    parts = (postgres.child, nats.child, plane.etcd, plane.api_server, plane.controller_manager)
    return {part.name: part.pid for part in parts if part.pid is not None}


def _execute(folder: Path, statement: str) -> list[dict[str, Any]]:
    url = supervisor.environment(folder)["SPUR_EVENTS_DATABASE_URL"]
    with border.connect(settings.Database.model_validate({"url": url})) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def test_the_whole_life_with_a_control_plane(up: Up, tmp_path: Path) -> None:
    folder = tmp_path / "with 'blanks'"
    said = up.ok(folder, own_cluster=True)
    assert "everything is ready" in said
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "env.json").stat().st_mode & 0o777 == 0o600
    variables = supervisor.environment(folder)
    shown = subprocess.run(
        ["sh", "-c", f'{supervisor.shell_exports(variables)}\ncat "$KUBECONFIG"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout)["kind"] == "Config"
    assert set(variables) == {
        "SPUR_EVENTS_DATABASE_URL",
        "SPUR_EVENTS_NATS_URL",
        "SPUR_EVENTS_NATS_CREDENTIALS",
        "KUBECONFIG",
        "SPUR_EVENTS_STATE_DIR",
    }
    assert len(_pids(folder)) == 5
    assert "already running" in up.ok(folder, own_cluster=True)

    stopped = supervisor.down(folder)
    assert "stopped everything" in stopped[0]
    assert _pids(folder) == {}
    assert "nothing runs" in supervisor.down(folder)[0]
    with pytest.raises(errors.MisconfiguredError, match=r"spur-events up --detach --state-dir '.*blanks"):
        supervisor.environment(folder)

    up.ok(folder, own_cluster=True)
    assert supervisor.environment(folder) == variables


def test_after_kill_9_of_the_supervisor_up_resumes_with_the_data(up: Up, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    up.ok(folder)
    _execute(folder, "CREATE TABLE kept ()")
    before = _pids(folder)
    supervisor_pid = State(folder).supervisor.read()
    assert supervisor_pid is not None
    os.kill(supervisor_pid, signal.SIGKILL)
    up.ok(folder)  # at once, while the servers may still be ending
    assert not set(before.values()) & set(_pids(folder).values())
    assert _execute(folder, "SELECT count(*) AS n FROM kept") == [{"n": 0}]


def test_a_server_that_dies_is_started_again(up: Up, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    up.ok(folder)
    before = _pids(folder)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    _until(
        lambda: set(_pids(folder)) == set(before) and not set(before.values()) & set(_pids(folder).values())
    )
    _until(lambda: (folder / "up.log").read_text().count("runs again") == len(before))
    assert _execute(folder, "SELECT 1 AS one") == [{"one": 1}]
    supervisor.down(folder)
    assert _pids(folder) == {}


def test_two_folders_side_by_side(up: Up, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    up.ok(one)
    up.ok(other)
    urls = {supervisor.environment(folder)["SPUR_EVENTS_NATS_URL"] for folder in (one, other)}
    assert len(urls) == 2
    supervisor.down(one)
    assert _pids(one) == {}
    assert len(_pids(other)) == 2


def test_in_the_foreground_a_signal_stops_everything(up: Up, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with subprocess.Popen(
        up.command(folder, detach=False, own_cluster=False), stderr=subprocess.PIPE, text=True
    ) as running:
        _until(lambda: State(folder).variables() is not None)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
    assert running.returncode == 0, said
    assert "stopping nats-server" in said
    assert _pids(folder) == {}


@pytest.mark.parametrize(("fail", "message"), [("services", "do not like it"), ("migrate", "a bug")])
def test_what_fails_is_told_and_everything_stops(up: Up, tmp_path: Path, fail: str, message: str) -> None:
    folder = tmp_path / "state"
    done = up(folder, fail=fail)
    assert done.returncode == 1
    assert message in done.stderr
    _until(lambda: _pids(folder) == {})
    assert State(folder).variables() is None


def test_down_ends_what_a_killed_supervisor_left(up: Up, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    up.ok(folder)
    pid = State(folder).supervisor.read()
    assert pid is not None
    nats = _pids(folder)["nats-server"]
    os.kill(nats, signal.SIGSTOP)  # it cannot follow its parent
    os.kill(pid, signal.SIGKILL)
    _until(lambda: child.identity(pid) is None)
    assert any("left running" in line for line in supervisor.down(folder))
    assert child.identity(nats) is None


def test_use_takes_the_named_folder_and_leaves_a_set_environment_alone(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    for name in supervisor_variables():
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    up.ok(folder)
    monkeypatch.setenv("SPUR_EVENTS_NATS_URL", "nats://elsewhere:4222")
    supervisor.use(None)
    assert os.environ["SPUR_EVENTS_NATS_URL"] == "nats://elsewhere:4222"
    supervisor.use(folder)
    assert os.environ["SPUR_EVENTS_NATS_URL"] == supervisor.environment(folder)["SPUR_EVENTS_NATS_URL"]
    with pytest.raises(errors.MisconfiguredError, match="nothing runs in"):
        supervisor.use(tmp_path / "other")


def supervisor_variables() -> tuple[str, ...]:
    names = ("DATABASE_URL", "NATS_URL", "NATS_CREDENTIALS", "STATE_DIR", "CONFIG")
    return (*(f"SPUR_EVENTS_{name}" for name in names), "KUBECONFIG")


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def never(_variables: dict[str, str], _ready: Callable[[], None]) -> None:
        raise AssertionError

    with pytest.raises(errors.MisconfiguredError, match=r"file/state.*--state-dir"):
        supervisor.up(tmp_path / "file" / "state", migrate=dict, run_services=never)
