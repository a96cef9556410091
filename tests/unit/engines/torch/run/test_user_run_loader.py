"""Batches, positions, and settings of a DataLoader."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from nfold.core.errors import OutOfMemory, UnknownValue, UsageError
from nfold.engines.sampling import BatchDivision
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.run.datasets import LoaderConfig
from nfold.engines.torch.run.loader import LoaderPosition, RunLoader, resolve_settings

ALONE = LoaderConfig(
    division=BatchDivision(batch=4, rank=0, ranks=1),
    device=torch.device("cpu"),
    seed=0,
    shuffle=True,
    train=True,
)
UNSAID = {"batch_size": None, "shuffle": None, "workers": None, "drop_last": None, "collate": None}


def loader(
    data: Any, recipe: LoaderConfig = ALONE, current_share: CurrentShare | None = None
) -> RunLoader:
    return RunLoader(data, recipe, current_share or CurrentShare(1), lambda: None)


def read(made: RunLoader) -> list[list[int]]:
    return [batch.tolist() for batch in made]


def test_epochs_differ_and_are_the_same_for_arrays_and_samples() -> None:
    arrays, samples = loader(torch.arange(10)), loader(list(range(10)))
    first, second = read(arrays), read(arrays)
    assert first != second
    assert sorted(itertools.chain(*first)) == list(range(10))
    assert [read(samples), read(samples)] == [first, second]
    assert len(arrays) == len(samples) == 3


def test_the_data_set_of_a_loader_is_that_of_its_dataloader() -> None:
    samples = list(range(10))
    data, _ = resolve_settings(DataLoader(samples, batch_size=4), UNSAID)  # type: ignore[arg-type]
    assert loader(data).dataset is samples


def test_an_epoch_that_was_broken_off_is_followed_by_the_next() -> None:
    whole = loader(torch.arange(10))
    first, second = read(whole), read(whole)
    broken = loader(torch.arange(10))
    for batch in broken:
        assert batch.tolist() == first[0]
        break
    assert broken.position == LoaderPosition(epoch=1, step=0)
    assert read(broken) == second


def test_an_iteration_that_ends_late_does_not_change_the_next_one() -> None:
    made = loader(torch.arange(10))
    first, second = iter(made), iter(made)
    next(first), next(second)
    del first
    assert made.position == LoaderPosition(epoch=1, step=1)
    del second
    assert made.position == LoaderPosition(epoch=2, step=0)


def test_every_batch_beats() -> None:
    beats: list[int] = []
    made = RunLoader(
        torch.arange(10), ALONE, CurrentShare(1), lambda: None, lambda *_: beats.append(1)
    )
    assert len(read(made)) == len(beats) == 3


def test_a_loader_resumes_from_a_position() -> None:
    whole = loader(torch.arange(10))
    read(whole)
    expected = read(whole)
    for data in (torch.arange(10), list(range(10))):
        later = loader(data)
        later.seek(LoaderPosition(epoch=1, step=2))
        assert read(later) == expected[2:]
        assert later.position == LoaderPosition(epoch=2, step=0)


def test_the_position_counts_the_batch_that_is_handed_out() -> None:
    made = loader(
        torch.arange(10), replace(ALONE, division=replace(ALONE.division, micro_batches=2))
    )
    steps = [made.position.step for _ in made]
    assert steps == [0, 1, 1, 2, 2, 3]


def test_the_current_share_is_set_for_each_batch() -> None:
    current_share = CurrentShare(1)
    made = loader(torch.arange(10), current_share=current_share)
    assert [(current_share.share.count, current_share.share.global_count) for _ in made] == [
        (4, 4),
        (4, 4),
        (2, 2),
    ]


def test_a_padded_batch_in_hand_counts_nothing() -> None:
    """Six samples in batches of four: the third rank has one of the first, none of the second."""
    current_share = CurrentShare(3)
    three = BatchDivision(batch=4, rank=0, ranks=3)
    made = loader(torch.arange(6), replace(ALONE, division=three), current_share)
    checks = loader(
        torch.arange(6), replace(ALONE, division=three, train=False, shuffle=False), current_share
    )
    counts, inside, alongside = [], [], []
    for batch in made:
        counts.append(current_share.real_count(len(batch)))
        inside += [current_share.real_count(len(one)) for one in checks]
        alongside.append((current_share.real_count(len(batch)), current_share.real_count(7)))
    assert (counts, inside) == ([1, 0], [1, 1])
    assert alongside == [(1, 7), (0, 7)]
    assert current_share.real_count(1) == 1
    for _ in made:
        if current_share.is_padding:
            break
    assert not current_share.is_padding


def test_an_evaluation_tells_the_ledger_nothing_and_skips_padding() -> None:
    current_share = CurrentShare(3)
    before = current_share.share
    recipe = replace(
        ALONE, train=False, shuffle=False, division=BatchDivision(batch=4, rank=0, ranks=3)
    )
    made = loader(torch.arange(6), recipe, current_share)
    assert read(made) == [[0]]
    assert len(made) == 1
    assert current_share.share is before


@pytest.mark.parametrize("data", [TensorDataset(torch.arange(6)), torch.arange(6)])
def test_tensors_are_collated_as_the_user_wants(data: Any) -> None:
    collated = replace(ALONE, collate=lambda items: torch.tensor([len(items)]))
    assert read(loader(data, collated)) == [[4], [2]]
    with pytest.raises(UsageError, match=r"collate of a tuple of arrays.*TensorDataset"):
        loader((torch.arange(6),), collated)


def test_a_stream_has_no_length_and_may_be_collated_by_the_user() -> None:
    made = loader(lambda: iter(range(6)), replace(ALONE, collate=lambda items: torch.tensor(items)))
    assert read(made) == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(TypeError, match="no length"):
        len(made)
    dropping = replace(ALONE, division=replace(ALONE.division, drop_last=True))
    assert read(loader(lambda: iter(range(6)), dropping)) == [[0, 1, 2, 3]]


def test_a_worker_of_a_stream_reads_the_same_batches() -> None:
    one_device = loader(lambda: iter(range(10)))
    helped = loader(lambda: iter(range(10)), replace(ALONE, workers=2))
    assert read(helped) == read(one_device) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    helped.seek(LoaderPosition(epoch=1, step=2))
    assert read(helped) == [[8, 9]]


class Told:
    """Whether the user's own start of a worker was called in this process."""

    yes = False

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(self.yes)


def tell(_: int) -> None:
    Told.yes = True


def test_workers_are_started_with_the_dataloaders_options() -> None:
    numbers: Any = Told()
    data = DataLoader(numbers, batch_size=4, num_workers=1, worker_init_fn=tell, prefetch_factor=3)
    samples, settings = resolve_settings(data, UNSAID)
    assert settings["options"]["prefetch_factor"] == 3
    recipe = replace(ALONE, workers=1, options=settings["options"])
    assert read(loader(samples, recipe)) == [[1, 1, 1, 1]]
    assert resolve_settings(data, {**UNSAID, "workers": 0})[1]["options"] == {}


def test_options_that_dataloader_has_not_are_refused() -> None:
    fields = {**UNSAID, "batch_size": 1}
    assert resolve_settings([1], fields, {"timeout": 9})[1]["options"] == {"timeout": 9}
    with pytest.raises(UnknownValue, match=r"'num_workers': allowed are .*workers"):
        resolve_settings([1], fields, {"num_workers": 2})


def test_a_stream_that_is_to_be_shuffled_is_refused() -> None:
    with pytest.raises(UsageError, match=r"shuffle=True of a function.*one order"):
        resolve_settings(lambda: iter([1]), {**UNSAID, "batch_size": 1, "shuffle": True})


def test_augmentation_gets_the_batch_its_samples_and_the_epoch() -> None:
    def augment(batch: Any, ids: Tensor, epoch: int) -> Any:
        return batch * 10 + ids * 100 + epoch

    made = loader(torch.arange(4), replace(ALONE, augment=augment, shuffle=False))
    assert read(made) == [[0, 110, 220, 330]]
    assert read(made) == [[1, 111, 221, 331]]


def test_workers_read_the_same_batches() -> None:
    one_device, helped = loader(list(range(10))), loader(list(range(10)), replace(ALONE, workers=2))
    assert read(helped) == read(one_device)
    assert read(helped) == read(one_device)


def test_resident_arrays_give_the_same_batches() -> None:
    data = (torch.arange(10), torch.arange(10) * 2)
    loaded, resident = loader(data), loader(data, replace(ALONE, input="resident"))
    for _ in range(2):
        pairs = zip(loaded, resident, strict=True)
        assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def test_resident_data_that_are_no_arrays_or_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match=r"needs arrays, a list yields.*run\.loader"):
        loader([1, 2], replace(ALONE, input="resident"))
    monkeypatch.setattr("nfold.engines.torch.run.datasets.free_bytes", lambda _: 90)
    with pytest.raises(OutOfMemory, match="allowed are 80%"):
        loader(torch.arange(10), replace(ALONE, input="resident"))
    loader(torch.arange(9), replace(ALONE, input="resident"))


def test_a_dataloaders_settings_are_taken_over_unless_overridden() -> None:
    numbers: Any = list(range(9))
    data = DataLoader(numbers, batch_size=3, shuffle=True, drop_last=True)
    samples, settings = resolve_settings(data, UNSAID)
    assert samples is numbers
    assert settings == {
        "batch_size": 3,
        "shuffle": True,
        "workers": 0,
        "drop_last": True,
        "collate": default_collate,
        "options": {},
    }
    _, settings = resolve_settings(data, {**UNSAID, "batch_size": 6, "shuffle": False})
    assert (settings["batch_size"], settings["shuffle"]) == (6, False)


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0, 2.0], 2),
        RandomSampler([1, 2], replacement=True),
        RandomSampler([1, 2], num_samples=1),
    ],
)
def test_a_sampler_of_the_users_own_is_refused(sampler: Any) -> None:
    numbers: Any = [1, 2]
    data = DataLoader(numbers, sampler=sampler)
    with pytest.raises(UsageError, match=r"custom \w*RandomSampler.*run\.loader\(dataset"):
        resolve_settings(data, UNSAID)


def test_a_number_of_numpy_s_is_a_batch() -> None:
    assert (
        type(resolve_settings([1], {**UNSAID, "batch_size": np.int64(3)})[1]["batch_size"]) is int
    )


@pytest.mark.parametrize("batch", [None, 0, -1, 2.5, True])
def test_a_batch_that_is_none_is_refused(batch: object) -> None:
    with pytest.raises(UsageError, match=r"batch_size.*whole numbers from 1"):
        resolve_settings([1], {**UNSAID, "batch_size": batch})


@pytest.mark.parametrize(("batches", "expected"), [(2, 2), (3, 3), (5, 5)])
def test_a_measured_run_may_end_or_repeat_a_pass(batches: int, expected: int) -> None:
    """The lists of its sampler then belong to the same parts as before."""
    made = loader(list(range(10)))
    sampler = made._source._sampler  # type: ignore[union-attr]
    made._source._loader = _PassesOf(made._source._loader, sampler, batches)  # type: ignore[union-attr]
    found = read(made)
    assert len(found) == expected
    assert found[3:] == found[: max(0, expected - 3)]


class _PassesOf:
    """A DataLoader whose pass has so many batches, as a run that is measured makes it."""

    def __init__(self, loader: Any, sampler: Any, batches: int) -> None:
        self._loader, self._sampler, self._batches = loader, sampler, batches

    def __iter__(self) -> Any:
        lists = itertools.islice(itertools.cycle([*self._sampler.batches]), self._batches)
        return (torch.tensor(each) for each in lists)
