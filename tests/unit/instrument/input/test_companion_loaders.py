"""Two DataLoaders that give a batch in every step, such as one of labelled samples and one more."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from instrumented import CountingDataset, instrumented, model, overrides, script_task
from nfold.core.script_profile import DataLoaderProfile, ReplayHints, ScriptProfile
from nfold.core.variant import Variant
from nfold.engines.torch.input.batch_source import REPLAYED_BATCHES
from nfold.instrument.input.dataloader_hook import batch_size_of
from nfold.instrument.input.epoch_passes import truncated_sampler

MANY, FEW = 320, 48


class Endlessly:
    """Begins a loader anew whenever it ends; or makes another one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._running = iter(make())

    def __next__(self) -> Any:
        try:
            return next(self._running)
        except StopIteration:
            self._running = iter(self._make())
            return next(self._running)


def trained(few: Callable[[], Any], many: Callable[[], Any], steps: int = 60) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    first, second = Endlessly(few), Endlessly(many)
    for _ in range(steps):
        (samples, labels), (others, _) = next(first), next(second)
        optimizer.zero_grad()
        whole = module(torch.cat([samples, others]))
        nn.functional.cross_entropy(whole[: len(samples)], labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.mark.parametrize("order", [1, -1])
def test_longer_of_two_loaders_has_epochs(order: int) -> None:
    first, second = [DataLoader(CountingDataset(FEW), 8), DataLoader(CountingDataset(MANY), 16)][
        ::order
    ]
    found = instrumented(lambda: trained(lambda: first, lambda: second), _task())
    seen = found.profile
    assert seen.loader is not None
    assert (seen.loader.batch_size, seen.loader.dataset_size, seen.accumulation) == (16, MANY, 1)
    assert [(one.batch_size, one.dataset_size) for one in seen.companion_loaders] == [(8, FEW)]
    assert found.samples is not None
    assert all(w.samples == 16 * w.steps for w in found.samples.windows)
    # Only the longer one's passes are epochs: three of them end in sixty steps.
    assert seen.epochs_completed <= 3


def _task(**more: Any) -> Any:
    return dataclasses.replace(script_task(steps=50, warmup_steps=8), **more)


@pytest.mark.parametrize("anew", [True, False])
def test_both_loaders_are_replayed(*, anew: bool) -> None:
    """Where one is made anew for every pass, too."""
    data, others = CountingDataset(FEW), CountingDataset(MANY)
    kept = DataLoader(data, 8)

    def few() -> Any:
        return DataLoader(data, 8) if anew else kept

    many = DataLoader(others, 16)
    task = _task(requested_variant=Variant(input="replayed"))
    found = instrumented(lambda: trained(few, lambda: many), task)
    assert found.samples is not None
    assert len(found.profile.companion_loaders) == 1
    assert data.read <= 8 * (8 + REPLAYED_BATCHES)
    assert others.read <= 16 * (8 + REPLAYED_BATCHES)


def test_evaluation_loader_is_no_companion() -> None:
    """It gives batches, too, where nobody turned gradients off; not in every step."""
    loader, evaluated = DataLoader(CountingDataset(MANY), 16), DataLoader(CountingDataset(FEW), 8)

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step, (samples, labels) in enumerate(itertools.chain(*[loader] * 4)):
            if step % 5 == 4:
                for others, _ in evaluated:
                    module(others)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(samples), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    assert instrumented(training, _task()).profile.companion_loaders == ()


def hints(workers: int = 0) -> ReplayHints:
    own = DataLoaderProfile(batch_size=16, dataset_size=MANY, num_workers=2)
    beside = (DataLoaderProfile(batch_size=8, dataset_size=FEW, num_workers=workers),)
    return ScriptProfile(loader=own, companion_loaders=beside).replay_hints


@pytest.mark.parametrize(("batch", "few", "many"), [(16, 8, 16), (8, 4, 8), (1, 1, 1)])
def test_companion_batch_size_is_in_proportion(batch: int, few: int, many: int) -> None:
    impose = overrides(_task(plan=script_task(batch=batch).plan, replay_hints=hints()))
    for samples, own, wanted in ((FEW, 8, few), (MANY, 16, many)):
        loader = DataLoader(CountingDataset(samples), own)
        for _ in range(2):
            impose(loader)
            assert batch_size_of(loader) == wanted


@pytest.mark.parametrize(("workers", "few", "many"), [(2, 1, 2), (4, 4, 4)])
def test_companion_keeps_its_workers(workers: int, few: int, many: int) -> None:
    impose = overrides(_task(plan=script_task(workers=workers).plan, replay_hints=hints(1)))
    for samples, own, had, wanted in ((FEW, 8, 1, few), (MANY, 16, 2, many)):
        loader = DataLoader(CountingDataset(samples), own, num_workers=had)
        impose(loader)
        assert loader.num_workers == wanted


def test_only_epochs_are_truncated() -> None:
    impose = overrides(_task(requested_variant=Variant(batches_per_epoch=5), replay_hints=hints()))
    few, many = DataLoader(CountingDataset(FEW), 8), DataLoader(CountingDataset(MANY), 16)
    impose(few)
    impose(many)
    assert truncated_sampler(few) is None
    assert truncated_sampler(many) is not None
