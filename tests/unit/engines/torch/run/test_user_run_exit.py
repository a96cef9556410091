"""At the end of a script nfold waits for busy threads, in a process without other tests' threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nfold.core.errors import MachineUnfit
from nfold.engines.torch.run.job import join_job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are seen on Linux only")

BEGIN = """
import threading
from nfold.engines.torch.run.job import wait_for_idle_threads

over, counted = threading.Event(), []

def count():
    counted.append(sum(range(5_000_000)))

def spin():
    while not over.is_set():
        pass
"""


def _in_its_process(body: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + body], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_waiting_threads_are_idle() -> None:
    output = _in_its_process("""
waiting = threading.Thread(target=over.wait)
waiting.start()
print(wait_for_idle_threads(max_wait_s=60), waiting.is_alive())
over.set()
""")
    assert output == "True True"


def test_a_busy_thread_delays_the_exit() -> None:
    output = _in_its_process("""
threading.Thread(target=count).start()
print(wait_for_idle_threads(max_wait_s=60), len(counted))
""")
    assert output == "True 1"


def test_the_wait_for_a_busy_thread_is_limited() -> None:
    output = _in_its_process("""
threading.Thread(target=spin).start()
print(wait_for_idle_threads(max_wait_s=0.1))
over.set()
""")
    assert output == "False"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK='first' in the environment: allowed are"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment: allowed are"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 in the environment: .* below WORLD_SIZE=2"),
    ],
)
def test_a_job_that_the_environment_does_not_describe_is_refused(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MachineUnfit, match=expected):
        join_job("cpu")
