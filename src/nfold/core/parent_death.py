"""Dying with one's parent, so that killing any process of a run leaves none behind (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "NFOLD_PARENT"
"""Environment variable with the process id that a child must find as its parent."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, whatever ends it.

    See prctl(2), PR_SET_PDEATHSIG. The parent may have ended before the call: where
    ``NFOLD_PARENT`` names another process than today's parent, exit at once. Afterwards it
    names this process, for the children that this one starts.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    expected = os.environ.get(PARENT_VARIABLE)
    if expected is not None and os.getppid() != int(expected):
        sys.exit(f"the parent {expected} is gone")
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def child_environment(**extra: str) -> dict[str, str]:
    """This process's environment for a child that calls ``die_with_parent``."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid()), **extra}
