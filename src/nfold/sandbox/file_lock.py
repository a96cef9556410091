"""File locks between processes."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


def lock_file(file: Path, kind: int = fcntl.LOCK_EX) -> IO[bytes]:
    """Return an open file with a lock, held until every process that inherits it has closed it.

    With LOCK_NB raises OSError if another process holds the lock.
    """
    lock = file.open("ab")
    try:
        fcntl.flock(lock, kind)
    except OSError:
        lock.close()
        raise
    return lock
