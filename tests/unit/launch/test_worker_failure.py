"""The record of a rank names why a worker of its DataLoader failed."""

from __future__ import annotations

import gc
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nfold.launch.rank_lifecycle import build_failure


class FailingDataset(Dataset[Tensor]):
    """Fails in a loader's worker."""

    def __init__(self, failure: Callable[[], object]) -> None:
        self._failure = failure

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        self._failure()
        return torch.ones(2**22)


def _raise() -> None:
    raise ValueError("a.png is cut short")


def _exit_with_message() -> None:
    os.write(2, b"Traceback:\nMyError: no such codec\nlast words\n")
    os._exit(3)


def _worker_failure(failure: Callable[[], object]) -> str:
    gc.collect()  # an earlier loader's __del__ would swallow what PyTorch's SIGCHLD handler raises
    with pytest.raises((RuntimeError, ValueError)) as raised:
        next(iter(DataLoader(FailingDataset(failure), num_workers=1)))
    return build_failure(raised.value, 0, None).text


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (_raise, r"ValueError: a.png is cut short \(in DataLoader worker process 0\)"),
        (lambda: signal.raise_signal(signal.SIGKILL), r"DataLoader worker .* signal: Killed"),
        (lambda: signal.raise_signal(signal.SIGBUS), r"Bus error.*; /dev/shm may be full; next:"),
        (_exit_with_message, r"exit code 3.*; its last error line: MyError: no such codec$"),
    ],
)
def test_the_failure_of_a_loader_worker_names_its_cause(
    failure: Callable[[], object], expected: str
) -> None:
    assert re.search(expected, _worker_failure(failure))


def test_a_worker_whose_signal_was_missed_is_still_named() -> None:
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = queue.Empty()
    assert "DataLoader worker (pid(s) 7) exited unexpectedly" in build_failure(error, 0, None).text


@pytest.mark.slow(parts=8)
def test_a_full_shared_memory_is_named() -> None:
    small = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    unshare = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*unshare, small], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted")
    script = "import test_worker_failure as t; print(t._worker_failure(bool))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [*unshare, f'{small} && exec "$0" -c "{script}"', sys.executable],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "; /dev/shm is full; next: make it larger" in done.stdout, done.stderr
