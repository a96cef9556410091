"""Waiting for processes until they leave the cores alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from nfold.launch import workload_process

BUSY = """
import sys, time
print("ready", flush=True)
sys.stdin.readline()
{work}
print("over", flush=True)
sys.stdin.read()
"""
BURN = "end = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that begins its work when it reads a line, says when it is over, and stays."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY.format(work=request.param)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with process:
        yield process
        process.kill()


def _begin(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


@pytest.mark.parametrize("child", [BURN.format(seconds=0.8)], indirect=True)
def test_a_child_that_works_is_waited_for(child: subprocess.Popen[str]) -> None:
    _begin(child)
    assert workload_process.wait_for_idle_children(60.0) < 60.0
    times = psutil.Process(child.pid).cpu_times()
    assert times.user + times.system > 0.7
    assert child.stdout is not None
    assert child.stdout.readline() == "over\n"


@pytest.mark.parametrize("child", ["while True: pass"], indirect=True)
def test_one_that_works_for_ever_is_not(child: subprocess.Popen[str]) -> None:
    _begin(child)
    assert workload_process.wait_for_idle_children(0.3) >= 0.3
    assert child.poll() is None


@pytest.mark.parametrize("child", ["pass"], indirect=True)
def test_an_idle_one_costs_a_moment(child: subprocess.Popen[str]) -> None:
    _begin(child)
    assert child.stdout is not None
    child.stdout.readline()
    assert workload_process.wait_for_idle_children(60.0) < 30.0
