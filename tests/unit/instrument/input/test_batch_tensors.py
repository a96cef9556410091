"""Batches in objects of a script's own, in torch.func's wrappers, and those nobody can count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.data import DataLoader, IterableDataset

import nfold
from instrumented import CLASSES, FEATURES, dataset, instrumented, model, script_task
from nfold.core.variant import Variant
from nfold.instrument.input.batch_tensors import (
    SampleLog,
    iter_tensors,
    map_tensors,
    sample_count,
)


class Pair:
    """As a collate function of PyTorch's own documentation makes it."""

    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.inputs = torch.stack([one for one, _ in samples])
        self.targets = [torch.stack([label for _, label in samples])]
        self.name = "a pair"
        self._spare = torch.zeros(99)


@dataclass
class Fields:
    inputs: Tensor
    targets: list[Tensor]


def _fields(samples: list[tuple[Tensor, Tensor]]) -> Fields:
    pair = Pair(samples)
    return Fields(pair.inputs, pair.targets)


SAMPLES = [(torch.randn(FEATURES), torch.tensor(k % CLASSES)) for k in range(6)]


@pytest.mark.parametrize("collate", [Pair, _fields])
def test_attributes_of_an_object_are_its_batch(collate: Callable[[Any], Any]) -> None:
    batch = collate(SAMPLES)
    assert sample_count(batch) == 6
    assert [tensor.shape for tensor in iter_tensors(batch)] == [(6, FEATURES), (6,)]
    changed = map_tensors(batch, torch.zeros_like)
    assert type(changed) is type(batch)
    assert not changed.inputs.any()
    assert not changed.targets[0].any()
    assert batch.inputs.any()
    assert SampleLog().record(batch, None) == SampleLog().record(collate(SAMPLES), None)
    assert SampleLog().record(batch, None) != SampleLog().record(collate(SAMPLES[1:]), None)


def test_objects_without_a_batch_are_unchanged() -> None:
    module, text = model(), object()
    assert not list(iter_tensors(module))
    assert not list(iter_tensors(text))
    assert map_tensors(module, torch.zeros_like) is module
    assert map_tensors(text, torch.zeros_like) is text


class Rows:
    """Tells nobody what it holds."""

    __slots__ = ("inputs", "targets")

    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.inputs, self.targets = _fields(samples).inputs, _fields(samples).targets


@pytest.mark.parametrize("collate", [Pair, Rows])
@pytest.mark.parametrize("input_", ["real", "replayed"])
def test_training_on_objects_is_counted(collate: Any, input_: Any) -> None:
    def training() -> None:
        module, loader = model(), DataLoader(dataset(256), 8, collate_fn=collate)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(batch.inputs), batch.targets[0])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    found = instrumented(training, script_task(Variant(input=input_))).samples
    assert found is not None
    assert [window.samples / window.steps for window in found.windows] == [8.0] * len(found.windows)


class Scalars(IterableDataset[Any]):
    """A stream of single numbers."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(())


def test_step_without_samples_counts_as_one() -> None:
    def training() -> None:
        weight = torch.zeros((), requires_grad=True)
        for number in DataLoader(Scalars(), batch_size=None):
            (weight * number).square().backward()
            with torch.no_grad():
                weight -= 0.01
                weight.grad = None
            nfold.mark_step()

    found = instrumented(training, script_task())
    assert found.samples is not None
    assert found.profile.samples_per_step == 0.0
    assert sum(window.samples for window in found.samples.windows) == 10


def test_samples_inside_vmap_are_unknown() -> None:
    """Inside it a batch looks like one sample."""
    seen: list[int] = []

    def record(sample: Tensor) -> Tensor:
        seen.append(sample_count(sample))
        return sample.sum()

    vmap(record)(torch.randn(5, 7, 3))
    assert seen == [0]
