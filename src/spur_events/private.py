"""Files and folders that are nobody else's: mode 0600 and 0700, written whole or not at all.

Used wherever a secret or a state is kept on disk; knows nothing of what is in them.
"""

import os
import tempfile
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Create a folder of mode 0700 where it does not exist yet."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Write a file so that readers see the old or the new content, never half of it, and others nothing."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
