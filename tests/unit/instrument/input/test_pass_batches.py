"""The batches of a pass over a DataLoader without a length, counted at the end of a probe run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from instrumented import CLASSES, FEATURES, dataset, instrumented, loop, model, script_task
from nfold.core.variant import Variant
from nfold.instrument.input import epoch_passes

PROBE = Variant(profiler_steps=True)


class Shards(IterableDataset[tuple[Tensor, int]]):
    """Samples whose number is not known before they are read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in range(self.samples):
            yield torch.ones(FEATURES), number % CLASSES


def _counted(samples: Dataset[Any], variant: Variant = PROBE) -> tuple[int, ...]:
    def training() -> None:
        loader, module = DataLoader(samples, batch_size=4), model()
        loop(loader, module, torch.optim.SGD(module.parameters(), lr=0.1))

    task = script_task(variant, world_size=2, steps=3, warmup_steps=2)
    return instrumented(training, task).profile.pass_batches


def test_the_rest_of_a_pass_is_counted_in_a_probe_run_only() -> None:
    assert _counted(Shards(150)) == (38,)
    assert _counted(Shards(150), Variant()) == ()
    assert _counted(dataset()) == ()


def test_a_pass_that_takes_long_or_fails_has_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Shards):
        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            yield from super().__iter__()
            raise OSError("shard 7 is gone")

    assert _counted(Failing(150)) == ()
    monkeypatch.setattr(epoch_passes, "MAX_COUNT_S", 0.0)
    assert _counted(Shards(150)) == ()
