"""A script that does something else than training is told so in its own words."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from nfold.core.errors import RunFailure
from nfold.core.workload import Workload
from nfold.instrument import script_rank
from nfold.instrument.hooks.patches import Patches

WAITS = """
import sys, time
{}
sys.stdout.write("ready\\n"); sys.stdout.flush()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("packages", "name"),
    [
        ((), "inner.train"),
        (("inner",), "inner.train"),
        (("outer", "outer/inner"), "outer.inner.train"),
    ],
)
def test_relative_import_failure_names_the_module(
    packages: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    file = tmp_path / "outer/inner/train.py"
    file.parent.mkdir(parents=True)
    for package in packages:
        (tmp_path / package.removeprefix("inner") / "__init__.py").touch()
    error = ImportError("attempted relative import with no known parent package")
    script = Workload(name="train.py", script=(str(file),))
    assert f"next: -m {name} in place of its path" in str(
        script_rank.relative_import_failure(script, error)
    )
    assert script_rank.relative_import_failure(script, ImportError("No module named 'x'")) is None
    module = Workload(name=name, script=("-m", name))
    assert script_rank.relative_import_failure(module, error) is None


def _exited(call: object) -> str:
    with pytest.raises(SystemExit) as ended:
        call()  # type: ignore[operator]
    workload = Workload(name="train.py", script=("train.py", "--x", "1"))
    return str(script_rank.exit_failure(workload, ended.value))


def test_argparse_error_is_reported() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    told = _exited(lambda: parser.parse_args([]))
    assert "the following arguments are required: --data" in told
    assert "as in train.py -- --epochs 3" in told


def test_exit_code_or_message_is_reported() -> None:
    assert "exited: no config; next: run it by hand: python train.py --x 1" in _exited(
        lambda: sys.exit("no config")
    )
    assert "exited with code 3; next: run it by hand" in _exited(lambda: sys.exit(3))

    def click() -> None:
        try:
            raise ValueError("no such option: --lr")
        except ValueError:
            sys.exit(2)

    assert "exited: no such option: --lr; next: pass its arguments" in _exited(click)


def test_only_eof_on_stdin_is_a_stdin_failure() -> None:
    told = script_rank.stdin_failure("train.py", EOFError("EOF when reading a line"))
    assert "standard input" in str(told)
    assert script_rank.stdin_failure("train.py", EOFError("Ran out of input")) is None
    assert script_rank.stdin_failure("train.py", ValueError("EOF when reading a line")) is None


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Others whose patience is over at the first look; what is in the list says who stepped."""
    monkeypatch.setattr(script_rank, "CHILD_TRAINING_LIMIT_S", 0.0)
    monkeypatch.setattr(script_rank, "CHILD_CHECK_INTERVAL_S", 0.05)
    stepped = [False]
    others = script_rank.ChildTrainingDetector("launch.py", lambda: stepped[0])
    patches = Patches()
    others.install(patches)
    yield stepped
    patches.undo()


def _started(tmp_path: Path, begins: str, *arguments: str) -> subprocess.Popen[bytes]:
    script = tmp_path / "child.py"
    script.write_text(WAITS.format(begins))
    command = [sys.executable, str(script), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_child_process_that_trains_is_named(tmp_path: Path, hasty: list[bool]) -> None:
    del hasty
    with _started(tmp_path, "import torch", "--lr", "1") as process:
        with pytest.raises(RunFailure, match=r"\(child.py --lr 1\)") as told:
            process.wait()
        process.kill()
    assert str(told.value).endswith("next: child.py -- --lr 1 in place of launch.py")


def test_other_children_are_waited_for(tmp_path: Path, hasty: list[bool]) -> None:
    """A process without PyTorch, and any once the script has made a step."""
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", "import time; time.sleep(0.3)"]).returncode == 0
    assert time.monotonic() - began >= 0.3
    hasty[0] = True
    with _started(tmp_path, "import torch") as process:
        process.kill()
        assert process.wait() == -9


def _sleep() -> None:
    import torch

    time.sleep(60 if torch.__version__ else 0)


def test_spawned_children_are_named_and_forked_children_waited_for(hasty: list[bool]) -> None:
    del hasty
    spawned = get_context("spawn").Process(target=_sleep)
    spawned.start()
    with pytest.raises(RunFailure, match="by multiprocessing"):
        spawned.join()
    spawned.kill()
    spawned.join()
    assert spawned.exitcode == -9
    forked = get_context("fork").Process(target=time.sleep, args=(0.2,))
    forked.start()
    forked.join()
    assert forked.exitcode == 0
