"""Every example runs, before and after, with the same losses; nfold's lines are few and counted."""

from __future__ import annotations

import difflib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FOLDERS = sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir())
OWN_WORKLOADS = {"own_workload": "handwriting:digits:width=32"}
NAMES = ["gpt", "resnet", "vit"]
MOST_LINES = 7
SHORT = ("--epochs", "1", "--steps", "12", "--in-order")
# The arguments of data.py behind the path that it writes; None: the script reads no file.
DATA: dict[str, tuple[str, ...] | None] = {"gpt": ("../../LICENSE",), "resnet": (), "vit": None}
OPTIONS = {"gpt": ("--length", "32")}
ROW = re.compile(r"^\| \[(\w+)\]\(\w+\) \|.*\| (\d+) \| (\d+) \|$", re.MULTILINE)


def lines(name: str, which: str) -> list[str]:
    text = (EXAMPLES / name / f"{which}.py").read_text()
    return [line for line in text.splitlines() if line.strip()]


def launched(name: str, script: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """What a script of an example prints."""
    done = subprocess.run(
        [*(launcher or (sys.executable,)), script, *arguments],
        cwd=EXAMPLES / name,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, ...]]:
    """The arguments that name the data of an example, made once."""

    @functools.cache
    def make(name: str) -> tuple[str, ...]:
        arguments = DATA[name]
        if arguments is None:
            return ()
        path = str(tmp_path_factory.mktemp(name) / "data")
        launched(name, "data.py", path, *arguments)
        return (path,)

    return make


@pytest.fixture(scope="module")
def losses(data: Callable[[str], tuple[str, ...]]) -> Callable[..., list[float]]:
    """The losses that a script prints, launched once by the words ``launcher``."""

    @functools.cache
    def run(name: str, which: str, *launcher: str) -> list[float]:
        arguments = (*data(name), *SHORT, *OPTIONS.get(name, ()))
        text = launched(name, f"{which}.py", *arguments, launcher=launcher)
        assert all(0 <= float(found) <= 1 for found in re.findall(r"accuracy ([0-9.]+)", text))
        return [float(found) for found in re.findall(r"loss ([0-9.]+)", text)]

    return run


def test_every_example_has_both_scripts_and_a_test() -> None:
    assert sorted([*OWN_WORKLOADS, *NAMES]) == FOLDERS
    assert sorted(DATA) == NAMES
    for name in NAMES:
        assert (EXAMPLES / name / "before.py").exists()
        assert (EXAMPLES / name / "after.py").exists()


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_differ_as_the_table_says(name: str) -> None:
    changes = list(difflib.ndiff(lines(name, "before"), lines(name, "after")))
    added, removed = (sum(line.startswith(sign) for line in changes) for sign in ("+ ", "- "))
    table = {row[0]: row[1:] for row in ROW.findall((EXAMPLES / "README.md").read_text())}
    assert table[name] == (str(added), str(removed))
    assert 0 < added <= MOST_LINES
    assert removed <= MOST_LINES
    assert "nfold" not in "\n".join(lines(name, "before"))


@pytest.mark.slow(parts=8)
@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", NAMES)
def test_losses_before_and_after_are_equal(losses: Callable[..., list[float]], name: str) -> None:
    before, after = losses(name, "before"), losses(name, "after")
    assert len(before) == 3
    assert after == pytest.approx(before, rel=1e-3)


@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_devices_train_as_one(
    losses: Callable[..., list[float]], name: str, tmp_path: Path
) -> None:
    """The same samples in the same order; only batch norm is that of a device."""
    nfold = str(Path(sys.executable).with_name("nfold"))
    launcher = (nfold, "run", "--nproc-per-node", "2", "--results", str(tmp_path))
    one, two = losses(name, "after"), losses(name, "after", *launcher)
    assert two == pytest.approx(one, rel=0.5 if name == "resnet" else 1e-3)


@pytest.mark.slow(parts=8)
@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", OWN_WORKLOADS)
def test_an_own_workload_trains(name: str, tmp_path: Path) -> None:
    nfold = [sys.executable, "-P", "-m", "nfold", "train", OWN_WORKLOADS[name]]
    command = [*nfold, "--devices", "cpu:1", "--epochs", "3", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=EXAMPLES / name, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"^accuracy ([0-9.]+)", done.stdout)
    assert float(accuracy) > 0.6
