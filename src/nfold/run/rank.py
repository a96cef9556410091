"""What every rank's process does before anything else: lifeline, its own log, its stacks.

Imports only Python's own library: a rank must be heard before anything slow begins.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR2


@contextmanager
def stacks_on_signal(file: Path) -> Iterator[None]:
    """Write the Python stacks of all threads to ``file`` whenever ``STACK_SIGNAL`` comes."""
    with file.open("w") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACK_SIGNAL)


def redirect_output(log: Path) -> None:
    """Send what this process and its libraries print to the rank's log, unbuffered by line."""
    with log.open("ab") as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
