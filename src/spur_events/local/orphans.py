"""Ends processes that sit in a folder and run a program: backends that outlived their PostgreSQL.

Used by postgres.py; where root may not look into another user's processes (a container without SYS_PTRACE), it
runs this file as that user: `python orphans.py FOLDER PROGRAM`. It imports nothing of ours.
"""

import os
import select
import signal
import sys
from pathlib import Path

_WAIT_S = 10


def end(folder: Path, program: Path) -> bool:
    """Kill them and wait until they are gone; False if some processes could not be looked at.

    Working folder and program together prove that a process belongs to the server with this data folder.
    """
    all_seen = True
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            ours = (entry / "cwd").samefile(folder) and (entry / "exe").samefile(program)
        except PermissionError:
            all_seen = False
            continue
        except OSError:  # ended meanwhile
            continue
        if ours:
            _kill(int(entry.name))
    return all_seen


def _kill(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    poller.poll(_WAIT_S * 1000)
    os.close(handle)


if __name__ == "__main__":
    end(Path(sys.argv[1]), Path(sys.argv[2]))
