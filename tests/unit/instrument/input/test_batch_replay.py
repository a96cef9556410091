"""First batches again and again, in the place of a script's loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instrumented import CountingDataset, dataset, instrumented, loop, model, script_task
from nfold.core.errors import Unsupported
from nfold.core.variant import Variant
from nfold.instrument.input.batch_tensors import (
    BatchReplay,
    SampleLog,
    iter_tensors,
    map_tensors,
    sample_count,
)

REPLAYED = Variant(input="replayed")


@pytest.mark.parametrize(("samples", "read"), [(64, 64), (80 * 8, 16 * 8)])
def test_replay_keeps_short_epochs_whole(samples: int, read: int) -> None:
    data = CountingDataset(samples)
    passes: list[int] = []
    given: list[torch.Tensor] = []

    def training() -> None:
        module, loader = model(), DataLoader(data, batch_size=8)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        while True:
            passes.append(len(given))
            for batch, labels in loader:
                given.append(batch)
                loss = torch.nn.functional.cross_entropy(module(batch), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    found = instrumented(training, script_task(REPLAYED, steps=100))
    assert data.read == read
    assert found.samples is not None
    assert len(found.samples.step_ms) == 100
    # The loader keeps its length, so that what a script does after an epoch stays as frequent.
    assert passes[:2] == [0, samples // 8]
    kept = read // 8
    # The batch before the first step was real: it comes again as the first of the kept ones.
    assert torch.equal(given[0], given[1])
    assert torch.equal(given[2], given[2 + kept])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_step_pass_is_kept_from_the_next(accumulate: int) -> None:
    data = CountingDataset(8 * accumulate)

    def training() -> None:
        module, loader = model(), DataLoader(data, batch_size=8)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(loader, module, optimizer, accumulate=accumulate)

    found = instrumented(training, script_task(REPLAYED))
    assert found.samples is not None
    assert sum(window.samples for window in found.samples.windows) == 80 * accumulate
    assert data.read == 2 * len(data)


def test_replay_of_unknown_length_is_endless() -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(dataset(1000))

    def training() -> None:
        module, loader = model(), DataLoader(Endless(), batch_size=8)
        loop(loader, module, torch.optim.SGD(module.parameters(), lr=0.1), epochs=1)

    found = instrumented(training, script_task(REPLAYED, steps=200))
    assert found.samples is not None
    assert len(found.samples.step_ms) == 200


def _kept(*batches: Any) -> BatchReplay:
    replay = BatchReplay(None)
    replay.collect(iter(batches))
    return replay


def test_replayed_dictionary_is_complete() -> None:
    replay = _kept({"x": torch.ones(2), "labels": torch.zeros(2)})
    replay.next().pop("labels")
    assert set(replay.next()) == {"x", "labels"}


def test_batches_changed_in_place_are_cloned() -> None:
    replay = _kept([torch.full((2,), 8.0)])
    for _ in range(4):
        replay.next()[0].div_(2)
    # Once for real, once until it was noticed; from then on every copy is the same.
    assert replay.next()[0].tolist() == replay.next()[0].tolist()


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.ones(3, 2), 3),
        ([torch.ones(5), torch.ones(5)], 5),
        ({"ids": torch.ones(4, 7), "name": "a"}, 4),
        (("a", [torch.tensor(1.0), torch.ones(6)]), 6),
        ("nothing", 0),
    ],
)
def test_sample_count_is_the_leading_dimension(batch: Any, count: int) -> None:
    assert sample_count(batch) == count


def test_mapped_batch_has_the_same_structure() -> None:
    batch = {"a": [torch.ones(2), "text"], "b": (torch.ones(1),)}
    changed = map_tensors(batch, lambda tensor: tensor * 2)
    assert [tensor.tolist() for tensor in iter_tensors(changed)] == [[2.0, 2.0], [2.0]]
    assert changed["a"][1] == "text"
    assert isinstance(changed["b"], tuple)


def _hash(change: Callable[[Any, Any], Any], indices: Any) -> int:
    images = torch.arange(24.0).reshape(4, 6)
    labels = torch.tensor([1, 2, 3, 1])
    return SampleLog().record(change(images, labels), indices)


def test_hash_depends_on_index_and_label_only() -> None:
    plain = _hash(lambda x, y: [x, y], [0, 1, 2, 3])
    assert _hash(lambda x, y: [x + torch.rand(6), y], [0, 1, 2, 3]) == plain
    assert _hash(lambda x, y: [x.flip(0), y.flip(0)], [3, 2, 1, 0]) == plain
    assert _hash(lambda x, y: [x, y], [4, 5, 6, 7]) != plain
    # Parts of a data set that each rank has cut out for itself have equal indices.
    assert _hash(lambda x, y: [x, y + 1], [0, 1, 2, 3]) != plain
    # Equal labels tell nothing: the samples themselves count.
    assert _hash(lambda x, y: [x, y * 0], None) != _hash(lambda x, y: [x + 1, y * 0], None)


@pytest.mark.parametrize("drawn", [3, "a name", torch.tensor(3), None])
def test_index_of_a_whole_batch_is_ignored(drawn: Any) -> None:
    assert _hash(lambda x, y: [x, y], drawn) == _hash(lambda x, y: [x, y], [])


def test_batch_without_samples_has_no_hash() -> None:
    assert _hash(lambda x, y: [x[:0], y[:0]], []) == 0


def test_dataset_of_whole_batches() -> None:
    class Whole(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return dataset(64)[8 * index : 8 * index + 8]

    def training() -> None:
        module, loader = model(), DataLoader(Whole(), batch_size=None)
        loop(loader, module, torch.optim.SGD(module.parameters(), lr=0.1))

    found = instrumented(training, script_task())
    assert found.samples is not None
    assert sum(window.samples for window in found.samples.windows) == 80


def test_batch_with_hidden_tensors_moves_itself() -> None:
    class Graphs:
        num_graphs = 3

        def to(self, device: torch.device) -> str:
            return f"on {device}"

    replay = BatchReplay(torch.device("cpu"))
    replay.collect(iter([Graphs()]))
    assert replay.next() == "on cpu"
    assert sample_count(Graphs()) == 3
    with pytest.raises(Unsupported, match="of type object"):
        BatchReplay(torch.device("cpu")).collect(iter([object()]))
