"""Checkpoints of nfold 0.1 continue, those of ``nfold train`` and those of nfold.Run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from made import task
from nfold.core.plan import Plan
from nfold.engines.base import Observer
from nfold.engines.checkpoint_folder import newest_checkpoint
from nfold.engines.torch.checkpoint import Checkpointer, TrainingState, open_checkpoint
from nfold.engines.torch.run.job import Job
from nfold.engines.torch.run.loader import LoaderPosition
from nfold.engines.torch.run.user_run import UserRun
from nfold.workloads.torch_networks import digits_model, sgd

FIXTURES = Path(__file__).parents[3] / "fixtures"
RUN_0_1 = FIXTURES / "run-0.1"
(TRAIN_0_1,) = (FIXTURES / "results-0.1" / "checkpoints").glob("*/run-1")


class Script:
    def __init__(self, precision: str = "fp16") -> None:
        job = Job(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
        self.run = UserRun(Plan(devices=1, precision=precision), job, Observer())
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.run.prepare(self.model, self.optimizer, self.schedule)
        self.loader = self.run.loader((torch.arange(24.0).view(12, 2) / 24,), batch_size=4)

    def state(self) -> list[Any]:
        momentum = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        scale = None if self.run._scale is None else self.run._scale.state_dict()
        return [
            *(p.tolist() for p in (*self.model.parameters(), *momentum)),
            *(self.schedule.get_last_lr(), self.loader.position, self.run.steps, scale),
        ]


def test_a_script_continues_from_version_0_1() -> None:
    script = Script()
    assert script.run.resume(RUN_0_1) == {"note": "half way", "count": 3}
    draws = torch.rand(2)
    weight, _, momentum, _, rates, position, steps, scale = script.state()
    expected = [[0.1943, -0.2691], [0.1793, 0.1738]]
    assert torch.tensor(weight) == pytest.approx(torch.tensor(expected), abs=5e-5)
    assert momentum[0] == pytest.approx([-0.7389, -0.7967], abs=5e-5)
    assert (rates, position, steps) == ([0.025], LoaderPosition(epoch=1, step=1), 4)
    assert scale == {"scale": 65536.0, "good_steps": 4}
    assert draws.tolist() == pytest.approx([0.2071, 0.6297], abs=5e-5)
    assert [x[0, 0].item() * 24 for (x,) in script.loader] == pytest.approx([0, 2])


def test_a_script_writes_what_it_read(tmp_path: Path) -> None:
    first, second = Script(), Script()
    first.run.resume(RUN_0_1)
    first.run.checkpoint(tmp_path, note="again")
    assert second.run.resume(tmp_path) == {"note": "again"}
    assert second.state() == first.state()


def test_another_precision_continues_without_the_loss_scale(tmp_path: Path) -> None:
    script = Script(precision="bf16")
    script.run.resume(RUN_0_1)
    script.run.checkpoint(tmp_path)
    assert Script().run.resume(tmp_path) == {}


def test_training_continues_from_version_0_1(tmp_path: Path) -> None:
    def build() -> TrainingState:
        module = digits_model({}, 10)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        return TrainingState(models=[module], optimizers=[sgd(module, 0.1)], scaler=scaler)

    before = dataclasses.replace(task(epochs=3, world_size=2), checkpoint=str(TRAIN_0_1))
    first = build()
    earlier = Checkpointer(before, first).resume()
    assert [epoch.train_loss for epoch in earlier.epochs] == [2.176296823706657, 0.9548316641698384]
    after = dataclasses.replace(task(epochs=2), checkpoint=str(tmp_path))
    Checkpointer(after, first).save(earlier, 24)
    second = build()
    assert Checkpointer(after, second).resume().epochs == earlier.epochs
    for name, value in first.models[0].state_dict().items():
        assert torch.equal(second.models[0].state_dict()[name], value)


def test_both_write_one_format(tmp_path: Path) -> None:
    Script().run.checkpoint(tmp_path / "script")
    module = nn.Linear(2, 2)
    training = TrainingState(models=[module], optimizers=[torch.optim.SGD(module.parameters())])
    saved = dataclasses.replace(task(epochs=1), checkpoint=str(tmp_path / "training"))
    earlier = Checkpointer(saved, training).resume()
    Checkpointer(saved, training).save(earlier, 0)
    found = [newest_checkpoint(tmp_path / name) for name in ("script", "training")]
    progress = [open_checkpoint(path).progress for path in found if path]
    assert [one["parts"] for one in progress] == [
        ["model-0", "optimizer-0", "scheduler-0", "loader-0", "scaler"],
        ["model-0", "optimizer-0"],
    ]
    assert {(one["format"], one["steps"], one["ranks"]) for one in progress} == {(2, 0, 1)}
