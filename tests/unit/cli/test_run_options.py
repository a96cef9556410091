"""The options of `nfold run`: torchrun's names and variables; what follows SCRIPT is its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nfold import cli
from nfold.cli import run_command, without_debug
from nfold.core.errors import RunFailure
from nfold.launch.torchrun_args import TorchrunArgs

SAID: dict[str, tuple[str, Any]] = {
    "nproc-per-node": ("gpu", "gpu"),
    "nnodes": ("1:2", "1:2"),
    "node-rank": ("1", 1),
    "rdzv-backend": ("c10d", "c10d"),
    "rdzv-endpoint": ("host:1", "host:1"),
    "rdzv-id": ("job", "job"),
    "rdzv-conf": ("a=b", "a=b"),
    "master-addr": ("host", "host"),
    "master-port": ("5", 5),
    "max-restarts": ("3", 3),
    "monitor-interval": ("0.5", 0.5),
    "local-ranks-filter": ("0,1", "0,1"),
}
FLAGS = ("standalone", "module", "no-python")
NOT_OURS = ("--log-dir=x", "--tee=3", "-r3", "--role=worker", "--start_method=spawn")


class Command:
    """``nfold`` with a run that only notes what it was asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._asked: list[TorchrunArgs] = []
        patch.setattr(run_command, "launch_and_report", self._note)
        for name in (*SAID, *FLAGS):
            patch.delenv(f"PET_{name.replace('-', '_').upper()}", raising=False)

    def _note(self, asked: TorchrunArgs) -> int:
        self._asked.append(asked)
        return 7

    def __call__(self, *arguments: str) -> TorchrunArgs:
        self._patch.setattr(sys, "argv", ["nfold", "run", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 7
        return self._asked.pop()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(monkeypatch)


def test_nothing_said(command: Command) -> None:
    assert command("train.py") == TorchrunArgs(script="train.py")


@pytest.mark.parametrize("name", SAID)
def test_torchrun_s_names_with_either_line(command: Command, name: str) -> None:
    text, value = SAID[name]
    field = name.replace("-", "_")
    for written in (f"--{name}", f"--{field}"):
        assert getattr(command(written, text, "train.py"), field) == value
        assert getattr(command(f"{written}={text}", "train.py"), field) == value


@pytest.mark.parametrize("name", SAID)
def test_a_variable_is_heeded_and_the_flag_wins(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text, value = SAID[name]
    field = name.replace("-", "_")
    monkeypatch.setenv(f"PET_{field.upper()}", text)
    assert getattr(command("train.py"), field) == value
    assert str(getattr(command(f"--{name}", "9", "train.py"), field)) in ("9", "9.0")


@pytest.mark.parametrize("name", FLAGS)
def test_switches_and_their_variables(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    field = name.replace("-", "_")
    assert getattr(command(f"--{field}", "train.py"), field) is True
    monkeypatch.setenv(f"PET_{field.upper()}", "1")
    assert getattr(command("train.py"), field) is True
    monkeypatch.setenv(f"PET_{field.upper()}", "0")
    assert getattr(command("train.py"), field) is False


def test_devices_is_another_name(command: Command) -> None:
    assert command("--devices", "4", "train.py").nproc_per_node == "4"


def test_plan_fields_and_a_module(command: Command) -> None:
    asked = command("--plan", "precision=bf16", "--plan", "seed=1", "-m", "package.train")
    assert asked.plan == ("precision=bf16", "seed=1")
    assert (asked.script, asked.module, asked.kind) == ("package.train", True, "module")


OF_THE_SCRIPT = ["--debug", "--help", "-m", "--nproc_per_node", "2", "--", "--plan=x", "run", ""]


def test_what_follows_the_script_is_its_own(command: Command) -> None:
    assert command("--devices", "2", "train.py", *OF_THE_SCRIPT).arguments == tuple(OF_THE_SCRIPT)
    assert command("--", "train.py", *OF_THE_SCRIPT).arguments == tuple(OF_THE_SCRIPT)
    assert command("--debug", "train.py", "--debug").arguments == ("--debug",)


@pytest.mark.parametrize(
    ("arguments", "debug", "left"),
    [
        (["bench", "digits", "--debug"], True, ["bench", "digits"]),
        (["--debug", "run", "x.py"], True, ["run", "x.py"]),
        (["run", "x.py", "--debug"], False, ["run", "x.py", "--debug"]),
        (["bench", "run", "--debug"], True, ["bench", "run"]),
    ],
)
def test_whose_debug_it_is(arguments: list[str], debug: bool, left: list[str]) -> None:
    assert without_debug(arguments) == (debug, left)


def test_debug_shows_the_traceback_of_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: TorchrunArgs) -> int:
        raise RunFailure("rank 0 failed first")

    monkeypatch.setattr(run_command, "launch_and_report", fail)
    for arguments, traced in ((["x.py"], False), (["--debug", "x.py"], True)):
        monkeypatch.setattr(sys, "argv", ["nfold", "run", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        err = capsys.readouterr().err
        assert ended.value.code == 1
        assert ("Traceback" in err) == traced
        assert "nfold: error: rank 0 failed first\n" in err


def nfold(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nfold", "run", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere.py"], 2, "nowhere.py"),
        (["-m", "nowhere_at_all"], 2, "nowhere_at_all"),
        (["--plan", "precison=bf16", __file__], 2, "precision"),
        (["--hang-timeout", "0", __file__], 2, "above 0"),
        (["--nproc-per-node", "gpu", __file__], 4, "0 exist here"),
        (["--no-such-flag", __file__], 2, "--no-such-flag"),
    ],
)
def test_bad_input_is_one_error(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    done = nfold("--results", str(tmp_path / "results"), *arguments, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


def test_inside_a_job_the_script_just_runs(tmp_path: Path) -> None:
    file = tmp_path / "show.py"
    file.write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv, os.environ['NFOLD_PLAN']]))\n"
    )
    done = nfold(
        "--plan", "seed=3", str(file), "--debug", RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[str(file), "--debug"], '{"seed": 3}']
    assert done.stderr == ""


@pytest.mark.parametrize("flag", NOT_OURS)
def test_what_only_torchrun_has_is_named_with_what_there_is_instead(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nfold", "run", flag, "train.py"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "--log-dir" in (said := capsys.readouterr().err)
    assert "remove the option" in said
