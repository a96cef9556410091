"""Start and end of a rank's process: log, stacks on a signal, failure report, exit.

Imports only the standard library and nfold.core: a rank must report before any slow import.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from nfold.core.errors import Collateral, EndedEarly, NfoldError, RunFailure
from nfold.launch.failed_statement import FailedStatement, find_failed_statement
from nfold.launch.handoff import RankFailure

STACK_SIGNAL = signal.SIGUSR2
CHILD_EXIT_TIMEOUT_S = 2.0  # after SIGKILL; takes milliseconds
MAX_TEXT = 500
# Messages of torch.utils.data
WORKER_RAISED = re.compile(r"Caught \w+ in (DataLoader worker process \d+)\.")
WORKER_DIED = "exited unexpectedly"
SHARED_MEMORY = re.compile(r"shared memory|</torch_")
ERROR_LINE = re.compile(r"\s*([\w.]*(Error|Exception)|ERROR|Fatal)\b")


@contextmanager
def stacks_on_signal(file: Path) -> Iterator[None]:
    """Write the Python stacks of all threads to ``file`` on ``STACK_SIGNAL``, and if one aborts.

    Also on SIGTERM, which ends the process: the agent ends ranks before they notice that another
    has aborted.
    """
    with file.open("w") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        faulthandler.register(signal.SIGTERM, file=stacks, all_threads=True, chain=True)
        faulthandler.enable(file=stacks, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACK_SIGNAL)
            faulthandler.unregister(signal.SIGTERM)
            faulthandler.disable()


STACK_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
LIBRARY_FOLDER = f"{os.path.dirname(os.__file__)}{os.sep}"
NESTED = ("wrapper", "inner")  # functions of PyTorch that call what the user called
OWN_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"
AROUND_TRAINING = (f"{OWN_FOLDER}launch{os.sep}", f"{OWN_FOLDER}instrument{os.sep}")


def find_current_call(stack_file: Path) -> str | None:
    """Return the user's line that a rank executes, and the function of PyTorch called there.

    For example ``all_reduce (train.py:12)``; a line of nfold if there is none of the user. None if
    the file has no stack, or the rank has left what it trains. The main thread is the last in it.
    """
    text = stack_file.read_text(errors="replace") if stack_file.exists() else ""
    function, own = "", None
    for path, line, name in STACK_FRAME.findall(text.rpartition("call first):")[2]):
        location = f"{os.path.basename(path)}:{line}"
        call = f"{function} ({location})" if function else location
        if "-packages/torch/" in path:
            function = function if name in NESTED or name.startswith("_") else name
        elif path.startswith(AROUND_TRAINING):
            continue
        elif path.startswith(OWN_FOLDER):
            own = own or call
        elif "-packages/" in path or not path.startswith((LIBRARY_FOLDER, "<")):
            return call
    return own


def redirect_output(log: Path) -> None:
    """Redirect the output of this process to the log of the rank, line-buffered."""
    with log.open("ab") as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def build_failure(
    error: BaseException, rank: int, step: int | None, location: str | None = None
) -> RankFailure:
    """Return the exception of a rank as data, with its source location in the user's code.

    An error that nfold did not raise is a crash.
    """
    if isinstance(error, NfoldError):
        text, statement = str(error), FailedStatement()
    else:
        text, statement = _describe_crash(error), find_failed_statement(error)
    place = f"{location} `{statement.code}`" if statement.code else location
    hint = f"; next: {statement.argument}" if statement.argument else ""
    own_step = error.step if isinstance(error, RunFailure) else None
    return RankFailure(
        rank=rank,
        status=error.status if isinstance(error, RunFailure) else "crashed",
        text=text.strip().split("\n")[0][:MAX_TEXT] + (f" ({place})" if location else "") + hint,
        step=own_step if own_step is not None else step,
        collateral=isinstance(error, Collateral),
        monotonic_ns=time.monotonic_ns(),
        traceback="".join(traceback.format_exception(error)),
        peak_memory_bytes=getattr(error, "peak_memory_bytes", None),
        location=(error.left_at if isinstance(error, EndedEarly) else location) or "",
        has_left=isinstance(error, EndedEarly),
    )


def _describe_crash(error: BaseException) -> str:
    cause = error.__cause__
    if str(error).endswith(WORKER_DIED) and cause is not None and str(cause):
        error = cause  # names the signal or the exit code; without text it is a queue's time limit
    text = str(error).strip()
    if in_worker := WORKER_RAISED.match(text):
        found = f"{text.splitlines()[-1]} (in {in_worker[1]})"
    else:
        first_line = text.split("\n")[0]
        found = ": ".join(filter(None, [type(error).__name__, first_line]))
    if WORKER_DIED in text and (line := _last_error_line()):
        found += f"; its last error line: {line}"
    if SHARED_MEMORY.search(text):
        state = "is full" if "No space left" in text else "may be full"
        found += f"; /dev/shm {state}; next: make it larger, or use fewer loader workers"
    return found


def _last_error_line() -> str | None:
    log = Path("/proc/self/fd/2")  # of this rank and its workers
    if not log.is_file():
        return None
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if ERROR_LINE.match(line)), None)


def exit_without_cleanup(code: int) -> NoReturn:
    """Exit without finalization: tearing down NCCL after a failure can hang."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


def kill_children() -> None:
    """Kill and reap every process that this process has started by multiprocessing.

    PyTorch's SIGCHLD handler is removed first: it raises when a DataLoader worker dies. The CPU time
    of a child that is not reaped would not be counted for this process.
    """
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    until = time.monotonic() + CHILD_EXIT_TIMEOUT_S
    for child in children:
        child.join(max(0.0, until - time.monotonic()))


@contextmanager
def stopped_children() -> Iterator[None]:
    """Stop every process that this process has started by multiprocessing, and then continue them."""
    children = multiprocessing.active_children()
    _signal_all(children, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal_all(children, signal.SIGCONT)


def _signal_all(children: Sequence[BaseProcess], signum: signal.Signals) -> None:
    for child in children:
        assert child.pid is not None  # it has started
        with suppress(ProcessLookupError):
            os.kill(child.pid, signum)


def exit_after_handlers(code: int = 0) -> NoReturn:
    """Exit after threads and exit handlers have run, but without finalizing the interpreter.

    After a gloo group was destroyed, PyTorch sometimes aborts in the finalization (3 of 10 runs of
    two ranks, 2.13; docs/decisions/process-launch.md), and the agent would stop the other ranks.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its children
    _end_loaders()
    atexit._run_exitfuncs()
    exit_without_cleanup(code)


def _end_loaders() -> None:
    # In its exit handlers PyTorch (seen in 2.11) waits 5 s for each worker of a DataLoader with
    # pinned memory and persistent workers.
    loading = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(loading, "_MultiProcessingDataLoaderIter", None)
    if kind is not None:
        for iterator in gc.get_objects():
            if type(iterator) is kind:
                iterator._shutdown_workers()
