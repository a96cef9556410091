"""Whether a script counts steps: a generator that goes through its loader again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, script_task


def cycle(loader: Any) -> Iterator[Any]:
    while True:
        for batch in loader:  # noqa: UP028  # as people write it
            yield batch


def of_epochs(loader: Any) -> Iterator[Any]:
    for _ in count():
        yield from loader


def until(loader: Any) -> Iterator[Any]:
    given = 0
    while given < 500:
        for batch in loader:
            given += 1
            yield batch


def one_pass(loader: Any) -> Iterator[Any]:
    yield from loader


def changed(loader: Any) -> Iterator[Any]:
    for samples, labels in loader:
        yield samples + 1, labels


@pytest.mark.parametrize(
    ("way", "again"),
    [(cycle, True), (of_epochs, True), (until, True), (one_pass, False), (changed, False)],
)
def test_cycling_generator_is_detected(way: Callable[[Any], Any], again: bool) -> None:
    class Ways:
        def __init__(self) -> None:
            self.loader = DataLoader(dataset(), batch_size=8)

        def __iter__(self) -> Any:
            return way(self.loader)

    def training() -> None:
        module = model()
        loop(Ways(), module, torch.optim.SGD(module.parameters(), lr=0.1))

    seen = instrumented(training, script_task()).profile
    assert seen.loader is not None
    assert seen.loader.cycled == again
