"""Scripts that make a DataLoader anew: for every epoch, or for every evaluation."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from instrumented import (
    CountingDataset,
    RecordingObserver,
    dataset,
    instrumented,
    loop,
    model,
    script_task,
)
from nfold.core.variant import Variant


def _trained(task: Any, data: Any, *, subsets: bool = False) -> RecordingObserver:
    """Epochs of 8 steps, each with a loader of its own, and an evaluation after each."""

    def evaluate() -> None:
        for _ in DataLoader(dataset(24), batch_size=12):
            pass

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(5):
            own = Subset(data, range(64)) if subsets else data
            loader = DataLoader(own, batch_size=8)
            loop(loader, module, optimizer, epochs=1, after_epoch=evaluate)

    return instrumented(training, task)


@pytest.mark.parametrize("subsets", [False, True])
def test_samples_of_a_recreated_loader_are_counted(subsets: bool) -> None:
    found = _trained(script_task(steps=20), dataset(), subsets=subsets).samples
    assert found is not None
    assert {window.samples / window.steps for window in found.windows} == {8}


def test_epoch_ends_when_the_next_loader_begins() -> None:
    found = _trained(script_task(steps=None, epochs=3, warmup_steps=3), dataset())
    assert found.samples is not None
    assert [epoch.samples for epoch in found.samples.epochs] == [64, 64, 64]
    assert found.profile.epochs_completed == 3


@pytest.mark.parametrize("subsets", [False, True])
def test_plan_changes_every_recreated_loader(subsets: bool) -> None:
    found = _trained(script_task(batch=16, steps=15), dataset(), subsets=subsets).samples
    assert found is not None
    assert {window.samples / window.steps for window in found.windows} == {16}


@pytest.mark.parametrize("subsets", [False, True])
def test_replay_continues_with_a_recreated_loader(subsets: bool) -> None:
    data = CountingDataset()
    task = script_task(Variant(input="replayed"), steps=20)
    found = _trained(task, data, subsets=subsets).samples
    assert found is not None
    assert {window.samples / window.steps for window in found.windows} == {8}
    assert data.read == 64


def test_unused_loader_is_freed() -> None:
    made: list[weakref.ref[Any]] = []

    def evaluate() -> None:
        loader = DataLoader(dataset(24), batch_size=12)
        next(iter(loader))
        made.append(weakref.ref(loader))

    def training() -> None:
        module, loader = model(), DataLoader(dataset(), batch_size=8)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(loader, module, optimizer, epochs=4, after_epoch=evaluate)
        gc.collect()
        assert [one() for one in made[:-1]] == [None] * 3

    assert instrumented(training, script_task(steps=100)).samples is not None
