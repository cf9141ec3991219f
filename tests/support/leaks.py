"""Looks for Kubernetes tokens where none may be: in logs, streams, buckets and databases."""

import re
from collections.abc import Iterable
from pathlib import Path

#: Header, payload and signature of a JWT whose header begins with `alg`, as a Kubernetes token's does. Those of NATS
#: begin with `typ`.
_TOKEN = re.compile(rb"eyJhbGciOi[\w-]+\.[\w-]+\.[\w-]{20,}")


def tokens_in(data: bytes) -> list[bytes]:
    """Return the tokens in some bytes."""
    return _TOKEN.findall(data)


def files_with_tokens(*places: Path) -> list[str]:
    """Return the files, also of folders below, that hold a token."""
    files: Iterable[Path] = (
        file
        for place in places
        for file in ([place] if place.is_file() else place.rglob("*"))
        if file.is_file()
    )
    return sorted(str(file) for file in files if tokens_in(file.read_bytes()))
