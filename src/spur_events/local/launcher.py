"""Become a server process: drop root where asked, die with the parent, then exec the command.

Run as `python -I -S launcher.py PARENT SIGNAL USER -- COMMAND...` (see `child.launch`); it imports nothing of
ours. A program of its own instead of `preexec_fn`, which may deadlock in a process that has threads.
"""

import ctypes
import os
import pwd
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP = 28, 1 << 2
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int, other: int = 0) -> bool:
    zero = ctypes.c_ulong(0)
    return bool(
        _libc.prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(other), zero, zero) == 0,
    )


def _capset(mask: int) -> bool:
    """Make these capabilities permitted, effective and inheritable, and drop all others."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    return bool(_libc.capset(header, data) == 0)


def _become(user: str) -> None:
    """Run as `user`, who keeps the right to reach folders below a private home (of root, mode 0700).

    The other way, opening those folders to everybody, would change what does not belong to us. Without the
    capability (a container may lack it) the command still works where its folders are open.
    """
    entry = pwd.getpwnam(user)
    _prctl(_PR_SET_KEEPCAPS, 1)
    # Without it access(2) ignores the capability, and initdb asks access(2) whether its programs are there.
    _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP)
    os.setgroups([])
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    for capability in (_CAP_DAC_READ_SEARCH, _CAP_DAC_OVERRIDE):
        if _capset(1 << capability):
            _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)
            return
    _capset(0)


def main() -> None:
    """Read the arguments and exec; ends with 127 where that fails, the reason on standard error."""
    parent, death_signal, user, _, *command = sys.argv[1:]
    if user:
        _become(user)
    # After the change of user, which clears it. Linux sends it when the thread that started us ends.
    _prctl(_PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != int(parent):
        sys.exit("the parent ended first")
    try:
        os.execv(command[0], command)  # noqa: S606 - that is the purpose
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(127)


if __name__ == "__main__":
    main()
