"""Only own processes are signalled, and all of them end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from nfold.launch.supervisor import ProcessTree

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
        assert ProcessTree(root).kill() == []
        assert root.returncode == -signal.SIGKILL
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_a_process_whose_parent_is_gone_is_found_by_its_mark() -> None:
    orphaning = PARENT.replace("print(child.pid, flush=True)\ntime.sleep(600)", "print(child.pid)")
    root = subprocess.Popen(
        [sys.executable, "-c", orphaning],
        stdout=subprocess.PIPE,
        env={**os.environ, "NFOLD_FOLDER": "/a/run/of/its/own"},
    )
    assert root.stdout is not None
    child = int(root.stdout.readline())
    root.wait()
    assert ProcessTree(root, ("NFOLD_FOLDER", "/another/run")).kill() == []
    assert psutil.Process(child).status() != "zombie"
    assert ProcessTree(root, ("NFOLD_FOLDER", "/a/run/of/its/own")).kill() == []
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_a_process_id_that_went_to_somebody_else_is_not_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same id with another start time is another process."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        tree = ProcessTree(other)
        known = tree._processes[other.pid]
        monkeypatch.setattr(known, "_ident", (other.pid, 1.0))
        tree.signal(other.pid, signal.SIGKILL)
        assert other.poll() is None
        other.kill()


def test_a_halted_process_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        tree = ProcessTree(process)
        assert not tree.is_stopped(process.pid)
        tree.signal(process.pid, signal.SIGSTOP)
        while not tree.is_stopped(process.pid):
            assert process.poll() is None
        assert tree.kill() == []


def test_an_unknown_process_is_never_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
            ProcessTree(process).signal(other.pid, signal.SIGKILL)
            assert other.poll() is None
            other.kill()
        process.kill()
