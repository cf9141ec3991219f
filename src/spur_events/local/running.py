"""The servers of one `up` while it lasts: started in order, restarted when one dies, stopped in reverse.

Used by the supervisor, which runs the services beside it.
"""

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from spur_events import errors
from spur_events.local import console, server

_LOOK_S = 0.3
_BACKOFF_MIN_S, _BACKOFF_MAX_S = 0.5, 30.0
_STEADY_S = 60.0  # who ran this long is restarted at once again


class Running:
    """Context manager: inside, the servers run."""

    def __init__(self, servers: Sequence[server.Server], report: console.Report) -> None:
        self._servers = tuple(servers)
        self._report = report
        self._busy = threading.Lock()  # held while a server is being restarted, and for the stop
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch servers", daemon=True)

    def __enter__(self) -> Self:
        """Start them; what was started is stopped again if one fails."""
        try:
            for made in self._servers:
                self._report(f"starting {made.name}")
                made.start()
        except BaseException:
            self._stop()
            raise
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop them."""
        self._stopping.set()
        with self._busy:
            self._stop()
        self._stopped.set()
        self._watcher.join()

    def _stop(self) -> None:
        for made in reversed(self._servers):
            if made.running():
                self._report(f"stopping {made.name}")
            made.stop()

    def _watch(self) -> None:
        delays = dict.fromkeys(self._servers, 0.0)
        due = dict.fromkeys(self._servers, 0.0)
        while not self._stopping.wait(_LOOK_S):
            for made in self._servers:
                if made.pid is not None:
                    if time.monotonic() > due[made] + _STEADY_S:
                        delays[made] = 0.0
                elif time.monotonic() >= due[made]:
                    self._restart(made)
                    delays[made] = min(max(2 * delays[made], _BACKOFF_MIN_S), _BACKOFF_MAX_S)
                    due[made] = time.monotonic() + delays[made]
        # Linux ends the servers that this thread started together with it: it must be the last to go.
        self._stopped.wait()

    def _restart(self, made: server.Server) -> None:
        with self._busy:
            if self._stopping.is_set():
                return
            self._report(f"{made.name} ended by itself; starting it again (its log: {made.log})")
            try:
                made.start()
            except errors.SpurEventsError as error:
                self._report(f"{made.name} does not start: {error}")
            except OSError as error:
                self._report(f"{made.name} does not start: {error}")
            else:
                self._report(f"{made.name} runs again")
