"""A workload with planted costs: what it can have where, and the turns of its clock."""

from __future__ import annotations

import itertools

import pytest
import torch
from own_clock import slowest_ms
from planted import Clock
from planted_target import Planted
from planted_terms import CAUSES, SETTLING, TIMED, WARMUP
from torch import nn

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("devices", "causes", "workload", "batch"),
    [
        ("cpu:2", CAUSES, "planted:digits", None),
        ("2", ("imbalance", "link", "synchronization"), "planted:pictures", "2048"),
        ("4", ("imbalance", "link", "synchronization"), "planted:pictures", "4096"),
    ],
)
def test_gpus_have_the_causes_that_no_host_hides(
    devices: str, causes: tuple[str, ...], workload: str, batch: str | None
) -> None:
    target = Planted(devices)
    assert target.causes == causes
    assert {cause for pair in target.pairs for cause in pair} <= set(causes)
    command = target.command()
    assert command[0] == workload
    assert dict(itertools.pairwise(command)).get("--batch") == batch


def test_the_first_turn_begins_when_steps_have_settled(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(1, 1)
    clock = Clock([{}, {"link": 3.0}], timed=True)
    spent = []
    for _ in range(SETTLING + 2 * (WARMUP + TIMED) + 1):
        clock.step(model, CPU)
        spent.append(clock.dose_ms("link"))
    assert sorted(slowest_ms(capsys.readouterr().out)) == [0, 1]
    assert spent[: SETTLING + WARMUP + TIMED] == [0.0] * (SETTLING + WARMUP + TIMED)
    assert spent[SETTLING + WARMUP + TIMED :] == [3.0] * (WARMUP + TIMED + 1)


def test_an_explained_run_has_its_dose_from_the_first_step_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock([{"link": 3.0}], timed=False)
    assert clock.dose_ms("link") == 3.0
    assert clock.dose_ms("imbalance") == 0.0
    assert not capsys.readouterr().out
