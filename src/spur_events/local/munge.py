"""A munged of our own, from the Debian package `munge`, with its own key and socket.

The tests start it, as root or not; a site has its own already. What credentials mean is the business of
spur_events.munge and consumers.auth.
"""

import os
import secrets
import shutil
import signal
import subprocess
from pathlib import Path

from spur_events import errors
from spur_events.local import child

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_KEY_BYTES = 128


def binary() -> Path:
    """Return the daemon's program.

    Raises:
        MisconfiguredError: if it is nowhere.
    """
    found = shutil.which("munged", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))
    if found is None:
        raise errors.MisconfiguredError(
            "munged is not installed: run scripts/setup, or install the package 'munge'"
        )
    return Path(found)


class Munge:
    """One munged. Everybody may reach its socket if everybody may enter the folder above."""

    name = "munged"

    def __init__(self, folder: Path, *, key: Path | None = None) -> None:
        """`key` is another one's key file, for two that trust each other."""
        self.folder = folder
        self.socket = folder / "socket"
        self.key = key or folder / "key"
        self._child = child.Child(folder, self.name)

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self._child.log

    @property
    def pid(self) -> int | None:
        """The pid while it runs."""
        return self._child.pid

    def start(self) -> None:
        """Start it; returns when it answers.

        Raises:
            PermanentError: if it ends instead.
        """
        self.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        if not self.key.exists():
            self.key.touch(0o600)
            self.key.write_bytes(secrets.token_bytes(_KEY_BYTES))
        command: list[str | Path] = [
            *(binary(), "--foreground"),
            # It otherwise refuses folders that others may write, as /tmp is.
            "--force",
            *(f"--key-file={self.key}", f"--socket={self.socket}"),
            *(f"--pid-file={self.folder / 'pid'}", f"--seed-file={self.folder / 'seed'}"),
        ]
        self._child.spawn(command, death_signal=signal.SIGKILL, cwd=self.folder)
        self._child.wait_ready(self._answers, _START_TIMEOUT_S)

    def stop(self) -> None:
        """Stop it gracefully, by force after some seconds."""
        self._child.stop(signal.SIGTERM, _STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._child.kill()

    def running(self) -> list[str]:
        """Its name, if it runs."""
        return [self.name] if self.pid is not None else []

    def _answers(self) -> bool:
        if not self.socket.exists():
            return False
        asked = subprocess.run(
            ["munge", "--no-input", f"--socket={self.socket}", "--output=/dev/null"],
            capture_output=True,
            check=False,
        )
        return asked.returncode == 0
