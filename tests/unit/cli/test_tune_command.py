"""``nfold tune`` from the command line: what it refuses, and what it says of a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nfold.cli.app import app
from nfold.cli.options import TUNE_OPTIONS
from nfold.cli.tune_command import script_files
from nfold.core.errors import NfoldError, RunFailure, UsageError
from nfold.core.workload import Workload
from nfold.tune import applied_patch
from nfold.tune.remedies import PERMISSIONS

TRAINS_NOTHING = "import torch\nprint(torch.ones(2).sum())\n"
OPTIONS = ["--devices", "cpu:1", "--budget", "20s", "--plain"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tune(*arguments: str) -> NfoldError:
    error = CliRunner().invoke(app, ["tune", *arguments]).exception
    assert isinstance(error, NfoldError)
    return error


def test_a_script_that_does_not_exist_is_refused() -> None:
    error = tune("gone.py", *OPTIONS)
    assert isinstance(error, UsageError)
    assert "script 'gone.py' cannot be read (No such file" in str(error)
    assert not Path("nfold-results").exists()


def test_an_unknown_permission_names_the_known_ones() -> None:
    Path("train.py").touch()
    error = str(tune("train.py", *OPTIONS, "--allow", "precison"))
    assert "unknown allow 'precison': allowed are precision, " in error
    assert "augmentation" in error


def test_the_help_names_all_permissions() -> None:
    assert all(name in str(TUNE_OPTIONS["allow"].help) for name in PERMISSIONS)


def test_a_read_only_script_is_refused_before_it_runs() -> None:
    script = Path("train.py")
    script.write_text(TRAINS_NOTHING)
    script.chmod(0o444)
    error = tune("train.py", *OPTIONS, "--apply")
    assert isinstance(error, UsageError)
    assert "train.py is read-only" in str(error)
    assert not Path("nfold-results/measurements").exists()


def test_an_applied_result_is_reverted_before_the_next_one() -> None:
    Path("train.py").write_text(TRAINS_NOTHING)
    record = Path("nfold-results/train/backup") / applied_patch.RECORD
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    assert "next: nfold tune SCRIPT --revert" in str(tune("train.py", *OPTIONS, "--apply"))


def test_nothing_to_revert_is_an_error() -> None:
    Path("train.py").touch()
    assert "no result of nfold tune is applied" in str(tune("train.py", "--revert"))
    assert "--revert needs the script" in str(tune("--revert"))


@pytest.mark.slow
@pytest.mark.integration
def test_a_script_that_trains_nothing_is_an_error() -> None:
    Path("train.py").write_text(TRAINS_NOTHING)
    error = tune("train.py", *OPTIONS)
    assert isinstance(error, RunFailure)
    assert "without a step of a torch optimizer" in str(error)
    assert not Path("nfold-results/train/nfold.toml").exists()


@pytest.mark.parametrize(
    ("script", "files"),
    [(("train.py",), [Path("train.py")]), (("-m", "package.train"), []), ((), [])],
)
def test_the_file_of_a_script_is_checked(script: Any, files: list[Path]) -> None:
    assert script_files(Workload(name="train.py", script=script)) == files
