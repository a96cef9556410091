"""Batches that a rank takes without making a step with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, model, script_task


class Loop:
    """A training loop; ``batches`` chooses those that steps are made with."""

    def __init__(self, batches: Callable[[Any], Iterator[Any]], accumulate: int = 1) -> None:
        self._batches, self._accumulate = batches, accumulate

    def __call__(self) -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loader = DataLoader(dataset(), batch_size=4)
        while True:
            for number, (images, labels) in enumerate(self._batches(loader)):
                loss = torch.nn.functional.cross_entropy(module(images), labels)
                torch.autograd.backward(loss)
                if (number + 1) % self._accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()


def _skipping_one(loader: Any) -> Iterator[Any]:
    for number, batch in enumerate(loader):
        if number != 4:
            yield batch


def _read_ahead(loader: Any) -> Iterator[Any]:
    iterator = iter(loader)
    for first, second in zip(iterator, iterator, strict=False):
        yield first
        yield second


def _evaluating(loader: Any) -> Iterator[Any]:
    for number, batch in enumerate(loader):
        if number == 4:
            with torch.no_grad():
                list(loader)
        yield batch


@pytest.mark.parametrize(
    ("loop", "skipped"),
    [
        (Loop(iter), 0),
        (Loop(_skipping_one), 1),
        (Loop(_evaluating), 0),
        (Loop(iter, accumulate=2), 0),
        (Loop(_read_ahead), None),
    ],
)
def test_batches_without_a_step_are_counted(loop: Loop, skipped: int | None) -> None:
    found = instrumented(loop, script_task(steps=5, warmup_steps=3)).samples
    assert found is not None
    assert found.skipped_batches == skipped
