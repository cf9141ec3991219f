"""What every server keeps in its folder: a loopback port, secrets, private files.

Used by the servers of this package; knows nothing about any of them.
"""

import random
import secrets
import socket
from pathlib import Path

from spur_events import errors, private

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 15000

make_private = private.make_folder
write_private = private.write


def secret(path: Path) -> str:
    """Return the secret in the file, made at the first call."""
    if not path.exists():
        write_private(path, secrets.token_urlsafe(24) + "\n")
    return path.read_text().strip()


def port(path: Path) -> int:
    """Return the port in the file; chosen at the first call, so that a restart has the same address."""
    if not path.exists():
        write_private(path, f"{free_port()}\n")
    return int(path.read_text())


def free_port() -> int:
    """Return a free loopback port below the range that the kernel gives to outgoing connections.

    A port in that range can be taken while its server is down, even by a client that tries to reach it
    (TCP lets a socket connect to itself), and then the server cannot come back.
    """
    try:
        highest = int(_PORT_RANGE.read_text().split()[0]) - 1
    except (OSError, ValueError):
        highest = 32767
    if highest - _LOWEST_PORT < 1000:  # noqa: PLR2004 - too few to choose from: take any unprivileged one
        return random.randint(1024, 65535)  # noqa: S311
    for _ in range(200):
        candidate = random.randint(_LOWEST_PORT, highest)  # noqa: S311 - not a secret
        if is_free(candidate):
            return candidate
    raise errors.TemporaryError("no free port on 127.0.0.1: stop some servers and try again")


def is_free(candidate: int) -> bool:
    """Tell whether a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", candidate))
        except OSError:
            return False
        return True
