"""The bench command as a user runs it: killed, interrupted, resumed; nothing lost, nothing left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nfold.launch.workload_process import RANK_NAME
from nfold.store.store import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
LIMIT_S = 60.0
GRID = ["digits", "--devices", "1,2", "--batch", "32,64", "--steps", "40", "--no-report"]


def _command(results: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "nfold", "bench", *arguments, "--results", str(results)]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test started; whatever it leaves is killed."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def _start(started: list[subprocess.Popen[str]], results: Path, *arguments: str) -> psutil.Process:
    process = subprocess.Popen(
        _command(results, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return psutil.Process(process.pid)


def _wait_for_ranks(nfold: psutil.Process, results: Path, finished: int) -> list[psutil.Process]:
    """Wait until ``finished`` measurements are in the store and a further one is running."""
    while True:
        assert nfold.is_running()
        assert nfold.status() != psutil.STATUS_ZOMBIE, "nfold ended before it could be struck"
        tree = nfold.children(recursive=True)
        ranks = [p for p in tree if _name(p).startswith(RANK_NAME)]
        if ranks and _stored(results) >= finished:
            return tree
        time.sleep(0.05)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def _stored(results: Path) -> int:
    if not (results / "nfold.db").exists():
        return 0
    with Store.open(results) as store:
        return len(store.measurements())


def _all_gone(tree: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(tree, timeout=LIMIT_S)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _bench_json(results: Path, *arguments: str) -> dict[str, object]:
    done = subprocess.run(
        _command(results, *arguments, "--json"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, object] = json.loads(done.stdout)
    return document


@pytest.mark.slow(parts=8)
def test_sigkill_of_nfold_leaves_nothing_running_and_a_rerun_finishes_the_rest(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    nfold = _start(started, tmp_path, *GRID)
    tree = _wait_for_ranks(nfold, tmp_path, finished=1)
    before = _stored(tmp_path)
    os.kill(nfold.pid, signal.SIGKILL)
    assert _all_gone(tree)
    assert _stored(tmp_path) >= before >= 1
    with Store.open(tmp_path) as store:
        kept = {m.id for m in store.measurements()}
    document = _bench_json(tmp_path, *GRID)
    measurements = document["measurements"]
    assert isinstance(measurements, list)
    assert len(measurements) == 4
    assert {m["status"] for m in measurements} == {"ok"}
    assert kept <= {m["id"] for m in measurements}
    assert document["schema"] == 1
    assert document["comparisons"]


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_at_a_random_moment_ends_everything(
    started: list[subprocess.Popen[str]], tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    nfold = _start(started, tmp_path, *GRID)
    tree = _wait_for_ranks(nfold, tmp_path, finished=0)
    time.sleep(random.Random(signum).uniform(0, 3))
    tree += nfold.children(recursive=True)
    os.kill(nfold.pid, signum)
    assert started[0].wait(timeout=LIMIT_S) == code
    assert _all_gone(tree)
    with Store.open(tmp_path) as store:
        assert {m.status for m in store.measurements()} <= {"ok", "interrupted"}


def test_a_second_interrupt_stops_at_once(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    nfold = _start(started, tmp_path, *GRID)
    tree = _wait_for_ranks(nfold, tmp_path, finished=0)
    os.kill(nfold.pid, signal.SIGINT)
    os.kill(nfold.pid, signal.SIGINT)
    assert started[0].wait(timeout=LIMIT_S) == 130
    assert _all_gone(tree)


@pytest.mark.slow(parts=8)
def test_attached_to_a_job_that_torchrun_started(tmp_path: Path) -> None:
    """Two ranks, one nfold each: one measurement, one table, launched by somebody else.

    A second job is another one, although torchrun gives it the same id and port.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    bench = ["-m", "nfold", "bench", "digits", "--devices", "2", "--steps", "20", "--json"]
    for _ in range(2):
        done = subprocess.run(
            [*torchrun, *bench, "--results", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        (measurement,) = document["measurements"]
        assert measurement["status"] == "ok", measurement["cause"]
        assert len(measurement["peak_memory_bytes"]) == 2
    assert len(list((tmp_path / "measurements").iterdir())) == 2
