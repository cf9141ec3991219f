"""The services as processes of their own, started by the console script, for tests that kill or stop them."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import SecretStr

from spur_events import settings

SCRIPTS = Path(sys.executable).parent


def environment(given: settings.Settings) -> dict[str, str]:
    """Return the environment that gives a process these settings, and none of the caller's own."""
    found = {
        key: value for key, value in os.environ.items() if not key.startswith(("SPUR_EVENTS_", "KUBECONFIG"))
    }
    for group in given.model_fields_set:
        values = getattr(given, group)
        for field in values.model_fields_set:
            value = getattr(values, field)
            text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
            found[f"SPUR_EVENTS_{group}_{field}".upper()] = text
    return found


class Service:
    """One `spur-events run PART`; killed when the block ends."""

    def __init__(self, part: str, given: settings.Settings, log: Path) -> None:
        self._command = [str(SCRIPTS / "spur-events"), "run", part]
        self._environment = environment(given)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if error is not None and self._log.exists():
            error.add_note(f"end of {self._log.name}:\n{self._log.read_text(errors='replace')[-3000:]}")

    def start(self) -> None:
        """Start it; it is not waited for."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)

    def kill(self) -> None:
        """End it by SIGKILL, also when it is stopped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def running(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process is not None and self._process.poll() is None

    def pause(self) -> None:
        """Freeze it (SIGSTOP), as a machine that swaps or a virtual machine that is moved does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on from where it was."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
