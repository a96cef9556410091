"""A script that makes an iterator in every step: that is input, and no epoch ends."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from instrumented import RecordingObserver, dataset, instrumented, model, script_task
from nfold.core.script_profile import DataLoaderProfile
from nfold.engines.base import Task


def _trained(task: Task, batches_of_an_iterator: int) -> RecordingObserver:
    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loader = DataLoader(dataset(), batch_size=8)
        while True:
            iterator = iter(loader)
            for _ in range(batches_of_an_iterator):
                images, labels = next(iterator)
                loss = torch.nn.functional.cross_entropy(module(images), labels)
                torch.autograd.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return instrumented(training, task)


def _loader(found: RecordingObserver) -> DataLoaderProfile:
    assert found.profile.loader is not None
    return found.profile.loader


def test_an_iterator_for_every_step_has_its_line_and_ends_no_epoch() -> None:
    found = _trained(script_task(steps=12, warmup_steps=6), 1)
    line = _loader(found).renewed_at
    assert line is not None
    assert line.partition(":")[0].endswith("test_renewed_iterators.py")
    assert found.profile.epochs_completed <= 2
    assert found.samples is not None
    assert not any(window.epoch_gap for window in found.samples.windows)


@pytest.mark.slow(parts=8)
def test_an_iterator_for_several_steps_goes_through_epochs() -> None:
    found = _trained(script_task(steps=12, warmup_steps=6), 3)
    assert _loader(found).renewed_at is None
    assert found.profile.epochs_completed > 2
