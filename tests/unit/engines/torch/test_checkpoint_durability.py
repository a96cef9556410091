"""Both writers flush a complete checkpoint to the disk before it gets its name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from made import task
from nfold.core.measurement import Epoch, RankSamples
from nfold.core.plan import Plan
from nfold.engines.base import Observer
from nfold.engines.checkpoint_folder import is_readable
from nfold.engines.torch.checkpoint import Checkpointer, TrainingState
from nfold.engines.torch.run.job import Job
from nfold.engines.torch.run.user_run import UserRun

Files = dict[str, bytes]


def _contents(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class DiskCalls:
    """Notes each fsync and rename with the files of the checkpoint at that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[str, bytes | list[str]] = {}
        self.renamed: list[tuple[Path, Path]] = []
        self.readable_at_rename: list[bool] = []
        self.synced_at_rename: dict[str, bytes | list[str]] = {}
        self._fsync, self._rename = os.fsync, os.rename
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "rename", self.rename)
        monkeypatch.setattr(os, "replace", self.rename)

    def fsync(self, handle: int) -> None:
        self._fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        self.synced[path.name] = sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()

    def rename(self, source: Path, target: Path) -> None:
        self.renamed.append((Path(source), Path(target)))
        self.readable_at_rename.append(is_readable(Path(source)))
        self.synced_at_rename = dict(self.synced)
        self.synced.clear()
        self._rename(source, target)


def _write_training(folder: Path) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = TrainingState(models=[module], optimizers=[optimizer])
    epoch = Epoch(seconds=1.0, samples=4, train_loss=0.3, accuracy=0.7)
    kept = dataclasses.replace(task(epochs=1), checkpoint=str(folder))
    Checkpointer(kept, state).save(RankSamples(rank=0, device="cpu", epochs=(epoch,)), 7)


def _write_script(folder: Path) -> None:
    job = Job(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    run = UserRun(Plan(devices=1, precision="fp32"), job, Observer())
    module = nn.Linear(2, 2)
    run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    run.checkpoint(folder)


@pytest.mark.parametrize("write", [_write_training, _write_script])
def test_checkpoint_is_complete_and_on_disk_before_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    calls = DiskCalls(monkeypatch)
    write(tmp_path)
    ((staging, final),) = calls.renamed
    files = _contents(final)
    assert calls.readable_at_rename == [True]
    assert calls.synced_at_rename == {**files, staging.name: sorted(files)}
    assert calls.synced == {tmp_path.name: [final.name]}
