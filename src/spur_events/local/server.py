"""The shape that all servers here have, and what those of one process and one port share.

The supervisor and the tests know servers by `Server`; `postgres` and `nats` build on `SingleServer`.
"""

import abc
import signal
from pathlib import Path
from typing import ClassVar, Protocol

from spur_events import errors
from spur_events.local import child
from spur_events.local import folder as folders

_PORT_ATTEMPTS = 5


class Server(Protocol):
    """What can be started, stopped, killed and started again with its data and address kept."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def log(self) -> Path:
        """Where its output goes."""

    @property
    def pid(self) -> int | None:
        """The pid while it runs whole."""

    def start(self) -> None:
        """Start, or resume after any kind of end; returns when ready."""

    def stop(self) -> None:
        """Stop gracefully, by force after some seconds."""

    def kill(self) -> None:
        """End it by SIGKILL, also what a killed parent left behind."""

    def running(self) -> list[str]:
        """Names of its processes that run, for messages."""


class SingleServer(abc.ABC):
    """A server of one process that listens on one loopback port, chosen at the first start."""

    name: ClassVar[str]
    start_timeout_s = 60.0
    stop_timeout_s = 15.0
    stop_signal = signal.SIGTERM

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / f"{self.name}.log"
        self.child = child.Child(folder, self.name)
        self._port_file = folder / "port"
        self._password_file = folder / "password"

    @property
    def pid(self) -> int | None:
        """The pid while it runs."""
        return self.child.pid

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; the same after each restart."""
        return folders.port(self._port_file)

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    @property
    def password(self) -> str:
        """Password of the server's only user, who may do everything."""
        return folders.secret(self._password_file)

    def start(self) -> None:
        """Start, or resume after any kind of end; returns when clients are answered.

        Raises:
            PermanentError: if it ends instead, with the end of its log.
            TimedOutError: if it does not answer in time, likewise.
        """
        folders.make_private(self.folder)
        if self.child.is_own and self.is_ready():
            return
        self.kill()  # also what another process left behind: it may be about to end
        self.prepare()
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            new_port = not self._port_file.exists()
            self.spawn()
            try:
                self.child.wait_ready(self.is_ready, self.start_timeout_s)
            except errors.SpurEventsError:
                taken = self.pid is None and not folders.is_free(self.port)
                self.kill()
                if not (taken and new_port) or attempt == _PORT_ATTEMPTS:
                    raise
                self._port_file.unlink()  # somebody was faster; nobody knows this address yet
            except BaseException:
                self.kill()  # Ctrl-C while waiting
                raise
            else:
                return

    def stop(self) -> None:
        """Stop gracefully, by force after some seconds."""
        self.child.stop(self.stop_signal, self.stop_timeout_s)

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self.child.kill()

    def running(self) -> list[str]:
        """Its name, if it runs."""
        return [self.name] if self.pid is not None else []

    @abc.abstractmethod
    def prepare(self) -> None:
        """Make what the process needs before its first start."""

    @abc.abstractmethod
    def spawn(self) -> None:
        """Start the process."""

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Tell whether our process answers clients."""
