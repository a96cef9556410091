"""A data set that keeps its samples is told from one that computes them at every access."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, script_task
from nfold.core.variant import Variant
from nfold.instrument import script_profiler
from nfold.instrument.input.repeated_access import repeated_access_saving


class Computing:
    """100 samples of 10 ms each; ``now`` is the CPU time. Ten times faster from an access on."""

    def __init__(self, kept: int, faster_from: int = 1000) -> None:
        self.now, self.kept, self.last = 0.0, kept, list[int]()
        self._accesses, self._faster_from = 0, faster_from

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        self._accesses += 1
        if index not in self.last:
            self.now += 0.01 if self._accesses < self._faster_from else 0.001
        self.last = [*self.last, index][-self.kept :] if self.kept else []
        return index


@pytest.mark.parametrize(("kept", "saved"), [(100, 0.99), (0, 0.0), (4, 0.0)])
def test_a_cache_of_all_samples_saves_their_time(kept: int, saved: float) -> None:
    dataset = Computing(kept)
    assert repeated_access_saving(dataset, lambda: dataset.now) == saved


@pytest.mark.parametrize("faster_from", range(1, 40))
def test_a_processor_that_becomes_faster_is_no_cache(faster_from: int) -> None:
    dataset = Computing(0, faster_from)
    assert repeated_access_saving(dataset, lambda: dataset.now) == 0.0


def test_fast_samples_and_those_that_fail_need_no_cache() -> None:
    assert repeated_access_saving(range(100), lambda: 0.0) == 0.0
    assert repeated_access_saving(iter(()), lambda: 0.0) == 0.0


@pytest.mark.parametrize(("probed", "found"), [(True, 0.9), (False, 0.0)])
def test_the_probe_run_asks_once(
    monkeypatch: pytest.MonkeyPatch, probed: bool, found: float
) -> None:
    savings = iter([0.9])
    monkeypatch.setattr(script_profiler, "repeated_access_saving", lambda _: next(savings))

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(DataLoader(dataset(), batch_size=8), module, optimizer)

    task = script_task(Variant(profiler_steps=probed), steps=4)
    assert instrumented(training, task).profile.cached_input_fraction == found
