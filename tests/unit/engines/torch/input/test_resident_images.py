"""Resident photographs: the same boxes as a loader's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from made import machine
from nfold.core.errors import OutOfMemory
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.data.distortion import photograph_arrays
from nfold.engines.base import Task
from nfold.engines.builtin_workloads import SampleBoxes, load_photographs
from nfold.engines.plan_rules import image_file_refusal
from nfold.engines.sampling import sample_hash
from nfold.engines.torch.batch import Batch, CanvasTensors
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.framework import TorchFramework
from nfold.engines.torch.input import image_files
from nfold.engines.torch.input.batch_source import build_image_source
from nfold.engines.torch.input.image_files import ResidentImageSource
from nfold.workloads import info, parameters
from photos import SIZES, folders

DEVICES = Devices((torch.device("cpu"),))
WORKLOAD = Workload.parse("inception_v3:size=75,classes=2,repeat=2")


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NFOLD_DATA", str(folders(tmp_path / "data")))
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))


def requested(**changes: object) -> Task:
    fields = {"device": "cpu", "devices": 1, "batch": 8, "augment": "device", "epochs": 2}
    plan = Plan(**{**fields, **changes})  # type: ignore[arg-type]
    complete = plan.resolve(machine(), info(WORKLOAD.name).defaults)
    assert TorchFramework().unsupported_reason(WORKLOAD, complete, machine()) is None
    return Task(workload=WORKLOAD, plan=complete, machine=machine())


def batches(task: Task, epoch: int) -> tuple[list[Batch], object]:
    chosen = parameters(WORKLOAD)
    found = load_photographs(task.plan, chosen)
    source = build_image_source(found, photograph_arrays(found, chosen), task, DEVICES)
    source.epoch = epoch
    made = list(source)
    assert len(made) == len(source)
    assert all(isinstance(source.unpack(batch.tensors), CanvasTensors) for batch in made)
    return made, source


def test_boxes_are_those_of_a_loader_and_unreduced_ones_to_the_last_bit() -> None:
    there, resident = batches(requested(input="resident"), 1)
    here, _ = batches(requested(), 1)
    assert isinstance(resident, ResidentImageSource)
    assert resident.data_bytes == 3 * sum(height * width for height, width in SIZES)
    part = load_photographs(requested().plan, parameters(WORKLOAD)).train
    exact = 0
    for mine, theirs in zip(there, here, strict=True):
        assert (mine.sample_hash, mine.count) == (theirs.sample_hash, theirs.count)
        for one, other in zip(mine.tensors[1:], theirs.tensors[1:], strict=True):
            assert torch.equal(one, other)
        ids = mine.tensors[2].numpy()
        assert sample_hash(ids) == mine.sample_hash
        reductions = SampleBoxes(part, 0, 75, 1, ids).reductions
        for row, (height, width) in enumerate(mine.tensors[3].tolist()):
            apart = mine.tensors[0][row].int() - theirs.tensors[0][row].int()
            assert apart[:height, :width].abs().float().mean() < 6
            if reductions[row] == 1:
                assert not apart.any()
                exact += 1
    assert 0 < exact < 2 * len(SIZES)


def test_a_note_counts_photographs_with_reduced_boxes() -> None:
    _, source = batches(requested(input="resident"), 0)
    assert isinstance(source, ResidentImageSource)
    ((kind, text),) = source.notes
    assert kind == "resident_means"
    assert "3 of 8 resident photographs" in text
    part = load_photographs(requested(input="resident").plan, parameters(WORKLOAD)).train
    assert image_files.reduction_note(part, 400) == ()


def test_what_does_not_fit_is_refused_with_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "available_bytes", lambda *_: 2**20)
    with pytest.raises(OutOfMemory, match=r"needs 0.00\d+ GiB on the host \(1 ranks\).*loader"):
        batches(requested(input="resident"), 0)


def test_only_torch_keeps_them() -> None:
    plan = requested(input="resident").plan
    assert plan.workers == 0
    other = plan.edit(framework="jax", step="compiled")
    assert "only torch keeps photographs" in str(image_file_refusal(info(WORKLOAD.name), other))
