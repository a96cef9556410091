"""What every test may rely on: no running job in the environment, and where real data is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NFOLD_RESULTS", "NFOLD_PARENT")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests never join a job, nor write into results, that the shell around them names."""
    for name in OF_A_JOB:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shared_data() -> Path:
    """The folder of real data sets; the test is skipped where NFOLD_DATA names none."""
    folder = os.environ.get("NFOLD_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("NFOLD_DATA names no folder of data sets")
    return Path(folder)
