"""nfold explain of a script: whose an argument is, and what is wrong with a request."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nfold.cli import explain_command
from nfold.cli.app import app
from nfold.cli.explain_command import ExplainOptions, is_script
from nfold.core.errors import NfoldError, UsageError


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "broken.py").write_text("x = 1\nif x\n")
    (tmp_path / "run.sh").write_text("python train.py\n")
    (tmp_path / "train.ipynb").write_text("{}")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("from . import nothing\n")
    (tmp_path / "package" / "broken.py").write_text("if x\n")
    return tmp_path


def _asked(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ExplainOptions:
    """The request that a command line makes."""
    found: list[ExplainOptions] = []

    def explain(request: ExplainOptions) -> int:
        found.append(request)
        return 0

    monkeypatch.setattr(explain_command, "run_explain", explain)
    assert CliRunner().invoke(app, ["explain", *arguments]).exit_code == 0
    return found[0]


@pytest.mark.parametrize(
    "line",
    [
        "train.py --devices cpu:2 -- --lr 0.1 --batch 7 data",
        "--devices cpu:2 -- train.py --lr 0.1 --batch 7 data",
        "--devices cpu:2 train.py --lr 0.1 -- --batch 7 data",
    ],
)
def test_what_nfold_does_not_know_and_what_is_behind_dashes_is_the_scripts(
    monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    asked = _asked(monkeypatch, *line.split())
    assert (asked.target, asked.devices) == ("train.py", "cpu:2")
    assert asked.arguments == ("--lr", "0.1", "--batch", "7", "data")
    assert asked.batch is None


def test_a_module_is_asked_for_as_python_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _asked(monkeypatch, "-m", "package.train", "--lr", "0.1", "--devices", "cpu:2")
    assert (asked.module, asked.target, asked.arguments) == (True, "package.train", ("--lr", "0.1"))
    asked = _asked(monkeypatch, "train.py", "--", "-m", "5")
    assert (asked.module, asked.target, asked.arguments) == (False, "train.py", ("-m", "5"))


@pytest.mark.parametrize(
    ("target", "script"),
    [("train.py", True), ("not-there.py", True), ("a/b", True), ("digits", False), ("m:f", False)],
)
def test_a_path_is_a_script(target: str, script: bool) -> None:
    assert is_script(target) is script


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gone.py --devices cpu:2", "script 'gone.py' cannot be read (No such file"),
        ("folder.py --devices cpu:2", "folder.py is a folder"),
        ("broken.py --devices cpu:2", "broken.py:2 is not Python (expected ':')"),
        ("train.py --device cpu", "next: --devices cpu:2"),
        ("train.py --devices cpu:2 --scaling sideways", "weak, strong"),
        (
            "train.py --devices cpu:2 --precision bf16 --batch 7",
            "next: nfold explain train.py -- --precision bf16 --batch 7",
        ),
        (
            "train.py --devices cpu:2 --skip-bad --seed 1",
            "--seed, --skip-bad: train.py decides that itself",
        ),
        ("digits --devices cpu:2 --lr 0.1", "--lr 0.1: not an option of nfold explain"),
        ("-m package.gone", "module 'package.gone' is not found from this folder"),
        ("-m package", "next: python -m package"),
        ("run.sh --devices cpu:2", "run.sh is a shell script; allowed is the Python script that"),
        ("train.ipynb --devices cpu:2", "train.ipynb is a notebook; allowed is a Python script"),
        ("-m package.broken", "package/broken.py:1 is not Python (expected ':')"),
        ("train.py -m 5", "-m train.py: a file; allowed is the name of a module"),
        ("-m package.train --seed 1", "next: nfold explain -m package.train -- --seed 1"),
        ("package.train --lr 1", "next: nfold explain -m package.train --lr 1"),
        ("python train.py --lr 1", "next: nfold explain train.py --devices N -- --lr 1"),
        ("python3.11 -m package.train", "next: nfold explain -m package.train --devices N"),
        (
            "/bin/torchrun --nproc_per_node 2 train.py",
            "/bin/torchrun is a launcher; nfold explain starts one process per device itself; "
            "allowed is the script; next: nfold explain train.py --devices N",
        ),
        ("train --devices cpu:2", "next: nfold explain train.py"),
        ("accelerate launch", "next: nfold explain train.py --devices N"),
    ],
)
def test_a_wrong_request_for_a_script_says_what_is_allowed(line: str, said: str) -> None:
    error = CliRunner().invoke(app, ["explain", *line.split()]).exception
    assert isinstance(error, NfoldError)
    assert isinstance(error, UsageError)
    assert said in str(error)
    assert not Path("nfold-results").exists()


@pytest.mark.parametrize(
    "line",
    [
        "",
        "train --devices cpu:2",
        "package.train --lr 1",
        "python train.py --lr 1",
        "accelerate launch",
        "run.sh --devices cpu:2",
        "-m train.py",
        "train.py --devices cpu:2 --precision bf16",
        "digits --devices cpu:2 --lr 0.1",
        "digits --devices cpu:1,cpu:2",
    ],
)
def test_a_wrong_request_for_tune_names_tune(line: str) -> None:
    error = CliRunner().invoke(app, ["tune", *line.split()]).exception
    assert isinstance(error, UsageError)
    assert "nfold tune" in str(error)
    assert "explain" not in str(error)
