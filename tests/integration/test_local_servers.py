"""Embedded PostgreSQL and NATS: they come back with their data, and end with their parent."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nats
import pytest
from nats.aio import client

from spur_events import postgres as border
from spur_events import settings
from spur_events.local import child
from spur_events.local.nats import Nats
from spur_events.local.postgres import Postgres

_PARENT = """
import sys, time
from pathlib import Path
from spur_events.local import {module} as module
server = module.{name}(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def _until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def _database(server: Postgres) -> settings.Database:
    return settings.Database.model_validate({"url": server.url})


def test_postgres_keeps_data_and_address_over_kill_and_stop(postgres_server: Postgres) -> None:
    url = postgres_server.url
    with border.connect(_database(postgres_server)) as connection:
        connection.execute("CREATE TABLE kept (n int)")
    for n, end in enumerate((postgres_server.kill, postgres_server.stop)):
        with border.connect(_database(postgres_server)) as connection:
            connection.execute("INSERT INTO kept VALUES (%s)", [n])
        end()
        assert postgres_server.pid is None
        postgres_server.start()
    assert postgres_server.url == url
    with border.connect(_database(postgres_server)) as connection:
        assert [row["n"] for row in connection.execute("SELECT n FROM kept ORDER BY n")] == [0, 1]


def test_postgres_starts_although_backends_outlived_the_postmaster(postgres_server: Postgres) -> None:
    assert postgres_server.pid is not None
    with border.connect(_database(postgres_server)) as connection:
        row = connection.execute("SELECT pg_backend_pid() AS pid").fetchone()
        assert row is not None
        os.kill(row["pid"], signal.SIGSTOP)  # it cannot notice that the postmaster is gone
        postmaster = postgres_server.pid
        os.kill(postmaster, signal.SIGKILL)
        _until(lambda: child.identity(postmaster) is None)
        postgres_server.start()
        assert child.identity(row["pid"]) is None
    with border.connect(_database(postgres_server)) as connection:
        connection.execute("SELECT 1")


def test_servers_listen_on_loopback_only_and_ask_for_a_password(
    postgres_server: Postgres, nats_server: Nats
) -> None:
    anonymous = postgres_server.url.replace(postgres_server.password, "wrong")
    with (
        pytest.raises(Exception, match="password"),
        border.connect(settings.Database.model_validate({"url": anonymous})),
    ):
        pass
    for server in (postgres_server, nats_server):
        listening = [
            line.split()[1]
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            if line.split()[1].endswith(f":{server.port:04X}") and line.split()[3] == "0A"
        ]
        assert listening == [f"0100007F:{server.port:04X}"]
        assert server.log.stat().st_mode & 0o077 == 0
    secrets = [
        postgres_server.folder / "password",
        *nats_server.folder.rglob("*.nk"),
        *nats_server.folder.rglob("*.creds"),
    ]
    assert len(secrets) > 20
    for path in secrets:
        assert path.stat().st_mode & 0o077 == 0, path


async def test_nats_keeps_streams_over_kill(nats_server: Nats, tmp_path: Path) -> None:
    async def connect() -> client.Client:
        return await nats.connect(nats_server.url, user_credentials=str(mine))

    mine = tmp_path / "test.creds"
    mine.write_text(nats_server.site.pipeline_user("test"), "ascii")

    connected = await connect()
    await connected.jetstream().add_stream(name="KEPT", subjects=["kept"])
    await connected.jetstream().publish("kept", b"1")
    await connected.close()
    nats_server.kill()
    nats_server.start()
    connected = await connect()
    assert (await connected.jetstream().stream_info("KEPT")).state.messages == 1
    await connected.close()


@pytest.mark.parametrize(("module", "name"), [("postgres", "Postgres"), ("nats", "Nats")])
def test_a_killed_parent_takes_its_server_along_and_the_next_start_works(
    module: str, name: str, tmp_path: Path
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT.format(module=module, name=name), tmp_path / "state"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    _until(lambda: child.identity(pid) is None)
    server = Postgres(tmp_path / "state") if name == "Postgres" else Nats(tmp_path / "state")
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port)):
            pass
    finally:
        server.stop()


def test_a_foreign_process_with_a_recorded_pid_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as foreign:
        recorded = child.identity(foreign.pid)
        assert recorded is not None
        pid, started, boot = recorded.split()
        (tmp_path / "nats-server.pid").write_text(f"{pid} {int(started) - 1} {boot}\n")
        server = Nats(tmp_path)
        assert server.pid is None
        server.kill()
        assert foreign.poll() is None
        foreign.kill()
