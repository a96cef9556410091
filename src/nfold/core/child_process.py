"""What the processes that nfold starts do first: end with their parent, and keep streams apart."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TextIO

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux; prctl(2), PR_SET_PDEATHSIG).

    So that killing any process of a run leaves none behind. At once, while the guardian of a run
    only comes at the end of nfold. Does nothing if the parent has ended before the call.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def take_stdout() -> TextIO:
    """Return a file of the standard output; what libraries print goes to standard error from now."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def empty_stdin() -> None:
    """Let the standard input of this process have no content."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
