"""The state folder of one `up`: where it is, who runs in it, and the variables that reach its servers.

Used by the supervisor. Several folders, and so several installations, may exist side by side.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from spur_events import errors
from spur_events.local import child, console, controlplane, nats, postgres, server
from spur_events.local import folder as folders

VARIABLE = "SPUR_EVENTS_STATE_DIR"
DATABASE = "spur"


def folder_of(given: Path | None) -> Path:
    """Return the state folder: the given one, else SPUR_EVENTS_STATE_DIR, else below XDG_STATE_HOME."""
    named = given or os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "spur-events"


class State:
    """One state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "up.log"
        self.supervisor = child.PidFile(folder / "supervisor.pid")
        self._env_file = folder / "env.json"

    def create(self) -> None:
        """Make the folder, private to its owner.

        Raises:
            MisconfiguredError: if that is not possible.
        """
        try:
            folders.make_private(self.folder)
            self.folder.chmod(0o700)
        except OSError as error:
            raise errors.MisconfiguredError(
                f"state folder {self.folder}: {error.strerror}; choose another with --state-dir or {VARIABLE}"
            ) from error

    @contextlib.contextmanager
    def claimed(self) -> Iterator[bool]:
        """Hold the folder for a block; yields False if another process holds it."""
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def variables(self) -> dict[str, str] | None:
        """Return the variables, if everything is up."""
        if self.supervisor.read() is None:
            return None
        try:
            content: dict[str, str] = json.loads(self._env_file.read_text())
        except (OSError, ValueError):
            return None
        return content

    def publish(self, variables: dict[str, str]) -> None:
        """Say that everything is up, and how to reach it."""
        folders.write_private(self._env_file, json.dumps(variables, indent=2) + "\n")

    def withdraw(self) -> None:
        """Say that it is not up (any more)."""
        self._env_file.unlink(missing_ok=True)

    def servers(
        self, kubeconfig: Path | None = None, report: console.Report = console.on_stderr
    ) -> tuple[postgres.Postgres, nats.Nats, controlplane.ControlPlane | None]:
        """Return this folder's servers, in the order to start them; no control plane with a `kubeconfig`."""
        return (
            postgres.Postgres(self.folder / "postgres"),
            nats.Nats(self.folder / "nats"),
            None if kubeconfig else controlplane.ControlPlane(self.folder / "controlplane", report=report),
        )

    def leftovers(self) -> list[server.Server]:
        """Return servers that still run although their supervisor does not."""
        return [made for made in self.servers() if made is not None and made.running()]
