"""Sets up a process that nfold starts: its end with the parent, its name, its standard streams."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TextIO

_PRCTL = {"PR_SET_PDEATHSIG": 1, "PR_SET_NAME": 15}


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux; prctl(2), PR_SET_PDEATHSIG).

    So that killing any process of a run leaves none behind. At once, while the guardian of a run
    only comes at the end of nfold. Does nothing if the parent has ended before the call.
    """
    _call_prctl("PR_SET_PDEATHSIG", signal.SIGKILL)


def name_process(name: str) -> None:
    """Set the name that ``top`` shows, of at most 15 bytes. A fork has that of its parent until then."""
    _call_prctl("PR_SET_NAME", name.encode())


def _call_prctl(operation: str, value: int | bytes) -> None:
    """Call prctl(2), on Linux only."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PRCTL[operation], value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({operation}) failed")


def take_stdout() -> TextIO:
    """Return a file of the standard output; what libraries print goes to standard error from now."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def empty_stdin() -> None:
    """Let the standard input of this process have no content."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
