"""Which DataLoaders of a run get another number of workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from nfold.instrument.hooks.patches import Patches
from nfold.instrument.input.loader_workers import TrainingLoaderSettings


@pytest.fixture
def override() -> Iterator[TrainingLoaderSettings]:
    patches, made = Patches(), TrainingLoaderSettings(0, 4, {})
    made.install(patches)
    yield made
    patches.undo()


def new_loader() -> DataLoader[int]:
    return DataLoader([1, 2], num_workers=1, prefetch_factor=3)  # type: ignore[arg-type]


def workers_after_pass(loader: DataLoader[int], *, with_gradients: bool = True) -> int:
    with torch.set_grad_enabled(with_gradients):
        iter(loader)
    return loader.num_workers


def test_loaders_before_the_first_step_and_their_successors(
    override: TrainingLoaderSettings,
) -> None:
    evaluated, early = new_loader(), new_loader()
    assert workers_after_pass(evaluated, with_gradients=False) == 1
    assert not override.has_found
    assert workers_after_pass(early) == 0
    assert override.has_found
    assert early.prefetch_factor is None
    override.has_stepped = True
    late = new_loader()
    assert workers_after_pass(late) == 1
    assert workers_after_pass(evaluated) == 1
    assert workers_after_pass(early) == 0


def test_batches_of_the_training_have_another_size(override: TrainingLoaderSettings) -> None:
    trained: DataLoader[int] = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]
    evaluated: DataLoader[int] = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]
    with torch.no_grad():
        assert [len(batch) for batch in evaluated] == [2, 2, 2, 2]
    assert [len(batch) for batch in trained] == [4, 4]


def test_the_same_call_after_the_first_step(override: TrainingLoaderSettings) -> None:
    found = []
    for epoch in range(3):
        override.has_stepped = epoch > 0
        found.append(workers_after_pass(new_loader()))
    assert found == [0, 0, 0]
