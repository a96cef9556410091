"""`nfold run` as a user runs it: real ranks on CPU devices, ended in every way; nothing left."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
LIMIT_S = 120.0

REDUCE = """
import json, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(json.dumps([dist.get_rank(), total.item(), sys.argv[1:]]))
dist.destroy_process_group()
"""
FAIL = """
import os, time
def train():
    raise ValueError("no such\\x1b[31m thing")
if os.environ["RANK"] == "1":
    train()
time.sleep(600)
"""
WAIT = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("waiting", os.environ["RANK"], flush=True)
time.sleep(600)
"""
AGAIN = """
import os, sys
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""
HANG = """
import os, time
from pathlib import Path
from nfold.engines.base import Phase
from nfold.launch.handoff import HandoffFolder, HeartbeatWriter
rank = int(os.environ["RANK"])
folder = HandoffFolder(Path(os.environ["NFOLD_FOLDER"]))
heart = HeartbeatWriter(folder.reports.heartbeat_file(rank), os.getpid())
def step_forever():
    while True:
        time.sleep(0.01)
for step in range(1, 4 - rank):
    heart.beat(Phase.STEPPING, step, 0, time.monotonic_ns())
step_forever()
"""
DDP = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
train(5)
print("waiting", flush=True)
if sys.argv[1] == "evaluates":
    until = time.monotonic() + float(sys.argv[2])
    while dist.get_rank() == 0 and time.monotonic() < until:
        sum(range(1000))
    dist.barrier()
    train(2)
elif sys.argv[1] == "deadlocks" and dist.get_rank() == 1:
    time.sleep(600)
elif sys.argv[1] == "leaves" and dist.get_rank() == 1:
    dist.barrier()
else:
    train(10**9)
dist.destroy_process_group()
"""
BEFORE_THE_FIRST_STEP = """
import time
from torch.utils.data import DataLoader
for batch in DataLoader([1, 2, 3]):
    time.sleep(600)
"""
UNEVEN = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
class Samples:
    def __len__(self): return 60
    def __getitem__(self, index):
        time.sleep(0.05 * dist.get_rank())
        return torch.ones(4)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Samples(), batch_size=2):
    model(batch).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
PREPARE = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
until = time.monotonic() + float(sys.argv[2])
if os.environ["RANK"] == "0":
    with open("prepared", "wb") as file:
        while time.monotonic() < until:
            exec(sys.argv[1])
dist.barrier()
os._exit(0)
"""
DISAGREE = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    exec(compile("\\n" * 6 + sys.argv[1], "train.py", "exec"))
dist.all_reduce(torch.ones(1))
"""
DETACH = """
import subprocess
subprocess.Popen(["sleep", "600"], start_new_session=True, env={"PATH": "/usr/bin:/bin"})
"""
DEBUG = """
import os, sys
if os.environ["RANK"] == "0":
    value = 3
    breakpoint()
    print("answer", input("name? "), sys.stdin.isatty())
else:
    print("waiting", repr(sys.stdin.read()))
"""
SIZES = """
import os, sys
print(os.popen("stty size").read().strip())
print(os.get_terminal_size().columns)
print(sys.stdout.isatty())
"""
PROMPT = """
import os, time
from pathlib import Path
from nfold.engines.base import Phase
from nfold.launch.handoff import HandoffFolder, HeartbeatWriter
folder = HandoffFolder(Path(os.environ["NFOLD_FOLDER"]))
heart = HeartbeatWriter(folder.reports.heartbeat_file(int(os.environ["RANK"])), os.getpid())
heart.beat(Phase.STEPPING, 1, 0, time.monotonic_ns())
print("waiting", flush=True)
if os.environ["RANK"] == "0":
    print("answer", input("name? "))
    Path("answered").touch()
while not os.path.exists("answered"):
    time.sleep(0.05)
"""
HANG_TIMEOUT_S = 4.0
LONGER_S = 9.0
HANG_TIMEOUT = ("--hang-timeout", str(HANG_TIMEOUT_S))
TIMEOUTS = (*HANG_TIMEOUT, "--start-timeout", str(HANG_TIMEOUT_S))


class Place:
    """A folder with a script, and ``nfold run`` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, code: str, *arguments: str, flags: tuple[str, ...] = (), stdin: int | None = None
    ) -> psutil.Process:
        (self.folder / "train.py").write_text(code)
        target = [] if {"-m", "--no-python"} & {*flags} else ["train.py"]
        process = subprocess.Popen(
            [sys.executable, "-m", "nfold", "run", *flags, *target, *arguments],
            cwd=self.folder,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        self.started.append(process)
        return psutil.Process(process.pid)

    def end(self) -> tuple[int, str, str]:
        out, err = self.started[-1].communicate(timeout=LIMIT_S)
        return self.started[-1].returncode, out, err

    def run(self, code: str, *arguments: str, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        self.start(code, *arguments, flags=flags)
        return self.end()

    @property
    def results(self) -> Path:
        (found,) = (self.folder / "nfold-results" / "runs").iterdir()
        return found

    @property
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.results / "run.json").read_text())
        return found

    def wait_for_ranks(self, nfold: psutil.Process, ranks: int = 2) -> list[psutil.Process]:
        """Wait until every rank has printed; all processes of the run but nfold itself."""
        while not all(self._waits(rank) for rank in range(ranks)):
            assert self.started[-1].poll() is None, self.end()
            time.sleep(0.05)
        return list(nfold.children(recursive=True))

    def _waits(self, rank: int) -> bool:
        files = list(self.folder.glob(f"nfold-results/runs/*/rank-{rank}.log"))
        return bool(files) and "waiting" in files[0].read_text()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()
    for left in psutil.process_iter():
        if _of(left, tmp_path):
            left.kill()


def _of(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(process.environ().get("NFOLD_FOLDER", "")).startswith(f"{folder}{os.sep}")
    except (psutil.Error, OSError):
        return False


def _gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _ranks(tree: list[psutil.Process]) -> list[psutil.Process]:
    found = [p for p in tree if "nfold.launch.script_process" in p.cmdline()]
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))


def _agent(tree: list[psutil.Process]) -> psutil.Process:
    (found,) = (p for p in tree if "nfold.launch.agent" in p.cmdline())
    return found


def test_two_ranks_compute_together_and_arguments_are_untouched(place: Place) -> None:
    arguments = ["--debug", "--nproc_per_node", "7", "-m", "--", "--plan"]
    flags = ("--nproc_per_node=2", "--local-ranks-filter", "0,1")
    code, out, err = place.run(REDUCE, *arguments, flags=flags)
    assert code == 0, err
    lines = sorted(out.splitlines())
    assert lines == [f"[rank {r}] {json.dumps([r, 3.0, arguments])}" for r in range(2)]
    assert err == f"nfold: logs in {place.results.relative_to(place.folder)}\n"
    assert (place.facts["exit_code"], place.facts["status"]) == (0, "ok")
    assert place.facts["asked"]["arguments"] == arguments
    for name in ("rank-0.log", "rank-1.log", "agent.log", "telemetry.csv"):
        assert (place.results / name).exists()


@pytest.mark.slow(parts=8)
def test_a_module_on_the_default_device(place: Place) -> None:
    code, out, err = place.run(REDUCE, "train", "-x", flags=("-m",))
    assert code == 0, err
    assert json.loads(out) == [0, 1.0, ["-x"]]


def test_a_failing_rank_is_the_root_cause_and_comes_first(place: Place) -> None:
    code, out, err = place.run(FAIL, flags=("--devices", "2"))
    assert (code, out) == (1, "")
    first = "nfold: error: rank 1 failed first: ValueError: no such\\x1b[31m thing (train.py:4)"
    assert err.splitlines()[0] == first
    assert str(place.results.relative_to(place.folder)) in err
    assert place.facts["cause"]["rank"] == 1
    assert "Traceback" in (place.results / "rank-1.log").read_text()


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("victim", ["rank", "agent", "nfold"])
def test_a_sigkill_leaves_nothing_of_the_run(place: Place, victim: str) -> None:
    nfold = place.start(WAIT, flags=("--devices", "2"))
    tree = place.wait_for_ranks(nfold)
    struck = {"rank": _ranks(tree)[1], "agent": _agent(tree), "nfold": nfold}[victim]
    assert len([p for p in tree if p.name() == "sleep"]) == 2  # in sessions of their own
    os.kill(struck.pid, signal.SIGKILL)
    assert _gone(tree)
    if victim != "nfold":
        code, _, err = place.end()
        assert code == 1
        who = {"rank": "rank 1", "agent": "the agent"}[victim]
        assert err.startswith(f"nfold: error: {who} was ended by SIGKILL")


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("victim", ["agent", "nfold"])
def test_a_sigkill_leaves_no_child_of_a_program(place: Place, victim: str) -> None:
    """The kernel ends the shell, which is a rank, but not its child."""
    shell = ("bash", "-c", f"{sys.executable} train.py; true")
    nfold = place.start(WAIT, *shell, flags=("--no-python", "--devices", "2"))
    tree = place.wait_for_ranks(nfold)
    assert len([p for p in tree if p.cmdline()[1:] == ["train.py"]]) == 2
    os.kill({"agent": _agent(tree), "nfold": nfold}[victim].pid, signal.SIGKILL)
    assert _gone(tree)


@pytest.mark.slow(parts=8)
def test_a_sigkill_of_nfold_leaves_another_run_alone(place: Place, tmp_path: Path) -> None:
    other = Place(tmp_path / "other")
    other.folder.mkdir()
    kept = other.wait_for_ranks(other.start(WAIT), ranks=1)
    try:
        nfold = place.start(WAIT)
        tree = place.wait_for_ranks(nfold, ranks=1)
        os.kill(nfold.pid, signal.SIGKILL)
        assert _gone(tree)
        assert all(process.is_running() for process in kept)
    finally:
        os.kill(other.started[0].pid, signal.SIGINT)
        assert other.end()[0] == 130


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_request_to_stop_ends_everything(place: Place, signum: signal.Signals, code: int) -> None:
    nfold = place.start(WAIT, flags=("--devices", "2"))
    tree = place.wait_for_ranks(nfold)
    os.kill(nfold.pid, signum)
    ended, out, err = place.end()
    assert ended == code
    assert _gone(tree)
    assert "waiting 0" in out
    assert signum.name in err
    assert place.facts["status"] == "interrupted"


@pytest.mark.slow(parts=8)
def test_a_second_interrupt_stops_at_once(place: Place) -> None:
    """While ranks that ignore the first one are still given their time."""
    stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + WAIT
    nfold = place.start(stubborn, flags=("--devices", "2"))
    tree = place.wait_for_ranks(nfold)
    while place.started[-1].poll() is None:  # two that come together are one
        os.kill(nfold.pid, signal.SIGINT)
        time.sleep(0.05)
    assert place.end()[0] == 130
    assert "status" not in place.facts
    assert _gone(tree)


@pytest.mark.slow(parts=8)
def test_a_restart_makes_good(place: Place) -> None:
    assert place.run(AGAIN, flags=("--devices", "2", "--max-restarts", "1"))[0] == 0
    assert place.facts["status"] == "ok"


@pytest.mark.slow(parts=8)
def test_a_script_that_stops_beating_is_hung(place: Place) -> None:
    code, _, err = place.run(HANG, flags=("--devices", "2", "--hang-timeout", "1.5"))
    assert code == 1
    assert err.startswith("nfold: error: hung: rank 1 made no progress after step 2")
    assert "--hang-timeout SECONDS" in err
    for rank in range(2):
        assert "step_forever" in (place.results / f"stack-{rank}.txt").read_text()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_stopped_rank_of_a_plain_script_is_named(place: Place, victim: int) -> None:
    nfold = place.start(DDP, "forever", flags=("--devices", "2", *HANG_TIMEOUT))
    tree = place.wait_for_ranks(nfold)
    _ranks(tree)[victim].send_signal(signal.SIGSTOP)
    code, _, err = place.end()
    assert code == 1
    assert err.startswith(f"nfold: error: hung: rank {victim} was stopped by a signal (SIGSTOP)")
    assert place.facts["status"] == "hung"
    assert place.facts["cause"]["rank"] == victim
    assert _gone(tree)


@pytest.mark.slow
def test_ranks_that_all_wait_are_hung(place: Place) -> None:
    code, _, _ = place.run(DDP, "deadlocks", flags=("--devices", "2", *HANG_TIMEOUT))
    assert code == 1
    assert place.facts["status"] == "hung"


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize(
    "code", [WAIT, pytest.param(BEFORE_THE_FIRST_STEP, marks=pytest.mark.slow)]
)
def test_a_start_in_which_nothing_happens_is_hung(place: Place, code: str) -> None:
    ended, _, err = place.run(code, flags=("--devices", "2", *TIMEOUTS))
    assert ended == 1
    assert place.facts["status"] == "hung"
    assert "train.py:" in err


@pytest.mark.slow
@pytest.mark.parametrize("work", ["sum(range(10**5))", "file.write(bytes(10**5)); time.sleep(0.1)"])
def test_a_long_preparation_of_data_is_left_alone(place: Place, work: str) -> None:
    """While the other rank waits for it, longer than all limits."""
    code, _, err = place.run(PREPARE, work, str(LONGER_S), flags=("--devices", "2", *TIMEOUTS))
    assert code == 0, err


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize(
    ("wrong", "operations"),
    [
        ("dist.barrier()", ("all_reduce (train.py:8)", "barrier (train.py:7)")),
        pytest.param(
            "time.sleep(600)", ("all_reduce (train.py:8)", "train.py:7"), marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_that_disagree_are_named_with_their_operations(
    place: Place, wrong: str, operations: tuple[str, str]
) -> None:
    code, _, err = place.run(DISAGREE, wrong, flags=("--devices", "2", *TIMEOUTS))
    assert code == 1
    assert place.facts["status"] == "hung", err
    for rank, operation in enumerate(operations):
        assert f"rank {rank} is in {operation}" in err


@pytest.mark.slow(parts=8)
def test_a_rank_that_leaves_the_loop_early_is_named(place: Place) -> None:
    code, _, err = place.run(DDP, "leaves", flags=("--devices", "2", *HANG_TIMEOUT))
    assert code == 1
    assert "rank 0 is in backward (train.py:" in err
    assert "rank 1 is in barrier (train.py:" in err


@pytest.mark.slow
def test_an_evaluation_longer_than_the_hang_timeout_is_left_alone(place: Place) -> None:
    code, _, err = place.run(
        DDP, "evaluates", str(LONGER_S), flags=("--devices", "2", *HANG_TIMEOUT)
    )
    assert code == 0, err


@pytest.mark.slow(parts=8)
def test_a_debugger_on_rank_0_reads_the_terminal(place: Place) -> None:
    terminal, stdin = pty.openpty()
    place.start(DEBUG, flags=("--devices", "2"), stdin=stdin)
    os.write(terminal, b"p value * 14\nc\nAda\n")
    code, out, err = place.end()
    assert code == 0, err
    assert "(Pdb) 42\n" in out
    assert "answer Ada True\n" in out
    assert (place.results / "rank-1.log").read_text() == "waiting ''\n"


@pytest.mark.slow(parts=8)
def test_every_rank_knows_the_size_of_its_terminal(place: Place) -> None:
    terminal, stdin = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 72))
    place.start(SIZES, flags=("--devices", "2"), stdin=stdin)
    code, _, err = place.end()
    assert code == 0, err
    sizes = [(place.results / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert sizes == ["24 72\n72\nFalse\n", "30 100\n100\nFalse\n"]


@pytest.mark.slow(parts=8)
def test_a_rank_that_waits_for_input_is_not_hung(place: Place) -> None:
    terminal, stdin = pty.openpty()
    nfold = place.start(PROMPT, flags=("--devices", "2", *HANG_TIMEOUT), stdin=stdin)
    place.wait_for_ranks(nfold)
    time.sleep(LONGER_S)
    os.write(terminal, b"Ada\n")
    code, out, err = place.end()
    assert code == 0, err
    assert "answer Ada\n" in out


@pytest.mark.slow(parts=8)
def test_an_interrupted_script_prints_one_line(place: Place) -> None:
    nfold = place.start(DDP, "forever", flags=("--devices", "2"))
    place.wait_for_ranks(nfold)
    os.kill(nfold.pid, signal.SIGINT)
    code, out, err = place.end()
    assert (code, out) == (130, "waiting\n")
    assert err == f"nfold: stopped, got SIGINT; logs in {place.results.relative_to(place.folder)}\n"


@pytest.mark.slow(parts=8)
def test_a_detached_process_is_named_and_left_running(place: Place) -> None:
    code, _, err = place.run(DETACH)
    assert code == 0
    (warning,) = [line for line in err.splitlines() if "warning" in line]
    left = psutil.Process(int(warning.rpartition(" ")[2]))
    assert left.cmdline() == ["sleep", "600"]
    assert f"{left.pid} (sleep 600)" in warning
    left.kill()


def test_a_rank_of_another_launcher_gets_no_guardian(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    code = (
        "import os, psutil\n"
        "print(os.environ.get('NFOLD_SESSION'), psutil.Process().children(recursive=True))"
    )
    assert place.run(code) == (0, "None []\n", "")


@pytest.mark.slow(parts=8)
def test_a_watched_run_names_the_rank_that_others_wait_for(place: Place) -> None:
    code, _, err = place.run(UNEVEN, flags=("--devices", "cpu:2", "--watch"))
    assert code == 0, err
    assert "nfold: 20 steps of" in err
    assert "the slowest is rank 1: others wait" in err
    seen = [json.loads((place.results / f"watch-{rank}.json").read_text()) for rank in (0, 1)]
    input_s, exchange_s = (
        [sum(window[name] for window in rank["windows"]) for rank in seen]
        for name in ("input_s", "exchange_s")
    )
    assert input_s[1] > 20 * 0.1
    assert input_s[1] > input_s[0]
    assert exchange_s[0] > exchange_s[1]


def test_a_program_cannot_be_watched(place: Place) -> None:
    code, _, err = place.run("", flags=("--no-python", "--watch", "true"))
    assert code == 2
    assert "--watch needs a Python script" in err
