"""A patch on the user's files, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from nfold.core.errors import UsageError
from nfold.core.source_edit import SetKeywords
from nfold.tune.applied_patch import apply_patch, revert_patch
from nfold.tune.source_patch import SourcePatch, make_patch

SOURCE = b"loader = DataLoader(data)\r\n"
EDITED = b"loader = DataLoader(data, num_workers=2)\r\n"


@pytest.fixture
def patch(tmp_path: Path) -> SourcePatch:
    (tmp_path / "train.py").write_bytes(SOURCE)
    edit = SetKeywords(
        location="train.py:1", function="DataLoader", keywords=(("num_workers", "2"),)
    )
    return make_patch([edit], tmp_path)


def test_a_patch_is_applied_and_taken_back(tmp_path: Path, patch: SourcePatch) -> None:
    script, backup = tmp_path / "train.py", tmp_path / "backup"
    script.chmod(0o750)
    assert apply_patch(patch, tmp_path, backup) == [script]
    assert script.read_bytes() == EDITED
    with pytest.raises(UsageError, match="applied already"):
        apply_patch(patch, tmp_path, backup)
    assert revert_patch(backup) == [script]
    assert script.read_bytes() == SOURCE
    assert script.stat().st_mode & 0o777 == 0o750
    with pytest.raises(UsageError, match="no result of nfold tune is applied"):
        revert_patch(backup)


def test_a_file_that_was_changed_meanwhile_is_not_touched(
    tmp_path: Path, patch: SourcePatch
) -> None:
    script, backup = tmp_path / "train.py", tmp_path / "backup"
    script.write_bytes(b"# mine\n" + SOURCE)
    with pytest.raises(UsageError, match="changed meanwhile"):
        apply_patch(patch, tmp_path, backup)
    script.write_bytes(SOURCE)
    apply_patch(patch, tmp_path, backup)
    script.write_bytes(b"# mine\n" + EDITED)
    with pytest.raises(UsageError, match="changed since"):
        revert_patch(backup)
    assert script.read_bytes() == b"# mine\n" + EDITED


def test_a_read_only_file_is_not_replaced(tmp_path: Path, patch: SourcePatch) -> None:
    script, backup = tmp_path / "train.py", tmp_path / "backup"
    script.chmod(0o444)
    with pytest.raises(UsageError, match=r"train.py is read-only; next: chmod"):
        apply_patch(patch, tmp_path, backup)
    assert script.read_bytes() == SOURCE
    assert not backup.exists()
