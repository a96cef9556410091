"""Ends a process when its parent ends, so that killing any process of a run leaves none behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "NFOLD_PARENT"  # process id that a child must find as its parent
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux; prctl(2), PR_SET_PDEATHSIG).

    Exits at once if the parent has ended before the call: ``NFOLD_PARENT`` is then another
    process than the present parent. Sets ``NFOLD_PARENT`` for the children of this process.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    expected = os.environ.get(PARENT_VARIABLE)
    if expected is not None and os.getppid() != int(expected):
        sys.exit(f"the parent process {expected} has ended")
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def child_environment(**extra: str) -> dict[str, str]:
    """Return the environment for a child that calls ``die_with_parent``."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid()), **extra}
