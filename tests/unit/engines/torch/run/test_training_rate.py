"""Samples and tokens per second, by a clock that the test sets."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nfold
from nfold.engines.sampling import BatchShare
from nfold.engines.torch.run.training_rate import TrainingRate

CPU = torch.device("cpu")
TOKENS = torch.zeros(3, 7, dtype=torch.int64)
WHOLE = BatchShare(count=3, global_count=6)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        ({"labels": TOKENS[:, :2], "input_ids": TOKENS}, 7),
        ((TOKENS, TOKENS[:, :2]), 7),
        (TOKENS, 7),
        ({"images": torch.zeros(3, 5), "tags": TOKENS}, 0),
        ((TOKENS.to(torch.uint8), TOKENS), 0),
        (torch.zeros(3, 7), 0),
        (torch.zeros(3, dtype=torch.int64), 0),
        ([], 0),
    ],
)
def test_samples_and_tokens_are_those_of_all_ranks(clock: Clock, batch: Any, length: int) -> None:
    rate = TrainingRate(CPU)
    rate.resume()
    rate.count(batch, WHOLE)
    clock.now += 2
    tokens = {"tokens_per_s": 3.0 * length} if length else {}
    assert rate.take() == {"samples_per_s": 3.0} | tokens
    assert rate.take() == {}


def test_micro_batches_of_a_step_are_its_samples(clock: Clock) -> None:
    rate = TrainingRate(CPU)
    for number in range(4):
        rate.count(
            TOKENS, BatchShare(count=1, global_count=12, micro_batches=4, is_last=number == 3)
        )
    clock.now += 1
    assert rate.take()["samples_per_s"] == 12.0


def test_pauses_do_not_count(clock: Clock) -> None:
    rate = TrainingRate(CPU)
    rate.count(TOKENS, WHOLE)
    clock.now += 1
    rate.pause()
    clock.now += 50
    rate.pause()
    rate.count(TOKENS, WHOLE)
    clock.now += 1
    assert rate.take()["samples_per_s"] == 6.0
    rate.count(TOKENS, WHOLE)
    clock.now += 3
    assert rate.take()["samples_per_s"] == 2.0


def test_an_evaluation_of_a_run_does_not_count(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = nfold.Run(device="cpu")
    model = nn.Embedding(9, 2)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = run.loader(torch.ones(4, 8, dtype=torch.int64), 2)
    evaluation = run.loader(torch.ones(4, 8, dtype=torch.int64), 2, train=False)
    assert run.rate() == {}
    for _ in range(2):
        for _ in loader:
            clock.now += 1
        for _ in evaluation:
            clock.now += 30
    assert run.rate() == {"samples_per_s": 2.0, "tokens_per_s": 16.0}


def test_large_rates_are_printed_as_whole_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nfold.Run(device="cpu").log(loss=2.123456, samples_per_s=131472.44, tokens_per_s=99.5)
    assert capsys.readouterr().out == "loss 2.1235 · samples_per_s 131472 · tokens_per_s 99.5\n"
