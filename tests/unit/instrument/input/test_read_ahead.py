"""Batches that a loop reads before the steps that get them, as nfold.Run does on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, script_task
from nfold.core.measurement import RankSamples
from nfold.engines.torch.input.dataloader import mark_read_ahead, one_ahead


class ReadAhead:
    """A loader of which every batch is read before the step of the one before it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = mark_read_ahead(loader, torch.device("cuda"))

    def __iter__(self) -> Iterator[Any]:
        return one_ahead(self.loader, lambda batch: batch, lambda batch: batch)


def run(
    warmup_steps: int, wrap: Callable[[DataLoader[Any]], Any] = lambda loader: loader
) -> RankSamples:
    def training() -> None:
        module = model()
        loader = DataLoader(dataset(64), batch_size=12)
        loop(wrap(loader), module, torch.optim.SGD(module.parameters(), lr=0.1))

    samples = instrumented(training, script_task(warmup_steps=warmup_steps)).samples
    assert samples is not None
    return samples


@pytest.mark.parametrize("warmup_steps", [4, 7, 9], ids=["part of a pass", "pass", "two passes"])
def test_steps_have_the_samples_that_they_are_given(warmup_steps: int) -> None:
    usual, ahead = run(warmup_steps), run(warmup_steps, ReadAhead)
    assert ahead.sample_hashes == usual.sample_hashes
    assert [w.samples for w in ahead.windows] == [w.samples for w in usual.windows]


def test_samples_after_the_first_pass_do_not_count() -> None:
    """Numbers that are drawn in a pass may decide the order of the next."""
    hashes = {run(warmup_steps).sample_hashes[0][1] for warmup_steps in (7, 9)}
    assert len(hashes) == 1
