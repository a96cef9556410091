"""A generator of the script that iterates over a loader, perhaps without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, script_task, usual


def cycle(loader: Any) -> Iterator[Any]:
    while True:
        for batch in loader:  # noqa: UP028  # as people write it
            yield batch


def changed(loader: Any) -> Iterator[Any]:
    for samples, labels in loader:
        yield samples + 1, labels


@pytest.mark.parametrize("way", [cycle, changed])
def test_generator_over_a_loader_is_named(way: Callable[[Any], Any]) -> None:
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
    assert seen.loader.in_generator
    line = seen.most_frequent_line("generator")
    first = way.__code__.co_firstlineno
    assert line is not None
    assert line.partition("test_generator_over_loader.py:")[2] in (f"{first + 1}", f"{first + 2}")


def test_loop_over_a_loader_is_no_generator() -> None:
    seen = instrumented(usual, script_task()).profile
    assert seen.loader is not None
    assert not seen.loader.in_generator
    assert seen.most_frequent_line("generator") is None
