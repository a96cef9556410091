"""Samples of an epoch: of photographs those that are there, not those of the published set."""

from __future__ import annotations

from pathlib import Path

import pytest

from nfold import data
from nfold.cli.plan_completion import epoch_samples
from nfold.core.workload import Workload
from photos import SIZES, folders


@pytest.mark.parametrize(
    ("said", "samples"),
    [("", len(SIZES)), (":samples=3", 3), (":samples=3,repeat=5", 15), (":samples=9000", 8)],
)
def test_photographs_are_counted_where_they_lie(
    said: str, samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NFOLD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))
    folders(tmp_path / "data" / "imagenet")
    data.prepare_photographs(None, samples=0, classes=10, skip_bad=False, decode=False)
    assert epoch_samples(Workload.parse(f"inception_v3{said}")) == samples


@pytest.mark.parametrize(("said", "samples"), [("digits", 1437), ("digits:samples=100", 100)])
def test_other_samples_are_the_catalogue_s(said: str, samples: int) -> None:
    assert epoch_samples(Workload.parse(said)) == samples


def test_of_a_script_nobody_knows() -> None:
    assert epoch_samples(Workload(name="train.py", script=("train.py",))) is None
