"""Faults in real ranks on CPU devices: each ends as a measurement with its cause."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from made import plan
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement
from nfold.core.workload import Workload
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RunOptions, RunProgress, StopRequest
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from repeated import repeated
from warm_runs import warm_options

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
PLANTED = Path(__file__).parent / "planted"


@pytest.fixture(scope="module")
def host() -> Machine:
    return inspect_machine()


class Injector:
    """Does something to a running measurement once its ranks have made a few steps."""

    def __init__(self, results: Path, action: Callable[[HandoffFolder], None]) -> None:
        self._results = results
        self._action = action
        self.pids: list[int] = []

    def __call__(self, progress: RunProgress) -> None:
        if progress.phase != "stepping" or progress.step < 5 or self.pids:
            return
        (path,) = (self._results / "measurements").iterdir()
        folder = HandoffFolder(path)
        beats = [folder.reports.read_heartbeat(rank) for rank in range(2)]
        self.pids = [beat.pid for beat in beats if beat is not None]
        self.pids.append(psutil.Process(self.pids[0]).ppid())
        self._action(folder)


def _run(
    host: Machine, results: Path, action: Callable[[HandoffFolder], None], **options: Any
) -> tuple[Measurement, Injector]:
    injector = Injector(results, action)
    asked = plan(host, devices=2, batch=32, epochs=500, warmup_steps=2)
    told = warm_options(results, on_progress=injector, **options)
    done = run(Workload.parse("digits"), asked, machine=host, options=told)
    assert injector.pids, f"the fault was never injected: {done.status} {done.cause}"
    return done, injector


def _pid(folder: HandoffFolder, rank: int) -> int:
    beat = folder.reports.read_heartbeat(rank)
    assert beat is not None
    return beat.pid


def _gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in pids)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_is_named_and_the_others_are_stopped(
    host: Machine, tmp_path: Path, victim: int
) -> None:
    done, injector = _run(
        host, tmp_path, lambda folder: os.kill(_pid(folder, victim), signal.SIGKILL)
    )
    assert done.status == "killed"
    assert done.cause is not None
    assert (done.cause.rank, done.cause.signal) == (victim, signal.SIGKILL)
    assert _gone(injector.pids)


@pytest.mark.slow(parts=8)
def test_a_killed_agent_takes_its_ranks_with_it(host: Machine, tmp_path: Path) -> None:
    def kill_agent(folder: HandoffFolder) -> None:
        os.kill(psutil.Process(_pid(folder, 0)).ppid(), signal.SIGKILL)

    done, injector = _run(host, tmp_path, kill_agent, agent_server=None)
    assert done.status == "killed"
    assert done.cause is not None
    assert "agent" in done.cause.text
    assert _gone(injector.pids)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_stopped_rank_is_hung_and_every_rank_leaves_its_stack(
    host: Machine, tmp_path: Path, victim: int
) -> None:
    done, injector = _run(
        host,
        tmp_path,
        lambda folder: os.kill(_pid(folder, victim), signal.SIGSTOP),
        hang_timeout_s=3.0,
    )
    assert done.status == "hung"
    assert done.cause is not None
    assert done.cause.rank == victim
    assert done.cause.step is not None
    assert done.cause.step >= 5
    assert "rank 0 is in " in done.cause.text
    assert done.folder is not None
    for rank in range(2):
        stack = HandoffFolder(tmp_path / done.folder).stack_file(rank).read_text()
        assert "nfold/engines/torch/" in stack
    assert _gone(injector.pids)


def test_a_run_that_takes_longer_than_it_was_given_is_ended(host: Machine, tmp_path: Path) -> None:
    started: list[Path] = []
    told = warm_options(tmp_path, time_limit_s=0.5, on_start=started.append)
    asked = plan(host, devices=2, batch=32, epochs=500)
    done = run(Workload.parse("digits"), asked, machine=host, options=told)
    assert done.status == "interrupted"
    assert done.cause is not None
    assert done.cause.stalled_s is not None
    assert done.cause.signal is None
    (folder,) = started
    beats = [HandoffFolder(folder).reports.read_heartbeat(rank) for rank in range(2)]
    assert _gone([beat.pid for beat in beats if beat is not None])


@pytest.mark.slow
def test_a_measurement_survives_the_removal_of_its_folder(host: Machine, tmp_path: Path) -> None:
    injector = Injector(tmp_path, lambda folder: shutil.rmtree(folder.path))
    asked = plan(host, devices=2, batch=32, epochs=10, warmup_steps=2)
    told = warm_options(tmp_path, on_progress=injector, telemetry_interval_s=0.1)
    done = run(Workload.parse("digits"), asked, machine=host, options=told)
    assert injector.pids
    assert (done.status, done.cause) == ("ok", None)
    assert [len(rank.epochs) for rank in done.ranks] == [10, 10]
    assert "telemetry_missing" in [caveat.kind for caveat in done.warnings]


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_request_to_stop_is_recorded_with_what_was_measured(
    host: Machine, tmp_path: Path, signum: signal.Signals
) -> None:
    stop = StopRequest()

    def request(_: HandoffFolder) -> None:
        stop.signum = signum

    injector = Injector(tmp_path, request)
    asked = plan(host, devices=2, batch=32, epochs=500)
    told = warm_options(tmp_path, on_progress=injector, stop=stop)
    done = run(Workload.parse("digits"), asked, machine=host, options=told)
    assert done.status == "interrupted"
    assert done.cause is not None
    assert done.cause.signal == signum
    assert not done.is_final
    assert _gone(injector.pids)


def test_somebody_else_s_process_is_left_alone(host: Machine, tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        _run(host, tmp_path, lambda folder: os.kill(_pid(folder, 1), signal.SIGKILL))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setenv("PYTHONPATH", str(PLANTED), prepend=os.pathsep)
    return lambda fault: monkeypatch.setenv("NFOLD_PLANT", fault)


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("oom:1:4", "oom", "out of memory"),
        ("nan:1:4", "diverged", "step 4"),
        pytest.param(
            "raise:0:4", "crashed", "planted in the user's own code", marks=pytest.mark.slow
        ),
        pytest.param("leave:1:4", "crashed", "exited with code 7", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_is_the_root_cause(
    host: Machine,
    tmp_path: Path,
    planted: Callable[[str], None],
    fault: str,
    status: str,
    says: str,
) -> None:
    planted(fault)
    asked = plan(host, devices=2, batch=32, steps=12, warmup_steps=2)
    done = run(Workload.parse("digits"), asked, machine=host, options=RunOptions(results=tmp_path))
    assert done.status == status
    assert done.cause is not None
    assert done.cause.rank == int(fault.split(":")[1])
    assert says in done.cause.text
    assert done.is_final


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("nfold", marks=pytest.mark.slow)])
@repeated
def test_a_slow_rank_is_named_though_all_steps_take_as_long(
    host: Machine, tmp_path: Path, planted: Callable[[str], None], strategy: str
) -> None:
    planted("sleep:1:1")
    asked = plan(host, devices=2, batch=32, steps=40, warmup_steps=2, strategy=strategy)
    done = run(Workload.parse("digits"), asked, machine=host, options=RunOptions(results=tmp_path))
    assert done.status == "ok", done.cause
    (slow,) = [caveat for caveat in done.warnings if caveat.kind == "slow_rank"]
    assert re.match(r"rank 1 computes \d{3,}\.\d\d ms a step before it exchanges", slow.text)


@pytest.mark.slow(parts=8)
def test_an_out_of_memory_row_has_what_was_held(
    host: Machine, tmp_path: Path, planted: Callable[[str], None]
) -> None:
    planted("oom:0:6")
    asked = plan(host, devices=1, batch=32, steps=12, warmup_steps=2)
    done = run(Workload.parse("digits"), asked, machine=host, options=RunOptions(results=tmp_path))
    assert done.status == "oom"
    assert done.ranks[0].peak_memory_bytes is not None
    assert done.ranks[0].peak_memory_bytes > 2**20
    assert done.cause is not None
    assert done.cause.rank == 0
