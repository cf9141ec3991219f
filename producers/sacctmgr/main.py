"""Entry point of the console script `sacctmgr`: words in, exit code out, one line for every error.

0 done, 1 failed, 2 wrong usage. SPUR_EVENTS_DEBUG=1 shows the traceback of an error that we did not expect.
"""

import os
import sys
from collections.abc import Sequence

from spur_events import errors
from spur_events.producers.sacctmgr import commands, grammar, usage

DEBUG_VARIABLE = "SPUR_EVENTS_DEBUG"
_INTERRUPTED = 130  # as a shell reports a command that SIGINT ended


def main() -> None:
    """Run the command line of this process and end it."""
    # A name from another program may not fit the terminal's encoding: show it escaped rather than fail.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; errors go to standard error."""
    try:
        return _dispatch(arguments)
    except errors.SpurEventsError as error:
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _failed("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing more can be said to it, not even by the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        return _failed(
            f"unexpected {type(error).__name__}: {error}; {DEBUG_VARIABLE}=1 shows where, please report it", 1
        )


def _dispatch(arguments: Sequence[str]) -> int:
    options, command = grammar.parse(arguments)
    if isinstance(command, commands.Help):
        sys.stdout.write(usage.TEXT)
        return 0
    if isinstance(command, commands.Version):
        sys.stdout.write(f"sacctmgr (spur-events) {_version()}\n")
        return 0
    # Only now: typing errors and help need neither the database driver nor the settings.
    from spur_events.producers.sacctmgr import actions  # noqa: PLC0415

    return actions.run(command, options)


def _failed(message: str, exit_code: int) -> int:
    sys.stderr.write(f"sacctmgr: {' '.join(message.splitlines())}\n")
    return exit_code


def _version() -> str:
    from importlib import metadata  # noqa: PLC0415 - only here, and not cheap

    return metadata.version("spur-events")
