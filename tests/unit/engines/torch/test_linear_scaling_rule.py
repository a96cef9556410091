"""The linear scaling rule reaches the scaled rate and stays there; schedules under accumulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nfold
from nfold.core.errors import UsageError
from nfold.engines.torch.lr_schedule import linear_scaling_rule


def rates(**options: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = linear_scaling_rule(optimizer, **options)
    found = []
    for _ in range(7):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_it_rises_over_the_warm_up() -> None:
    found = rates(batch=1024, base_batch=256, warmup_steps=4)
    assert found == pytest.approx([0.1, 0.175, 0.25, 0.325, 0.4, 0.4, 0.4])


def test_without_a_warm_up_it_is_scaled_from_the_start() -> None:
    assert rates(batch=512, base_batch=256, warmup_steps=0) == pytest.approx([0.2] * 7)


def test_the_base_batch_changes_nothing() -> None:
    assert rates(batch=256, base_batch=256, warmup_steps=5) == pytest.approx([0.1] * 7)


@pytest.mark.parametrize("options", [{"batch": 0}, {"base_batch": 0}, {"warmup_steps": -1}])
def test_impossible_values_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="allowed are whole numbers"):
        rates(**{"batch": 1, "base_batch": 1, "warmup_steps": 1, **options})


def test_a_checkpoint_keeps_the_schedule_of_a_step_in_parts(tmp_path: Path) -> None:
    def prepared() -> tuple[nfold.Run, Any, Any, Any]:
        run, model = nfold.Run(device="cpu", accumulate=2), torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        _, optimizer, schedule = run.prepare(model, optimizer, schedule)
        return run, run.loader(torch.zeros(8, 2), batch_size=4), optimizer, schedule

    run, loader, optimizer, schedule = prepared()
    for _ in loader:
        optimizer.step()
        schedule.step()
    assert type(schedule).__name__ == "StepLR"
    assert schedule.get_last_lr() == [0.1]
    run.checkpoint(tmp_path)
    later, _, _, again = prepared()
    later.resume(tmp_path)
    assert again.get_last_lr() == [0.1]
    assert again.last_epoch == 2
