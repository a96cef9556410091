"""The guardian ends with its nfold process, and after it everything that it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nfold.launch.guardian import IGNORED_SIGNALS, SETTLED, STARTED, read_unsettled

LIMIT_S = 60.0
SESSION = """
import os, subprocess, sys, time
from pathlib import Path
from nfold.launch.guardian import GUARDIAN
GUARDIAN.start()
{code}
print(GUARDIAN._process.pid, *pids, flush=True)
time.sleep(600)
"""
SLEEP = '["sleep", "600"], start_new_session=True'
CHILD = f"pids = [subprocess.Popen({SLEEP}).pid]"
# bash passes the marker on; its child has another environment.
GRANDCHILD = """
bash = ["bash", "-c", "env -i sleep 600 & echo $!; wait"]
child = subprocess.Popen(bash, stdout=subprocess.PIPE, start_new_session=True)
pids = [child.pid, int(child.stdout.readline())]
"""
FORK = """
pids = [os.fork()]
if not pids[0]:
    time.sleep(600)
"""


class Session:
    """A process that has started its guardian and other processes."""

    def __init__(self, code: str) -> None:
        command = [sys.executable, "-c", SESSION.format(code=code)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        with self.process.stdout as output:
            pids = output.readline().split()
        self.guardian, *self.others = (psutil.Process(int(pid)) for pid in pids)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start() -> Iterator[Callable[[str], Session]]:
    started: list[Session] = []

    def start(code: str) -> Session:
        started.append(Session(code))
        return started[-1]

    yield start
    for session in started:
        session.kill()
        for process in session.others:
            if is_running(process):
                process.kill()


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


@pytest.mark.parametrize("code", [CHILD, GRANDCHILD])
def test_the_processes_of_a_killed_session_are_killed(
    start: Callable[[str], Session], code: str
) -> None:
    other, session = start(CHILD), start(code)
    session.kill()
    wait_until(lambda: not any(map(is_running, [session.guardian, *session.others])))
    assert all(map(is_running, [other.guardian, *other.others]))


def test_signals_to_the_guardian_are_ignored(start: Callable[[str], Session]) -> None:
    session = start(CHILD)
    status = Path(f"/proc/{session.guardian.pid}/status")
    mask = sum(1 << (signum - 1) for signum in IGNORED_SIGNALS)

    def ignores() -> bool:
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("SigIgn"))
        return int(line.split()[1], 16) & mask == mask

    wait_until(ignores)
    for signum in IGNORED_SIGNALS:
        session.guardian.send_signal(signum)
    assert os.getsid(session.guardian.pid) == session.guardian.pid
    session.kill()
    wait_until(lambda: not any(map(is_running, [session.guardian, *session.others])))


def test_a_forked_process_does_not_keep_the_guardian(start: Callable[[str], Session]) -> None:
    session = start(FORK)
    session.kill()
    wait_until(lambda: not is_running(session.guardian))
    assert is_running(session.others[0])  # nfold itself forks none: it has no marker


def test_a_guardian_that_was_killed_is_replaced(start: Callable[[str], Session]) -> None:
    killed = "first = GUARDIAN._process; first.kill(); first.wait(); GUARDIAN.start()\n"
    session = start(killed + CHILD)
    session.kill()
    wait_until(lambda: not is_running(session.others[0]))


def test_a_guardian_that_was_killed_does_not_end_the_run(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom nfold.launch.guardian import GUARDIAN\n"
        "with GUARDIAN.watch(Path('scratch')):\n"
        "    GUARDIAN._process.kill()\n    GUARDIAN._process.wait()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_sandboxes_that_were_settled_are_left_alone() -> None:
    events = [[STARTED, "a"], [STARTED, "b\n"], [SETTLED, "a"], [STARTED, "c"], [STARTED, "a"]]
    lines = [json.dumps(event).encode() + b"\n" for event in events]
    assert read_unsettled(lines) == ["b\n", "c", "a"]
    assert read_unsettled(lines[:1] + lines[2:3]) == []
    assert read_unsettled([lines[0], lines[1][:-3]]) == ["a"]


def test_it_starts_fast() -> None:
    """Before the end of file it imports no other library, and no sandbox."""
    code = "import sys, nfold.launch.guardian; print(*sys.modules)"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [name for name in done.stdout.split() if name.startswith(("nfold.", "psutil", "typer"))]
    assert sorted(names) == [
        "nfold.core",
        "nfold.core.process_identity",
        "nfold.launch",
        "nfold.launch.guardian",
    ]
