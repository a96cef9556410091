"""How a rank's process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from nfold.launch.rank_lifecycle import find_current_call

WAITING = """
import sys, time
from pathlib import Path
from nfold.launch.rank_lifecycle import stacks_on_signal

with stacks_on_signal(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(600)
"""
REFERRED = """
import atexit
from torch.utils.data import DataLoader
from nfold.launch.rank_lifecycle import exit_after_handlers

loader = DataLoader(range(64), num_workers=2, persistent_workers=True)
batches = iter(loader)
next(batches)
workers = list(batches._workers)
atexit.register(lambda: print(sum(one.is_alive() for one in workers), "of", len(workers)))
exit_after_handlers()
"""
KILLED = """
import os
from torch.utils.data import DataLoader
from nfold.launch.rank_lifecycle import kill_children, exit_without_cleanup

loader = DataLoader(range(64), num_workers=4)
batches = iter(loader)
next(batches)
pids = [one.pid for one in batches._workers]
kill_children()
print(sum(os.path.exists(f"/proc/{pid}") for pid in pids), "of", len(pids), flush=True)
exit_without_cleanup(0)
"""
STOPPED = """
import psutil
from torch.utils.data import DataLoader
from nfold.launch.rank_lifecycle import exit_without_cleanup, kill_children, stopped_children

batches = iter(DataLoader(range(64), num_workers=2))
next(batches)
workers = [psutil.Process(one.pid) for one in batches._workers]
with stopped_children():
    while any(one.status() != psutil.STATUS_STOPPED for one in workers):
        pass
print(len([*batches]), flush=True)
kill_children()
exit_without_cleanup(0)
"""
PLAIN = """
import atexit
from nfold.launch.rank_lifecycle import exit_after_handlers

atexit.register(lambda: print("handled"))
exit_after_handlers()
"""


def _printed(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_workers_of_a_loader_are_stopped_for_a_while() -> None:
    assert _printed(STOPPED) == "63"


def test_workers_of_a_loader_are_gone_before_exit_handlers() -> None:
    """PyTorch waits for each of them there, for 5 s: nobody has told them to end."""
    assert _printed(REFERRED) == "0 of 2"


def test_the_death_of_a_loader_s_workers_is_no_failure() -> None:
    """PyTorch's handler of their signal raises it in whatever runs then; none of them is left."""
    assert _printed(KILLED) == "0 of 4"


def test_without_torch_exit_handlers_run_too() -> None:
    assert _printed(PLAIN) == "handled"


def test_a_rank_that_is_ended_leaves_its_place(tmp_path: Path) -> None:
    script, stacks = tmp_path / "train.py", tmp_path / "stack-0.txt"
    script.write_text(WAITING)
    command = [sys.executable, str(script), str(stacks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"ready\n"
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(60) == -signal.SIGTERM
    assert (find_current_call(stacks) or "").startswith("train.py:")
