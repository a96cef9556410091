"""Every test of the data layer has its own cache and looks nowhere but where it says."""

from __future__ import annotations

from pathlib import Path

import pytest

OF_DATA = ("NFOLD_DOWNLOAD", "NFOLD_ACCEPT_SHA256")


@pytest.fixture(autouse=True)
def own_cache(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """An empty NFOLD_CACHE; NFOLD_DATA is emptied after ``shared_data`` has read it."""
    if "shared_data" in request.fixturenames:
        request.getfixturevalue("shared_data")
    for name in OF_DATA:
        monkeypatch.delenv(name, raising=False)
    # Set, then emptied: so it is put back even where prepare() writes it.
    monkeypatch.setenv("NFOLD_DATA", "")
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
