"""What the processes of all ranks share: their own log, stacks on a signal, word of a failure.

Imports only Python's own library and nfold's values: a rank must be heard before anything slow
begins.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from nfold.core.errors import Collateral, NfoldError, RunFailure
from nfold.launch.handoff import RankFailure

STACK_SIGNAL = signal.SIGUSR2
CHILD_EXIT_TIMEOUT_S = 2.0
"""What was killed is waited for no longer than this; it takes milliseconds."""


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


def build_failure(
    error: BaseException, rank: int, step: int | None, location: str | None = None
) -> RankFailure:
    """A rank's exception as data, with its place in the user's code, where it is there.

    An error that nfold did not raise is a crash.
    """
    expected = isinstance(error, NfoldError)
    text = str(error) if expected else f"{type(error).__name__}: {error}"
    own_step = error.step if isinstance(error, RunFailure) else None
    return RankFailure(
        rank=rank,
        status=error.status if isinstance(error, RunFailure) else "crashed",
        text=text.strip().split("\n")[0][:500] + (f" ({location})" if location else ""),
        step=own_step if own_step is not None else step,
        collateral=isinstance(error, Collateral),
        monotonic_ns=time.monotonic_ns(),
        traceback="".join(traceback.format_exception(error)),
        peak_memory_bytes=getattr(error, "peak_memory_bytes", None),
    )


def exit_without_cleanup(code: int) -> NoReturn:
    """End this process without tidying up: tearing down NCCL after a failure can hang."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


def kill_children() -> None:
    """Kill every process that this one has started by multiprocessing.

    PyTorch's handler would take the death of a loader's worker for a failure of this process. They
    are waited for: what nobody has waited for leaves its CPU time to no one, and would be taken for
    another's.
    """
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    until = time.monotonic() + CHILD_EXIT_TIMEOUT_S
    for child in children:
        child.join(max(0.0, until - time.monotonic()))


def exit_after_handlers() -> NoReturn:
    """End as Python does, after its threads and exit handlers, but take nothing apart.

    Where a gloo group was destroyed, PyTorch aborts in that last act now and then (3 of 10 runs of
    two ranks, 2.13; docs/decisions/process-launch.md), and the agent would end the other ranks for it.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its children
    _end_loaders()
    atexit._run_exitfuncs()
    exit_without_cleanup(0)


def _end_loaders() -> None:
    """Tell the workers of every DataLoader that somebody still refers to that it is over.

    Nobody else does before exit handlers run, and there PyTorch (seen in 2.11) waits 5 s for each
    worker of one that pins memory and keeps its workers.
    """
    loading = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(loading, "_MultiProcessingDataLoaderIter", None)
    if kind is not None:
        for one in gc.get_objects():
            if type(one) is kind:
                one._shutdown_workers()
