"""File locks between processes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO


def lock_file(file: Path, kind: int = fcntl.LOCK_EX) -> IO[bytes]:
    """Return an open file with a lock, held until every process that inherits it has closed it.

    With LOCK_NB raises OSError if another process holds the lock. A link is not followed.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = open(os.open(file, flags, 0o600), "ab")  # noqa: SIM115
    try:
        fcntl.flock(lock, kind)
    except OSError:
        lock.close()
        raise
    return lock
