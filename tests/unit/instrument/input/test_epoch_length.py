"""Where passes over a script's DataLoader end: earlier, not at all, or where they did."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from instrumented import dataset, instrumented, loop, model, overrides, script_task
from nfold.core.errors import Unsupported
from nfold.core.variant import Variant
from nfold.instrument.input.dataloader_hook import batch_size_of
from nfold.instrument.input.epoch_passes import truncated_sampler
from nfold.instrument.script_profiler import loader_facts

OUTLASTED: Any = {"steps": 3, "warmup_steps": 10}
"""Longer than a pass of 8 steps, which is longer than what is timed."""


def _loader(batch: int | None = 8, **how: Any) -> Any:
    return DataLoader(dataset(), batch_size=batch, **how)


@pytest.mark.parametrize(
    ("how", "unset"),
    [({}, True), ({"shuffle": False}, False), ({"sets_epoch": True}, False)],
)
def test_a_sampler_whose_epoch_is_not_set(how: dict[str, bool], *, unset: bool) -> None:
    def training() -> None:
        module, sets_epoch = model(), how.get("sets_epoch")
        sampler: Any = DistributedSampler(dataset(), 2, 0, shuffle=how.get("shuffle", True))
        if sets_epoch:
            sampler.set_epoch(0)
        loader = DataLoader(dataset(), batch_size=4, sampler=sampler)
        loop(loader, module, torch.optim.SGD(module.parameters(), lr=0.1))

    found = instrumented(training, script_task(steps=3)).profile.loader
    assert found is not None
    assert found.epoch_unset == unset


class Scaled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Any, ...]:
        samples, label = super().__getitem__(index)  # type: ignore[no-untyped-call]
        return 2 * samples, label


@pytest.mark.parametrize(
    ("of", "collate", "stacks"),
    [
        (TensorDataset, None, True),
        (Scaled, None, False),
        (TensorDataset, lambda samples: default_collate(samples), False),
    ],
)
def test_a_batch_of_tensors_in_memory(of: Any, collate: Any, *, stacks: bool) -> None:
    def training() -> None:
        module = model()
        loader = DataLoader(of(*dataset().tensors), batch_size=4, collate_fn=collate)
        loop(loader, module, torch.optim.SGD(module.parameters(), lr=0.1))

    found = instrumented(training, script_task(steps=3)).profile.loader
    assert found is not None
    assert found.stacks_tensors == stacks


@pytest.mark.parametrize("workers", [0, 1])
def test_passes_are_truncated(workers: int) -> None:
    loader = _loader(num_workers=workers, persistent_workers=bool(workers))
    for _ in range(2):
        overrides(script_task(Variant(batches_per_epoch=3)))(loader)
        assert [len(labels) for _, labels in loader] == [8] * 3
    assert len(loader) == 3
    cut = truncated_sampler(loader)
    assert cut is not None
    assert cut.passes_per_epoch == pytest.approx(8 / 3)
    assert (cut.batch_size, cut.drop_last) == (8, False)
    assert batch_size_of(loader) == 8


def test_unbatched_samples_are_truncated() -> None:
    loader = _loader(None)
    overrides(script_task(Variant(batches_per_epoch=5)))(loader)
    assert len(list(loader)) == len(loader) == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_long_pass_repeats_in_a_run_in_steps(workers: int) -> None:
    loader = _loader(num_workers=workers)
    before = loader_facts(loader, None)
    for _ in range(2):
        overrides(script_task(steps=3))(loader)
        assert [len(labels) for _, labels in itertools.islice(loader, 20)] == [8] * 20
    assert len(loader) == 8
    assert loader_facts(loader, None) == before


@pytest.mark.parametrize("length", [{"steps": 8}, {"steps": 4, "accumulate": 2}, {"epochs": 3}])
def test_short_or_whole_passes_end(length: Any) -> None:
    loader = _loader()
    overrides(script_task(**{"steps": None, **length}))(loader)
    assert len(list(loader)) == 8


@pytest.mark.parametrize("input_", ["real", "replayed"])
@pytest.mark.parametrize("grad", [True, False])
def test_pass_without_a_step_ends(input_: Any, grad: bool) -> None:
    """A mean over the data before the training, and an evaluation on them amid an epoch."""
    through: list[int] = []

    def look(loader: Any) -> None:
        with torch.set_grad_enabled(grad):
            through.append(len(list(loader)))

    def training() -> None:
        module, loader = model(), _loader()
        look(loader)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.register_forward_hook(lambda *_: look(loader) if len(through) < 12 else None)
        loop(loader, module, optimizer)

    found = instrumented(training, script_task(Variant(input=input_), **OUTLASTED)).samples
    assert found is not None
    assert through == [8] * 12


def test_shard_rank_of_a_repeating_pass() -> None:
    sampler: Any = DistributedSampler(dataset(), num_replicas=2, rank=0, shuffle=False)
    loader = _loader(None, sampler=sampler)
    override = overrides(script_task(Variant(data_shares=(1, 0)), world_size=2, steps=3))
    for _ in range(2):
        override(loader)
    assert sampler.rank == 1
    assert len(list(itertools.islice(loader, 100))) == 100


@pytest.mark.parametrize("input_", ["real", "replayed"])
def test_code_after_a_long_epoch_does_not_run(input_: Any) -> None:
    evaluated: list[bool] = []

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(_loader(), module, optimizer, after_epoch=lambda: evaluated.append(True))

    found = instrumented(training, script_task(Variant(input=input_), **OUTLASTED))
    assert found.samples is not None
    assert sum(window.steps for window in found.samples.windows) == 7
    assert not evaluated
    assert found.profile.epochs_completed == 0
    assert found.profile.loader is not None
    assert (found.profile.loader.batches_per_epoch, found.profile.loader.sampler) == (
        8,
        "SequentialSampler",
    )


def test_one_cycle_schedule_stays_at_its_last_step() -> None:
    """A training of one epoch, whose schedule raises an error after it."""

    def training(epochs: int = 1) -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=8)

        def step() -> None:
            optimizer.step()
            schedule.step()

        class Both:
            zero_grad = optimizer.zero_grad

        Both.step = staticmethod(step)  # type: ignore[attr-defined]
        loop(_loader(), module, Both, epochs=epochs)

    found = instrumented(training, script_task(**OUTLASTED)).samples
    assert found is not None
    assert sum(window.steps for window in found.windows) == 7
    with pytest.raises(ValueError, match="Tried to step 9 times"):
        training(epochs=2)


class Unending(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_length_read_ahead_is_kept() -> None:
    short, long = (
        overrides(script_task(Variant(batches_per_epoch=3))),
        overrides(script_task(steps=3)),
    )
    unending: Any = DataLoader(Unending(), batch_size=8)
    drawing = unending.batch_sampler
    long(unending)
    assert unending.batch_sampler is drawing
    with pytest.raises(Unsupported, match="no length"):
        short(unending)
    in_lightning: dict[str, Any] = {"__name__": "lightning.pytorch.loops.fit_loop"}
    exec("def run(what, *given): return what(*given)", in_lightning)
    with pytest.raises(Unsupported, match="Lightning"):
        in_lightning["run"](short, _loader())
    counted = _loader()
    in_lightning["run"](long, counted)
    assert len(list(counted)) == 8
    assert in_lightning["run"](loader_facts, _loader(), None).length_read_ahead
    found = loader_facts(_loader(), None)
    assert found is not None
    assert not found.length_read_ahead
