"""Rest at the end of a script: threads that wait are at rest, a busy one is waited for.

In a process of its own, as at the end of a script: what other tests left running is no part of it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are seen on Linux only")

BEGIN = """
import threading
from nfold.engines.torch.run.job import let_threads_rest

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


def test_threads_that_wait_are_at_rest() -> None:
    said = _in_its_process("""
waiting = threading.Thread(target=over.wait)
waiting.start()
print(let_threads_rest(longest_s=60), waiting.is_alive())
over.set()
""")
    assert said == "True True"


def test_a_busy_thread_is_waited_for() -> None:
    said = _in_its_process("""
threading.Thread(target=count).start()
print(let_threads_rest(longest_s=60), len(counted))
""")
    assert said == "True 1"


def test_a_thread_that_never_rests_is_given_up() -> None:
    said = _in_its_process("""
threading.Thread(target=spin).start()
print(let_threads_rest(longest_s=0.1))
over.set()
""")
    assert said == "False"
