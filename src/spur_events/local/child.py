"""One server process: started by us, known by pid and start time, ended when its parent ends.

Used by the servers of this package and by the supervisor. Works also from a process that is not the parent
(`down`, or the next `up` after a kill -9): the pid file says which process is ours, and the start time that
it is still the same one, so that nothing else is ever signalled.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spur_events import errors
from spur_events.local import folder as folders

_LAUNCHER = Path(__file__).with_name("launcher.py")
_LOG_LIMIT_BYTES = 20_000_000
_POLL_S = 0.02
_KILL_WAIT_S = 10.0


def identity(pid: int) -> str | None:
    """Return what tells this process from every other that had or will have its pid; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold blanks and brackets
    state, started = fields[0], fields[19]
    return None if state in "ZX" else f"{pid} {started} {boot}"


class PidFile:
    """A file that names a process beyond doubt."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, pid: int) -> None:
        """Record a running process."""
        folders.write_private(self.path, f"{identity(pid) or ''}\n")

    def read(self) -> int | None:
        """Return the pid, if that very process still runs."""
        try:
            recorded = self.path.read_text().strip()
        except OSError:
            return None
        first = recorded.partition(" ")[0]
        return int(first) if first.isdigit() and identity(int(first)) == recorded else None

    def clear(self) -> None:
        """Forget the process."""
        self.path.unlink(missing_ok=True)


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Wait until a process has ended (it may be nobody's child of ours); tell whether it did."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        return bool(poller.poll(int(timeout_s * 1000)))
    finally:
        os.close(handle)


def launch(
    command: Sequence[str | Path], *, death_signal: signal.Signals, user: str = ""
) -> list[str | Path]:
    """Return the command that becomes `command` as `user` and gets `death_signal` when our thread ends."""
    launcher: list[str | Path] = [sys.executable, "-I", "-S", _LAUNCHER]
    return [*launcher, str(os.getpid()), str(int(death_signal)), user, "--", *command]


class Child:
    """A server process with its pid file and log in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._pid_file = PidFile(folder / f"{name}.pid")
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The pid while the process runs."""
        if self._popen is not None and self._popen.poll() is not None:
            self._popen = None  # reaped; its pid may belong to another process by now
        return self._pid_file.read()

    @property
    def is_own(self) -> bool:
        """Whether it runs and this object started it."""
        return self.pid is not None and self._popen is not None

    def spawn(
        self,
        command: Sequence[str | Path],
        *,
        death_signal: signal.Signals,
        user: str = "",
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start the command, its output appended to the log.

        It receives `death_signal` when the calling thread ends: call it from one that lives as long as the
        server shall. `user` is whom to run as; needs root.
        """
        if self.log.exists() and self.log.stat().st_size > _LOG_LIMIT_BYTES:
            self.log.replace(self.log.with_suffix(".log.old"))
        with self.log.open("ab") as output:
            self.log.chmod(0o600)
            self._popen = subprocess.Popen(
                launch(command, death_signal=death_signal, user=user),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=cwd,
                start_new_session=True,  # a Ctrl-C is for the supervisor, which stops all in order
            )
        self._pid_file.write(self._popen.pid)

    def wait_ready(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll until ready.

        Raises:
            PermanentError: if the process ended instead; with the end of its log.
            TimedOutError: if it is not ready in time; likewise.
        """
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if self.pid is None:
                raise errors.PermanentError(f"{self.name} ended while starting: {self.log_end()}")
            if time.monotonic() > deadline:
                raise errors.TimedOutError(
                    f"{self.name} is not ready after {timeout_s:.0f} s: {self.log_end()}"
                )
            time.sleep(_POLL_S)

    def stop(self, stop_signal: signal.Signals, timeout_s: float) -> None:
        """End the process gracefully, or by SIGKILL after `timeout_s`. Nothing running is fine."""
        pid = self.pid
        if pid is not None:
            self._signal(pid, stop_signal)
            if not wait_gone(pid, timeout_s):
                self._signal(pid, signal.SIGKILL)
                wait_gone(pid, _KILL_WAIT_S)
        self._forget()

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self.stop(signal.SIGKILL, _KILL_WAIT_S)

    def log_end(self, lines: int = 5) -> str:
        """Return where the log is and its last lines, for a message."""
        try:
            text = self.log.read_bytes()[-8000:].decode(errors="replace")
        except OSError:
            text = ""
        last = "\n".join(line for line in text.splitlines()[-lines:] if line.strip())
        return f"see {self.log}" + (f", which ends with:\n{last}" if last else "")

    def _signal(self, pid: int, which: signal.Signals) -> None:
        try:
            os.kill(pid, which)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise errors.PermanentError(
                f"{self.name} (pid {pid}) belongs to another user: stop it as that user"
            ) from error

    def _forget(self) -> None:
        if self._popen is not None:
            self._popen.wait()
            self._popen = None
        self._pid_file.clear()
