"""Ranks that get the same whole batches, of which each computes its part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, model, overrides, script_task
from nfold.core.script_profile import ReplayHints
from nfold.core.variant import Variant
from nfold.instrument.input.dataloader_hook import batch_size_of

RANKS = 2


def task(*, slices: bool, **more: Any) -> Any:
    asked = script_task(world_size=RANKS, **more)
    return dataclasses.replace(asked, replay_hints=ReplayHints(slices_batches=slices))


def _training() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for samples, labels in DataLoader(dataset(640), batch_size=8):
        optimizer.zero_grad()
        part = nn.functional.cross_entropy(module(samples[: 8 // RANKS]), labels[: 8 // RANKS])
        part.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.mark.parametrize(("slices", "each"), [(True, 4), (False, 8)])
def test_slice_of_a_rank_is_counted(*, slices: bool, each: int) -> None:
    found = instrumented(_training, task(slices=slices))
    assert (found.profile.samples_per_step, found.profile.model_samples_per_step) == (8, 4)
    assert found.samples is not None
    assert all(w.samples == each * w.steps for w in found.samples.windows)
    assert bool(found.samples.sample_hashes) != slices


def test_replica_computes_the_whole_batch() -> None:
    alone = dataclasses.replace(task(slices=True), requested_variant=Variant(independent=True))
    found = instrumented(_training, alone).samples
    assert found is not None
    assert all(w.samples == 8 * w.steps for w in found.windows)


@pytest.mark.parametrize(
    ("slices", "independent", "batch"), [(True, False, 32), (True, True, 16), (False, False, 16)]
)
def test_global_batch_of_sliced_batches(*, slices: bool, independent: bool, batch: int) -> None:
    asked = task(slices=slices, batch=32)
    if independent:
        asked = dataclasses.replace(asked, requested_variant=Variant(independent=True))
    loader = DataLoader(dataset(), batch_size=8)
    overrides(asked)(loader)
    assert batch_size_of(loader) == batch
