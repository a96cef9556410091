"""Locks on files, between the processes of one run and their parent."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


def lock_file(file: Path, kind: int = fcntl.LOCK_EX) -> IO[bytes]:
    """A lock that this process and its children hold while any of them lives and has it open.

    With LOCK_NB raises OSError where another one holds it.
    """
    lock = file.open("ab")
    try:
        fcntl.flock(lock, kind)
    except OSError:
        lock.close()
        raise
    return lock
