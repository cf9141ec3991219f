"""Runs work in a process of its own session, and passes its reports on until the work says that it is ready.

Used by the supervisor for `up --detach`.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from spur_events import errors
from spur_events.local import child, console

#: Takes where to report, and what to call when ready.
Work = Callable[[console.Report, Callable[[], None]], None]

_STOP_TIMEOUT_S = 60.0
_LINE, _READY, _FAILED = "line", "ready", "failed"


def run(work: Work, log: Path, report: console.Report) -> None:
    """Start the work; returns when it is ready. There must be no other thread (this forks).

    Raises:
        SpurEventsError: what the work raised before it was ready.
        PermanentError: it ended otherwise; with the end of its log.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _be_detached(work, log, writing)
    os.close(writing)
    try:
        with os.fdopen(reading) as stream:
            for text in stream:
                kind, line, number = json.loads(text)
                if kind == _READY:
                    return
                if kind == _FAILED:
                    error = errors.SpurEventsError(line)
                    error.exit_code = int(number)
                    raise error
                report(line, number)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        child.wait_gone(pid, _STOP_TIMEOUT_S)
        raise
    end = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    raise errors.PermanentError(f"it ended before it was ready; see {log}, which ends with:\n{end}")


class _Caller:
    """The process that waits for us, until it is told that we are ready or is gone."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe

    def send(self, kind: str, line: str, number: float | None = None) -> None:
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, (json.dumps([kind, line, number]) + "\n").encode())
        except OSError:
            self.release()

    def release(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
        self._pipe = None


def _be_detached(work: Work, log: Path, writing: int) -> NoReturn:
    """Be the new process: never return to the caller's code."""
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        to_log = console.Console(sys.stderr)
        caller = _Caller(writing)

        def report(line: str, share: float | None = None) -> None:
            to_log(line, share)
            caller.send(_LINE, line, share)

        def ready() -> None:
            caller.send(_READY, "")
            caller.release()

        try:
            work(report, ready)
            code = 0
        except errors.SpurEventsError as error:
            to_log(f"spur-events: {error}")
            caller.send(_FAILED, str(error), error.exit_code)
            code = error.exit_code
        except BaseException:  # noqa: BLE001 - the traceback goes to the log, whose end the caller shows
            sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
