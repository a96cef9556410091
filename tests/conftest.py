"""What every test may rely on: no running job in the environment, and where real data is.

Of the tests marked ``slow`` the whole suite runs a part, another one at every commit; those that
share what makes them slow name it, and run together or not at all. NFOLD_TESTS=all runs them all,
and so does naming a file.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import torch

torch.set_num_threads(1)  # threads of two workers on two cores would wait actively for each other
ROOT = Path(__file__).resolve().parents[1]
PARTS = 64
"""One of so many slow tests runs at a commit, other than those with ``slow(parts=...)``.

Of several marks of a test, that of the largest number counts.
"""
OF_A_JOB = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "NFOLD_SESSION",
    "NFOLD_RESULTS",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests whose turn it is not."""
    if os.environ.get("NFOLD_TESTS") == "all" or config.args != config.getini("testpaths"):
        return
    commit = _commit()
    left_out = pytest.mark.skip(reason="slow, not of this commit's sample; next: NFOLD_TESTS=all")
    for item in items:
        marks = [*item.iter_markers("slow")]
        names = "".join(name for mark in marks for name in mark.args)
        parts = max((mark.kwargs.get("parts", PARTS) for mark in marks), default=1)
        if crc32(f"{commit} {names or item.nodeid}".encode()) % parts:
            item.add_marker(left_out)


def _commit() -> str:
    """The commit that is checked out, empty outside of a repository."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests never join a job, nor write into results, that the shell around them names.

    Nor one that a test before has left in the environment, as a rank does.
    """
    for name in OF_A_JOB:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def shared_data() -> Path:
    """The folder of real data sets; the test is skipped where NFOLD_DATA names none."""
    folder = os.environ.get("NFOLD_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("NFOLD_DATA names no folder of data sets")
    return Path(folder)
