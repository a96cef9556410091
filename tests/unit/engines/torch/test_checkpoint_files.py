"""Checkpoints: their parts, which is newest, which are removed, and damaged ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nfold.core.errors import DataCorrupt, UsageError
from nfold.engines.checkpoint_folder import (
    CHECKSUMS_FILE,
    REPLACED_SUFFIX,
    newest_checkpoint,
    skipped_checkpoints_warning,
)
from nfold.engines.torch import checkpoint as files


def put(folder: Path, step: int, value: int, keep: int = 2) -> Path:
    aside, final = folder / ".new", folder / f"step-{step}"
    files.begin_checkpoint(aside)
    files.write_part(aside, "part", {"value": value})
    files.write_part(aside, "progress", {"parts": ["part"], "ranks": 0})
    files.commit_checkpoint(aside, final, keep)
    return final


def test_nested_values_come_back_as_they_were(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "state": {0: {"buffer": torch.arange(6).reshape(2, 3).t(), "step": torch.tensor(3.0)}},
        "groups": [{"lr": 0.1, "params": [0], "flag": None, "half": torch.ones(2).bfloat16()}],
        "tensor": "a text",
    }
    files.write_part(tmp_path, "part", state)
    found = files.read_part(tmp_path, "part")
    assert torch.equal(found["state"][0]["buffer"], state["state"][0]["buffer"])
    assert found["state"][0]["step"] == 3
    assert found["groups"][0]["half"].dtype == torch.bfloat16
    assert found["groups"][0]["flag"] is None
    assert found["tensor"] == "a text"


def test_keys_that_read_the_same_keep_their_own_tensors(tmp_path: Path) -> None:
    values: dict[Any, Any] = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2)}
    values |= {"0": torch.tensor(3), 0: torch.tensor(4)}
    files.write_part(tmp_path, "part", values)
    assert files.read_part(tmp_path, "part") == values


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the state of part cannot be saved"):
        files.write_part(tmp_path, "part", {"function": print})


def test_the_newest_is_the_one_with_the_most_steps(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step in (9, 10, 11):
        put(tmp_path, step, step)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-11"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-11"]


def test_an_unfinished_one_is_not_found_and_goes_with_the_next(tmp_path: Path) -> None:
    put(tmp_path, 1, 1)
    files.begin_checkpoint(tmp_path / ".new")
    (tmp_path / ".new" / "part.json").write_text("{")
    assert newest_checkpoint(tmp_path) == tmp_path / "step-1"
    put(tmp_path, 2, 2)
    assert files.read_part(tmp_path / "step-2", "part") == {"value": 2}


def test_one_that_was_about_to_be_replaced_is_still_found(tmp_path: Path) -> None:
    """A kill between the two renames of ``finish`` leaves this."""
    put(tmp_path, 5, 1).rename(tmp_path / f"step-5{REPLACED_SUFFIX}")
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert files.read_part(found, "part") == {"value": 1}
    put(tmp_path, 5, 2)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert files.read_part(found, "part") == {"value": 2}


def test_a_damaged_one_names_its_file(tmp_path: Path) -> None:
    final = put(tmp_path, 1, 1)
    (final / "part.safetensors").write_bytes(b"\x05")
    with pytest.raises(DataCorrupt, match="step-1/part"):
        files.read_part(final, "part")


def _unlink_all(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()


def _truncate_all(folder: Path) -> None:
    for path in folder.iterdir():
        os.truncate(path, 0)


def _flip_bit(file: Path, offset: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    written_ns = file.stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=(written_ns + 1, written_ns + 1))  # as by another process, later


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda folder: _unlink_all(folder, "*"),
    "missing part": lambda folder: _unlink_all(folder, "part.*"),
    "missing tensors": lambda folder: (folder / "part.safetensors").unlink(),
    "truncated tensors": lambda folder: os.truncate(folder / "part.safetensors", 20),
    "truncated text": lambda folder: os.truncate(folder / "part.json", 3),
    "empty files": _truncate_all,
    "flipped bit in tensors": lambda folder: _flip_bit(folder / "part.safetensors"),
    "flipped bit in text": lambda folder: _flip_bit(folder / "part.json", -4),  # 9 becomes 8
    "flipped bit in checksums": lambda folder: _flip_bit(folder / CHECKSUMS_FILE, 0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_readable_ones_stay(
    tmp_path: Path, damage: str
) -> None:
    good = put(tmp_path, 3, 3)
    DAMAGE[damage](put(tmp_path, 9, 9))
    assert newest_checkpoint(tmp_path) == good
    assert "step-9 cannot be read; resuming from step-3" in str(
        skipped_checkpoints_warning(tmp_path)
    )
    put(tmp_path, 6, 6, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-6", "step-9"]
    put(tmp_path, 12, 12, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-12", "step-6"]
    assert skipped_checkpoints_warning(tmp_path) is None


@pytest.mark.parametrize("name", ["part.safetensors", "part.json"])
def test_a_flipped_bit_names_its_file(tmp_path: Path, name: str) -> None:
    final = put(tmp_path, 1, 9)
    _flip_bit(final / name, -4 if name == "part.json" else -1)
    assert newest_checkpoint(tmp_path) == final
    with pytest.raises(DataCorrupt, match=f"{name} is damaged: it differs from its checksum"):
        files.read_part(final, "part")


def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    final = put(tmp_path, 1, 1)
    command = ["sha256sum", "--strict", "--check", CHECKSUMS_FILE]
    verified = subprocess.run(command, cwd=final, capture_output=True, text=True, check=True)
    assert verified.stdout.splitlines() == [
        f"{path.name}: OK" for path in sorted(final.iterdir()) if path.name != CHECKSUMS_FILE
    ]


def test_a_checkpoint_without_checksums_is_loaded(tmp_path: Path) -> None:
    final = put(tmp_path, 1, 1)
    (final / CHECKSUMS_FILE).unlink()
    assert newest_checkpoint(tmp_path) == final
    assert skipped_checkpoints_warning(tmp_path) is None
    assert files.read_part(final, "part") == {"value": 1}


def test_draws_continue_from_a_saved_state() -> None:
    state = files.get_random_state()
    first = torch.rand(3)
    files.set_random_state(state)
    assert torch.equal(torch.rand(3), first)
