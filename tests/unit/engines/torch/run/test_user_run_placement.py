"""A user's sharded arrays equal whole ones on every rank; ranks are threads."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nfold.core.errors import OutOfMemory
from nfold.engines.sampling import BatchDivision, BatchShare
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.input import device_dataset
from nfold.engines.torch.input.device_dataset import ShardedSelector, all_to_all_samples
from nfold.engines.torch.run import datasets
from nfold.engines.torch.run.datasets import (
    ArrayReader,
    LoaderConfig,
    place_arrays,
    total_bytes,
)
from nfold.engines.torch.run.loader import LoaderPosition, RunLoader
from rank_threads import on_threads

SAMPLES = 103
Read = list[tuple[Tensor, Tensor, BatchShare]]
pytestmark = pytest.mark.filterwarnings("ignore:the data set does not fit on each")


def data(samples: int = SAMPLES) -> dict[str, Any]:
    """Arrays of several types and shapes, no rows of which lie together."""
    numbers = torch.arange(samples)
    x = (numbers[:, None] * 7 + torch.arange(6)).to(torch.int16)
    return {"x": x.t().contiguous().t(), "y": (numbers, -numbers.double())}


def recipe(rank: int, ranks: int, batch: int, **changed: Any) -> LoaderConfig:
    division = BatchDivision(
        batch=batch, rank=rank, ranks=ranks, micro_batches=changed.pop("parts", 1)
    )
    plain = LoaderConfig(
        division=division, device=torch.device("cpu"), seed=3, shuffle=True, train=True
    )
    return replace(plain, **changed)


def is_sharded(reader: Any) -> bool:
    return isinstance(reader, ArrayReader) and isinstance(reader._selector, ShardedSelector)


def pretend(patch: pytest.MonkeyPatch, free: float) -> None:
    """Free memory in bytes, for every rank."""
    patch.setattr(datasets, "free_bytes", lambda _: int(free))
    patch.setattr(device_dataset, "all_reduce_min", lambda value, *_: value)


def read(made: RunLoader, current_share: CurrentShare, epochs: int = 2) -> Read:
    return [
        (batch["x"], torch.stack([one.double() for one in batch["y"]]), current_share.share)
        for _ in range(epochs)
        for batch in made
    ]


def loader(given: Any, how: LoaderConfig) -> tuple[RunLoader, CurrentShare]:
    current_share = CurrentShare(how.division.ranks)
    return RunLoader(given, how, current_share, lambda: None), current_share


def compare(
    patch: pytest.MonkeyPatch, ranks: int, batch: int, skip: int = 0, **fields: Any
) -> None:
    """Sharded batches against those that stay on the host."""
    pretend(patch, 1.25 * total_bytes(data()))

    def work(rank: int, where: str) -> Read:
        made, current_share = loader(data(), recipe(rank, ranks, batch, input=where, **fields))
        assert is_sharded(made._source) == (where == "resident")
        made.seek(LoaderPosition(epoch=1, step=skip))
        return read(made, current_share)

    found = on_threads(patch, ranks, lambda rank: work(rank, "resident"))
    for rank, mine in enumerate(found):
        expected = work(rank, "loader")
        assert mine
        for (x, y, share), (x_there, y_there, share_there) in zip(mine, expected, strict=True):
            assert x.dtype == torch.int16
            assert torch.equal(x, x_there)
            assert torch.equal(y, y_there)
            assert share == share_there


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("batch", [10, 17, 34, 200])
def test_batches_are_those_of_arrays_on_the_host(
    monkeypatch: pytest.MonkeyPatch, ranks: int, batch: int
) -> None:
    """Batches that do not divide; last ones of 3, 1 and 1 samples, which leave ranks without."""
    compare(monkeypatch, ranks, batch)


def test_they_are_in_parts_of_a_step_and_from_its_middle_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare(monkeypatch, 3, 10, parts=4)
    compare(monkeypatch, 3, 10, parts=4, skip=9)
    compare(monkeypatch, 2, 10, shuffle=False)


def test_an_evaluation_gives_each_sample_to_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1.25 * total_bytes(data()))

    def work(rank: int) -> list[int]:
        how = recipe(rank, 4, 34, input="resident", train=False, shuffle=False)
        made, _ = loader(data(), how)
        return [int(one) for batch in made for one in batch["y"][0]]

    found = on_threads(monkeypatch, 4, work)
    assert sorted(itertools.chain(*found)) == list(range(SAMPLES))


def test_arrays_are_whole_sharded_or_refused_by_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a host two ranks need two copies whole, or one in shards, of at most 80 % of it."""
    needed, how = total_bytes(data(40)), recipe(0, 2, 10, input="resident")
    pretend(monkeypatch, 2.5 * needed)
    assert not is_sharded(place_arrays(data(40), how))
    pretend(monkeypatch, 2.5 * needed - 1)
    assert is_sharded(place_arrays(data(40), how))
    pretend(monkeypatch, 1.25 * needed - 1)
    sizes = r"needs 2.09e-06 GiB \(1.04e-06 GiB sharded\) on the host \(2 ranks\); allowed"
    with pytest.raises(OutOfMemory, match=sizes + r".*next: nfold\.Run\(input"):
        place_arrays(data(40), how)
    assert not is_sharded(place_arrays(data(40), replace(how, input=None)))


def test_a_rank_holds_a_copy_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = data(40)
    pretend(monkeypatch, 1.25 * total_bytes(whole))
    held = []
    for rank in range(3):
        source = place_arrays(whole, recipe(rank, 3, 10, input="resident"))
        assert is_sharded(source)
        held.append(source._arrays["x"])
    assert [len(part) for part in held] == [13, 13, 14]
    assert torch.equal(torch.cat(held), whole["x"])
    assert held[0].is_contiguous()
    assert not np.shares_memory(held[0].numpy(), whole["x"].numpy())


def test_one_warning_reports_that_steps_exchange_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1.25 * total_bytes(data()))
    with pytest.warns(UserWarning, match="it is sharded over 2"):
        place_arrays(data(), recipe(0, 2, 10, input="resident"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        place_arrays(data(), recipe(1, 2, 10, input="resident"))


def test_no_step_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1.25 * total_bytes(data(3)))
    how = recipe(0, 2, 10, input="resident")
    how = replace(how, division=replace(how.division, drop_last=True))
    assert list(loader(data(3), how)[0]) == []


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.bfloat16, torch.bool])
def test_samples_of_any_type_are_sent(kind: torch.dtype, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for shape in ((4,), (4, 3, 2), (4, 0), (0, 2)):
            own = torch.arange(4 * 6)[: torch.Size(shape).numel()].view(shape).to(kind)
            got = all_to_all_samples(own, [shape[0]], [shape[0]])
            assert got.dtype == kind
            assert torch.equal(got, own)
    finally:
        dist.destroy_process_group()
