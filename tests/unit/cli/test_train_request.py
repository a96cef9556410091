"""What ``nfold train`` understands and refuses before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from made import machine
from nfold import cli
from nfold.cli import train_command


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of two cores, an empty working directory."""
    monkeypatch.setattr(train_command, "inspect_machine", lambda: machine(cores=2))
    monkeypatch.chdir(tmp_path)


def _request(workload: str = "digits", **said: object) -> train_command.TrainOptions:
    names = ("devices", "device", "batch", "strategy", "exchange", "layout", "precision")
    more = (
        "accumulate",
        "input_",
        "batch_norm",
        "decode",
        "cache",
        "augment",
        "step",
        "kernels",
        "steps_per_execution",
        "allocation",
        "framework",
        "workers",
        "seed",
        "epochs",
        "checkpoint",
        "data",
    )
    nothing = dict.fromkeys(names + more)
    rest = {"checkpoint_every": 1, "log_every": 0, "again": False, "skip_bad": False}
    how = {"telemetry_interval": 1.0, "hang_timeout": 60.0, "as_json": False, "plain": False}
    options = {"workload": workload, "results": Path("results"), **nothing, **rest, **how, **said}
    return train_command.TrainOptions(**options)  # type: ignore[arg-type]


def test_flags_win_over_the_file_and_the_length_is_in_epochs(tmp_path: Path) -> None:
    (tmp_path / "nfold.toml").write_text('batch = 64\nsteps = 9\nseed = 7\nprecision = "bf16"\n')
    plan = train_command.build_request(_request(batch="32", devices="cpu:2")).plan
    assert (plan.batch, plan.seed, plan.precision) == (32, 7, "bf16")
    assert (plan.device, plan.devices, plan.strategy) == ("cpu", 2, "ddp")
    assert (plan.steps, plan.epochs) == (None, 10)
    assert plan.is_complete


def test_the_folder_is_named_by_what_is_trained_unless_it_is_given() -> None:
    asked = train_command.build_request(_request())
    assert asked.checkpoint_folder == Path("results/checkpoints") / asked.checkpoint_id / "run-1"
    assert train_command.build_request(_request(checkpoint=Path("k"))).checkpoint_folder == Path(
        "k/run-1"
    )
    assert train_command.build_request(_request(checkpoint_every=0)).checkpoint_folder is None


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["conv2d"], 2, "no epochs"),
        (["digitz"], 2, "allowed are digits"),
        (["digits", "--batch", "32,64"], 2, "one value"),
        (["digits", "--precision", "fp8"], 2, "allowed are"),
        (["digits", "--precision", "tf32"], 2, "tensor cores"),
        (["digits", "--epochs", "0"], 2, "whole numbers from 1"),
        (["digits", "--devices", "cpu:3"], 4, "2 cores"),
        (["digits", "--device", "cuda"], 4, "0 cuda devices"),
        (["digits", "--hang-timeout", "0"], 2, "seconds above 0"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["nfold", "train", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert said in capsys.readouterr().err
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch = ", "nfold.toml"),
        ("bach = 1", "batch"),
        ('framework = "simulated"', "cannot train"),
    ],
)
def test_a_wrong_file_is_refused(
    text: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "nfold.toml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["nfold", "train", "digits"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
