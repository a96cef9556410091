"""Which attempt goes on, and what a checkpoint says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from nfold.errors import DataCorrupt, UsageError
from nfold.frameworks.checkpoints import (
    TRAINED,
    Trained,
    attempt_of,
    attempts,
    held,
    newest,
    read_trained,
    write_trained,
)
from nfold.measurement import Epoch
from nfold.plan import Plan


def _kept(attempt: Path, *steps: int) -> None:
    for step in steps:
        (attempt / f"step-{step}").mkdir(parents=True)


def test_the_first_attempt_is_new(tmp_path: Path) -> None:
    assert attempt_of(tmp_path / "none", again=False) == tmp_path / "none" / "run-1"
    assert attempt_of(tmp_path / "none", again=True) == tmp_path / "none" / "run-1"


def test_the_latest_attempt_with_a_checkpoint_goes_on(tmp_path: Path) -> None:
    _kept(tmp_path / "run-9", 3)
    _kept(tmp_path / "run-10", 3, 12)
    (tmp_path / "run-11" / ".step-3.new").mkdir(parents=True)
    assert [path.name for path in attempts(tmp_path)] == ["run-9", "run-10", "run-11"]
    assert attempt_of(tmp_path, again=False) == tmp_path / "run-10"
    assert newest(tmp_path / "run-10") == tmp_path / "run-10" / "step-12"
    assert attempt_of(tmp_path, again=True) == tmp_path / "run-12"


def test_a_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    trained = Trained(
        cell="0123456789",
        workload="digits",
        plan=Plan(batch=8).to_dict(),
        epochs=(Epoch(seconds=1.5, samples=10, train_loss=0.1, accuracy=0.5),),
    )
    write_trained(tmp_path, trained)
    assert read_trained(tmp_path) == trained


@pytest.mark.parametrize("text", ["", "{", "{}", '{"cell": 1}'])
def test_a_checkpoint_that_does_not_say_it_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / TRAINED).write_text(text)
    with pytest.raises(DataCorrupt, match="--again"):
        read_trained(tmp_path)


def test_one_process_at_a_time_trains_into_a_folder(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with held(kept), pytest.raises(UsageError, match="another nfold"), held(kept):
        pass
    with held(tmp_path / "kept"):
        assert attempts(tmp_path / "kept") == []
