"""A rank's side of `nfold run`: the script runs as under plain Python, its failure is data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nfold.engines.base import Phase
from nfold.launch import script_process
from nfold.launch.handoff import HandoffFolder, HeartbeatWriter

SHOW = """
import json, multiprocessing, pickle, sys
import beside
class Own: pass
if __name__ == "__main__":
    main = sys.modules["__main__"]
    print(json.dumps([sys.argv, sys.path[0], __name__, __file__, main.__file__, __package__,
        str(__spec__ and __spec__.name), pickle.loads(pickle.dumps(Own())).__class__.__module__]))
"""
LATE = """
import atexit, pickle
class Own: pass
atexit.register(lambda: print(pickle.loads(pickle.dumps(Own()))))
"""


def rank(folder: Path, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run one rank to its end; its output is in the folder's log."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    asked = [sys.executable, "-P", "-m", "nfold.launch.script_process", str(folder), *command]
    return subprocess.run(
        asked, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder with a script, the same one as a module of a package, and a module beside both."""
    folder = tmp_path / "scripts"
    (folder / "package").mkdir(parents=True)
    for place in ("show.py", "package/shown.py", "package/__main__.py"):
        (folder / place).write_text(SHOW)
    (folder / "beside.py").touch()
    (folder / "package" / "beside.py").touch()
    return folder


@pytest.mark.parametrize(
    ("kind", "target", "plain"),
    [
        ("script", "show.py", ["show.py"]),
        ("script", "./package/../show.py", ["./package/../show.py"]),
        ("module", "package.shown", ["-m", "package.shown"]),
        ("module", "package", ["-m", "package"]),
        ("script", "package", ["{scripts}/package"]),
    ],
)
def test_a_script_sees_what_it_sees_under_python(
    scripts: Path, tmp_path: Path, kind: str, target: str, plain: list[str]
) -> None:
    arguments = ["--debug", "-m", "--", "a b"]
    by_nfold = rank(tmp_path / "run", kind, "0", target, *arguments, cwd=scripts)
    by_python = subprocess.run(
        [sys.executable, *(part.format(scripts=scripts) for part in plain), *arguments],
        cwd=scripts,
        capture_output=True,
        text=True,
        check=True,
    )
    log = HandoffFolder(tmp_path / "run").rank_log(1).read_text()
    assert (by_nfold.returncode, by_nfold.stdout) == (0, "")
    assert json.loads(log) == json.loads(by_python.stdout)


def test_main_is_still_there_at_exit(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    assert rank(tmp_path / "run", "script", "0", "late.py", cwd=tmp_path).returncode == 0
    assert "__main__.Own" in HandoffFolder(tmp_path / "run").rank_log(1).read_text()


def test_an_exception_is_a_failure_that_names_the_users_line(tmp_path: Path) -> None:
    code = "import json\n\ndef load():\n    return json.loads('{')\n\nload()\n"
    (tmp_path / "train.py").write_text(code)
    assert rank(tmp_path / "run", "script", "0", "train.py", cwd=tmp_path).returncode == 1
    (failure,) = HandoffFolder(tmp_path / "run").reports.read_failures()
    assert failure.text.startswith("JSONDecodeError: Expecting property name")
    assert failure.text.endswith("(train.py:4 `return json.loads('{')`)")
    assert (failure.rank, failure.status, failure.collateral) == (1, "crashed", False)
    assert failure.monotonic_ns > 0
    log = HandoffFolder(tmp_path / "run").rank_log(1).read_text()
    assert log.startswith("Traceback (most recent call last):\n")
    assert "nfold" not in log


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("a = 1\nb = = 2\n")
    assert rank(tmp_path / "run", "script", "0", "train.py", cwd=tmp_path).returncode == 1
    (failure,) = HandoffFolder(tmp_path / "run").reports.read_failures()
    assert failure.text.endswith("(train.py:2)")


@pytest.mark.parametrize(("code", "failures"), [("0", 0), ("3", 1), ("'no'", 1), ("None", 0)])
def test_exit_codes_are_kept(tmp_path: Path, code: str, failures: int) -> None:
    (tmp_path / "train.py").write_text(f"import sys\nsys.exit({code})\n")
    expected = subprocess.run([sys.executable, tmp_path / "train.py"], check=False).returncode
    done = rank(tmp_path / "run", "script", "0", "train.py", cwd=tmp_path)
    assert done.returncode == expected
    assert len(HandoffFolder(tmp_path / "run").reports.read_failures()) == failures


def test_the_users_own_excepthook_is_called(tmp_path: Path) -> None:
    code = "import sys\nsys.excepthook = lambda *_: print('own hook')\nraise ValueError\n"
    (tmp_path / "train.py").write_text(code)
    assert rank(tmp_path / "run", "script", "0", "train.py", cwd=tmp_path).returncode == 1
    assert HandoffFolder(tmp_path / "run").rank_log(1).read_text() == "own hook\n"


def test_a_program_is_run_as_it_is(tmp_path: Path) -> None:
    done = rank(tmp_path / "run", "program", "0", "sh", "-c", "echo $RANK $0; exit 5", "-x")
    assert done.returncode == 5
    assert HandoffFolder(tmp_path / "run").rank_log(1).read_text() == "1 -x\n"


def test_a_cpu_device_is_its_share_of_the_cores(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    (tmp_path / "show.py").write_text("import os\nprint(sorted(os.sched_getaffinity(0)))\n")
    rank(tmp_path / "run", "script", "1", "show.py", cwd=tmp_path)
    assert HandoffFolder(tmp_path / "run").rank_log(1).read_text() == f"[{cores[1]}]\n"


def test_what_an_attempt_before_a_restart_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder = HandoffFolder(tmp_path / "run")
    for one in (0, 1):
        HeartbeatWriter(folder.reports.heartbeat_file(one), pid=2**22 + 1).close()
    HeartbeatWriter(folder.reports.heartbeat_file(2), pid=os.getpid()).close()
    folder.reports.write_failure(script_process.script_failure(ValueError("before"), 0, None))
    folder.reset_rank(0, 0)
    assert folder.reports.read_failures() == []
    assert list(folder.reports.read_heartbeats()) == [2]


def test_a_rank_that_ended_well_is_done_not_silent(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom nfold.launch.handoff import HandoffFolder, HeartbeatWriter\nfrom pathlib import Path\n"
        f"file = HandoffFolder(Path({str(tmp_path / 'run')!r})).reports.heartbeat_file(1)\n"
        "HeartbeatWriter(file, os.getpid()).close()\n"
    )
    (tmp_path / "train.py").write_text(code)
    rank(tmp_path / "run", "script", "0", "train.py", cwd=tmp_path)
    beat = HandoffFolder(tmp_path / "run").reports.read_heartbeat(1)
    assert beat is not None
    assert beat.phase == Phase.FINISHED


LEARN = """
import os, sys, torch
from nfold.launch.handoff import HandoffFolder
from pathlib import Path
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
def report():
    print(HandoffFolder(Path(sys.argv[1])).reports.read_heartbeat(1))
report()
for batch in torch.utils.data.DataLoader(range(2)):
    pass
report()
for _ in range(3):
    optimizer.step()
torch.compile(optimizer.step, backend="eager")()
optimizer.step()
if os.fork() == 0:
    optimizer.step()
    os._exit(0)
os.wait()
report()
"""


@pytest.mark.slow(parts=8)
def test_steps_and_batches_of_a_script_are_signs_of_life(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEARN)
    folder = HandoffFolder(tmp_path / "run")
    done = rank(folder.path, "script", "0", "train.py", str(folder.path), cwd=tmp_path)
    assert done.returncode == 0
    log = folder.rank_log(1).read_text()
    lines = [one for one in log.splitlines() if "HeartbeatRecord" in one]
    assert "UserWarning" not in log
    assert "Phase.STARTING" in lines[0]
    assert "FIRST_STEP: 1>, step=0" in lines[1]
    assert "STEPPING: 2>, step=4" in lines[2]
    beat = folder.reports.read_heartbeat(1)
    assert beat is not None
    assert (beat.phase, beat.step, beat.is_inferred) == (Phase.FINISHED, 4, True)


@pytest.mark.slow(parts=8)
def test_a_script_that_reports_itself_is_not_overruled(tmp_path: Path) -> None:
    own = (
        "import os, sys, torch\nfrom nfold.launch.handoff import HandoffFolder, HeartbeatWriter\n"
        "from pathlib import Path\nfile = HandoffFolder(Path(sys.argv[1])).reports.heartbeat_file(1)\n"
        "HeartbeatWriter(file, os.getpid()).beat(2, 7, 0, 1)\n"
        "torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()\n"
    )
    (tmp_path / "train.py").write_text(own)
    folder = HandoffFolder(tmp_path / "run")
    rank(folder.path, "script", "0", "train.py", str(folder.path), cwd=tmp_path)
    beat = folder.reports.read_heartbeat(1)
    assert beat is not None
    assert (beat.step, beat.is_inferred) == (7, False)


def test_an_interrupt_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "try:\n    raise KeyboardInterrupt\nfinally:\n    print('saved')\n"
    )
    assert rank(tmp_path / "run", "script", "0", "train.py", cwd=tmp_path).returncode == 130
    folder = HandoffFolder(tmp_path / "run")
    assert folder.rank_log(1).read_text() == "saved\n"
    assert folder.reports.read_failures() == []


def test_a_lost_rank_stays_lost_where_the_script_wraps_it() -> None:
    import torch  # noqa: F401  # what was raised is PyTorch's only where PyTorch is there

    lost = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:5505")
    wrapped = ValueError("training failed")
    wrapped.__cause__ = lost
    assert script_process.script_failure(wrapped, 0, 3).collateral
    assert not script_process.script_failure(ValueError("own"), 0, 3).collateral


LATER = """
import atexit, sys, threading, time
def late(): time.sleep(0.3); print("thread")
threading.Thread(target=late).start()
atexit.register(print, "handler")
print("script", end="; ")
if len(sys.argv) > 1: sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("arguments", "code"), [((), 0), (("0",), 0), (("3",), 3)])
def test_threads_and_exit_handlers_have_their_turn(
    tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    (tmp_path / "later.py").write_text(LATER)
    done = rank(tmp_path / "run", "script", "0", "later.py", *arguments, cwd=tmp_path)
    assert done.returncode == code
    assert HandoffFolder(tmp_path / "run").rank_log(1).read_text() == "script; thread\nhandler\n"
