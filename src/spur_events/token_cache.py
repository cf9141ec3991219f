"""Tokens that `spur-events credential` fetched, kept between two calls of kubectl; only their owner can read them.

One file for each cluster, account, user and NATS address, in $XDG_CACHE_HOME/spur-events/tokens. A file that somebody
else could have written or read, or that is damaged, counts as absent. Whether a token is still the member's, only
the responder knows: `kubeconfig_command` asks it.
"""

import contextlib
import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from spur_events import private

#: A token that ends within this time is not used: the request that it is for takes time as well.
MARGIN = timedelta(seconds=30)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MAX_BYTES = 65536


@dataclass(frozen=True, kw_only=True)
class Key:
    """Whose token, for what, and from whom."""

    cluster: str
    account: str
    user: str
    nats: str


@dataclass(frozen=True, kw_only=True)
class Held:
    """A token that was fetched; `uid` is its ServiceAccount's. Its text is never shown."""

    token: str = field(repr=False)
    expires_at: datetime
    uid: str


def folder() -> Path:
    """Return where the files are.

    Raises:
        RuntimeError: if there is no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored: https://specifications.freedesktop.org/basedir/latest/
    cache = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    if not cache.is_absolute():
        raise RuntimeError(f"the home directory {Path.home()} is no absolute path")
    return cache / "spur-events" / "tokens"


def read(key: Key) -> Held | None:
    """Return the token for a key, if there is one that has not ended."""
    try:
        if not _is_private(folder().lstat(), stat.S_IFDIR):
            return None
        found = json.loads(_content(_path(key)))
        held = Held(
            token=str(found["token"]),
            expires_at=datetime.fromisoformat(found["expires_at"]),
            uid=str(found["uid"]),
        )
        fresh = datetime.now(UTC) + MARGIN < held.expires_at
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    return held if fresh and found.get("key") == asdict(key) and held.token else None


def write(key: Key, held: Held) -> None:
    """Keep a token; where that is not possible, the next call fetches another."""
    content = {
        "key": asdict(key),
        "token": held.token,
        "expires_at": held.expires_at.isoformat(),
        "uid": held.uid,
    }
    with contextlib.suppress(OSError, RuntimeError):
        place = folder()
        private.make_folder(place)
        found = place.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            place.chmod(0o700)
        if _is_private(place.lstat(), stat.S_IFDIR):
            private.write(_path(key), json.dumps(content))


def remove(key: Key) -> None:
    """Forget a token."""
    with contextlib.suppress(OSError, RuntimeError):
        _path(key).unlink(missing_ok=True)


def _path(key: Key) -> Path:
    # A hash: names may hold anything, and a list of file names should not say who works on what.
    text = json.dumps(asdict(key), sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _content(path: Path) -> bytes:
    # Not blocking: somebody could have put a pipe there.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        if not _is_private(os.fstat(handle), stat.S_IFREG):
            raise PermissionError(f"{path} is not this user's alone")
        return stream.read(_MAX_BYTES)


def _is_private(found: os.stat_result, kind: int) -> bool:
    """Whether something is of this kind, ours, and closed to everybody else."""
    mine = found.st_uid == os.geteuid() and not found.st_mode & _OTHERS
    return mine and stat.S_IFMT(found.st_mode) == kind
