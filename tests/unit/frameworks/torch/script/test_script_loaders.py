"""Scripts that make a DataLoader anew: for every epoch, or for every evaluation."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader

from watched import dataset, loop, model, script_task, watched


def test_a_loader_that_a_script_is_through_with_may_go() -> None:
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

    assert watched(training, script_task(steps=100)).samples is not None
