"""How long steps report: lines, and a share done, shown as suits a terminal or a log.

Used by whatever takes long in this package; the supervisor passes reports on from a detached process.
"""

import sys
import time
from typing import Protocol, TextIO

_STEP_SHARE, _STEP_S = 0.1, 30.0


class Report(Protocol):
    """Takes one line; with `share` (0 to 1) it is progress, and replaces the line before."""

    def __call__(self, line: str, share: float | None = None) -> None:
        """Show it."""


class Console:
    """Writes reports to a stream: progress on one rewritten line of a terminal, or now and then in a log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._open_line = False
        self._share, self._at_s = 0.0, 0.0

    def __call__(self, line: str, share: float | None = None) -> None:
        """Show one line."""
        if share is None:
            self._write(("\n" if self._open_line else "") + f"{line}\n")
            self._open_line = False
            self._share, self._at_s = 0.0, time.monotonic()
        elif self._stream.isatty():
            self._write(f"\r{line}")
            self._open_line = True
        elif share >= self._share + _STEP_SHARE or time.monotonic() >= self._at_s + _STEP_S:
            self._write(f"{line}\n")
            self._share, self._at_s = share, time.monotonic()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def on_stderr(line: str, share: float | None = None) -> None:
    """Report to standard error: what functions here do unless given another way."""
    global _stderr  # noqa: PLW0603 - it knows whether a line is open
    if _stderr is None:
        _stderr = Console(sys.stderr)
    _stderr(line, share)


_stderr: Console | None = None
