"""Attempts of ``nfold train``, the metadata of their checkpoints, and the lock of their folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from nfold.core.errors import DataCorrupt, UsageError
from nfold.core.measurement import Epoch
from nfold.core.plan import Plan
from nfold.engines.checkpoint_folder import (
    METADATA_FILE,
    CheckpointMetadata,
    list_attempts,
    lock_folder,
    newest_checkpoint,
    read_metadata,
    select_attempt,
    write_metadata,
)


def _kept(attempt: Path, *steps: int) -> None:
    for step in steps:
        (attempt / f"step-{step}").mkdir(parents=True)


def test_the_first_attempt_is_new(tmp_path: Path) -> None:
    assert select_attempt(tmp_path / "none", restart=False) == tmp_path / "none" / "run-1"
    assert select_attempt(tmp_path / "none", restart=True) == tmp_path / "none" / "run-1"


def test_the_latest_attempt_with_a_checkpoint_resumes(tmp_path: Path) -> None:
    _kept(tmp_path / "run-9", 3)
    _kept(tmp_path / "run-10", 3, 12)
    (tmp_path / "run-11" / ".step-3.new").mkdir(parents=True)
    assert [path.name for path in list_attempts(tmp_path)] == ["run-9", "run-10", "run-11"]
    assert select_attempt(tmp_path, restart=False) == tmp_path / "run-10"
    assert newest_checkpoint(tmp_path / "run-10") == tmp_path / "run-10" / "step-12"
    assert select_attempt(tmp_path, restart=True) == tmp_path / "run-12"


def test_metadata_is_read_back(tmp_path: Path) -> None:
    trained = CheckpointMetadata(
        cell="0123456789",
        workload="digits",
        plan=Plan(batch=8).to_dict(),
        epochs=(Epoch(seconds=1.5, samples=10, train_loss=0.1, accuracy=0.5),),
    )
    write_metadata(tmp_path, trained)
    assert read_metadata(tmp_path) == trained


@pytest.mark.parametrize("text", ["", "{", "{}", '{"cell": 1}'])
def test_a_checkpoint_that_does_not_say_it_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / METADATA_FILE).write_text(text)
    with pytest.raises(DataCorrupt, match="--again"):
        read_metadata(tmp_path)


def test_one_process_at_a_time_trains_into_a_folder(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with lock_folder(kept), pytest.raises(UsageError, match="another nfold"), lock_folder(kept):
        pass
    with lock_folder(tmp_path / "kept"):
        assert list_attempts(tmp_path / "kept") == []
