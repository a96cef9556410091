"""nfold explain, ended at once: files of the user are restored, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two CPU devices need two cores"),
]
LIMIT_S = 60.0
SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
subprocess.Popen(["sleep", "600"], start_new_session=True)
Path(sys.argv[1]).write_text("changed")
Path(sys.argv[2]).write_text("made")
time.sleep(600)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


@pytest.fixture
def explain(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """``nfold explain`` of a script that has changed a file, and started a process."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "log.txt").write_text("old")
    files = [str(tmp_path / name) for name in ("log.txt", "new.txt")]
    command = [sys.executable, "-m", "nfold", "explain", "train.py", "--devices", "cpu:2"]
    process = subprocess.Popen(
        [*command, "--no-report", "--plain", "--", *files],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "NFOLD_SANDBOX": "journal"},
    )
    try:
        wait_until((tmp_path / "new.txt").exists)
        yield process
    finally:
        process.kill()
        process.communicate()


def assert_restored(folder: Path, processes: list[psutil.Process]) -> None:
    wait_until(lambda: (folder / "log.txt").read_text() == "old")
    wait_until(lambda: {path.name for path in folder.iterdir()} == {
        "log.txt", "nfold-results", "train.py"
    })  # fmt: skip
    wait_until(lambda: not list(folder.glob("nfold-results/measurements/*/scratch*")))
    wait_until(lambda: not any(map(is_running, processes)))


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow(parts=8)
def test_a_second_interrupt_restores_files(explain: subprocess.Popen[str], tmp_path: Path) -> None:
    """SIGHUP and SIGINT arrive together: nfold has no time to end the run in order."""
    tree = psutil.Process(explain.pid).children(recursive=True)
    for signum in (signal.SIGSTOP, signal.SIGHUP, signal.SIGINT, signal.SIGCONT):
        os.kill(explain.pid, signum)
    _, errors = explain.communicate(timeout=LIMIT_S)
    assert explain.returncode == 130
    assert "are being restored in the background" in errors
    assert_restored(tmp_path, tree)


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_signals_until_nfold_has_ended_restore_files(
    explain: subprocess.Popen[str], tmp_path: Path, signum: signal.Signals
) -> None:
    tree = psutil.Process(explain.pid).children(recursive=True)
    assert "sleep" in [process.name() for process in tree]
    while explain.poll() is None:
        os.kill(explain.pid, signum)
        time.sleep(0.005)
    assert_restored(tmp_path, tree)
