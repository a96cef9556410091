"""Only own processes are signalled, and all of them end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nfold.core.process_identity import SESSION_VARIABLE, ProcessIdentity
from nfold.engines.base import Phase
from nfold.launch.guardian import GUARDIAN
from nfold.launch.handoff import HandoffFolder, HeartbeatWriter
from nfold.launch.launch_spec import ProcessSpec, RunOptions
from nfold.launch.process_tree import IdleDetector, ProcessTree, adopt_orphans
from nfold.launch.supervisor import Supervisor

MARKER = "1 1 run"
PARENT = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_the_whole_tree_ends_also_across_sessions() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        child = int(root.stdout.readline())
        assert ProcessTree(root, MARKER).kill() == []
        assert root.returncode == -signal.SIGKILL
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_a_process_whose_parent_is_gone_is_found_by_its_mark() -> None:
    orphaning = PARENT.replace("print(child.pid, flush=True)\ntime.sleep(600)", "print(child.pid)")
    root = subprocess.Popen(
        [sys.executable, "-c", orphaning],
        stdout=subprocess.PIPE,
        env={**os.environ, SESSION_VARIABLE: MARKER},
    )
    assert root.stdout is not None
    child = int(root.stdout.readline())
    root.wait()
    for other in ("1 1 other", "1 1 ru", "1 11", "11 1"):
        assert ProcessTree(root, other).kill() == []
    assert psutil.Process(child).status() != "zombie"
    assert ProcessTree(root, MARKER).kill() == []
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_a_process_id_that_went_to_somebody_else_is_not_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same id with another start time is another process."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        tree = ProcessTree(other, MARKER)
        known = tree._processes[other.pid]
        monkeypatch.setattr(known, "_ident", (other.pid, 1.0))
        tree.signal(other.pid, signal.SIGKILL)
        assert other.poll() is None
        other.kill()


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_an_id_of_a_rank_that_the_kernel_reused_is_not_signalled(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    """A rank that was stopped left its heartbeat; its id now belongs to another process."""
    folder = HandoffFolder(tmp_path)
    writer = HeartbeatWriter(folder.reports.heartbeat_file(0), bystander.pid)
    writer._fields[5] -= 1
    writer.beat(Phase.STEPPING, 3, 0, time.monotonic_ns() - 10**9)
    spec = ProcessSpec(command=("sleep", "600"), environment={}, processes=1)
    ending = Supervisor(folder, spec, RunOptions(results=tmp_path, hang_timeout_s=0.5)).run()
    assert ending.hung == (0, 3)
    assert bystander.poll() is None


@pytest.mark.parametrize("is_of_the_run", [False, True])
def test_a_process_that_reports_is_signalled_if_it_is_of_the_run(
    tmp_path: Path, *, is_of_the_run: bool
) -> None:
    """Anyone may write a heartbeat with the id of any process into the folder."""
    marker = GUARDIAN.run_marker(tmp_path) if is_of_the_run else "1 1"
    environment = {**os.environ, SESSION_VARIABLE: marker}
    with subprocess.Popen(["sleep", "600"], env=environment) as reporting:
        folder = HandoffFolder(tmp_path)
        writer = HeartbeatWriter(folder.reports.heartbeat_file(0), reporting.pid)
        writer.beat(Phase.STEPPING, 3, 0, time.monotonic_ns() - 10**9)
        spec = ProcessSpec(command=("sleep", "600"), environment={}, processes=1)
        ending = Supervisor(folder, spec, RunOptions(results=tmp_path, hang_timeout_s=0.5)).run()
        assert ending.hung == (0, 3)
        assert (reporting.poll() is None) != is_of_the_run
        reporting.kill()


@pytest.mark.parametrize(
    ("phase", "silence_s", "hung"),
    [(Phase.STEPPING, 20, True), (Phase.STEPPING, 1, False), (Phase.FIRST_STEP, 20, False)],
)
def test_a_time_limit_does_not_end_what_may_be_a_hang(
    tmp_path: Path,
    bystander: subprocess.Popen[bytes],
    phase: Phase,
    silence_s: int,
    *,
    hung: bool,
) -> None:
    """Where ranks wait for each other matters more than that a trial took long."""
    folder = HandoffFolder(tmp_path)
    writer = HeartbeatWriter(folder.reports.heartbeat_file(0), bystander.pid)
    writer.beat(phase, 3, 0, time.monotonic_ns() - silence_s * 10**9)
    spec = ProcessSpec(command=("sleep", "600"), environment={}, processes=1)
    options = RunOptions(results=tmp_path, hang_timeout_s=21.0, time_limit_s=0.1)
    ending = Supervisor(folder, spec, options).run()
    assert (ending.hung == (0, 3)) == hung
    assert (ending.timed_out == (0.1, 3)) != hung


@pytest.mark.parametrize(("phase", "hung"), [(Phase.FINISHED, True), (Phase.FIRST_STEP, False)])
def test_an_idle_rank_after_another_has_ended_is_hung(
    tmp_path: Path, bystander: subprocess.Popen[bytes], phase: Phase, *, hung: bool
) -> None:
    """Even in a step that may take long: it waits for the rank that has ended."""
    folder = HandoffFolder(tmp_path)
    for rank, its_phase in enumerate((Phase.FIRST_STEP, phase)):
        writer = HeartbeatWriter(folder.reports.heartbeat_file(rank), bystander.pid)
        writer.beat(its_phase, 3, 0, time.monotonic_ns())
    spec = ProcessSpec(command=("sleep", "600"), environment={}, processes=2)
    options = RunOptions(results=tmp_path, hang_timeout_s=1.0, time_limit_s=4.0)
    ending = Supervisor(folder, spec, options).run()
    assert (ending.hung == (0, 3)) == hung
    assert (ending.timed_out == (4.0, 3)) != hung


DETACHING = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True, env={})
print(child.pid, flush=True)
"""


def test_a_process_that_was_detached_is_named_and_left_running() -> None:
    with adopt_orphans():
        command = [sys.executable, "-c", DETACHING]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as root:
            tree = ProcessTree(root, MARKER)
            assert root.stdout is not None
            child = psutil.Process(int(root.stdout.readline()))
            while not child.cmdline():  # its exec is not complete
                time.sleep(0.01)
            root.wait()
            assert tree.kill() == []
            ((pid, text),) = tree.detached()
    assert pid == child.pid
    assert "time.sleep(600)" in text
    assert child.is_running()
    child.kill()
    child.wait()


def test_what_was_detached_is_not_known_while_another_tree_runs() -> None:
    """Two runs alternate, and a process that one of them started is a child of nfold."""
    with (
        subprocess.Popen(["sleep", "600"]) as first,
        subprocess.Popen(["sleep", "600"]) as second,
    ):
        trees = [ProcessTree(process, MARKER) for process in (first, second)]
        with subprocess.Popen(["sleep", "600"]) as later:
            trees[0].kill()
            assert trees[0].detached() == []
            trees[1].kill()
            assert [pid for pid, _ in trees[1].detached()] == [later.pid]
            later.kill()


def test_idle_is_a_process_whose_tree_uses_no_cpu_time(bystander: subprocess.Popen[bytes]) -> None:
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", parent]) as busy:
        trees = {process: ProcessTree(process, MARKER) for process in (bystander, busy)}
        idle = {process: IdleDetector(tree) for process, tree in trees.items()}
        while not idle[bystander].is_idle(bystander.pid, 1, 1.0):  # at first it starts
            assert not idle[busy].is_idle(busy.pid, 1, 1.0)
            time.sleep(0.1)
        assert not idle[bystander].is_idle(bystander.pid, 2, 1.0)
        trees[busy].kill()


def test_an_identity_ends_with_its_process() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        identity = ProcessIdentity.of(process.pid)
        assert identity is not None
        assert identity.is_running
        while identity.command != "sleep 600":  # it is empty at first
            assert process.poll() is None
        assert not ProcessIdentity(process.pid, identity.start_ticks - 1).is_running
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not identity.is_running


def test_a_halted_process_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        tree = ProcessTree(process, MARKER)
        assert not tree.is_stopped(process.pid)
        tree.signal(process.pid, signal.SIGSTOP)
        while not tree.is_stopped(process.pid):
            assert process.poll() is None
        assert tree.kill() == []


def test_an_unknown_process_is_never_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
            ProcessTree(process, MARKER).signal(other.pid, signal.SIGKILL)
            assert other.poll() is None
            other.kill()
        process.kill()
