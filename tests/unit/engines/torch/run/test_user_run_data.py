"""What ``run.loader`` takes for arrays, data sets and streams."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from nfold.core.errors import UsageError
from nfold.engines.torch.run.datasets import as_arrays, is_map_style, iterator_factory, sample_count


def test_arrays_keep_their_structure() -> None:
    x, y = torch.zeros(4, 2), np.arange(4)
    pair = as_arrays((x, y))
    assert isinstance(pair, tuple)
    assert pair[0] is x
    assert pair[1].tolist() == [0, 1, 2, 3]
    named = as_arrays({"image": x, "label": y})
    assert named is not None
    assert list(named) == ["image", "label"]
    assert sample_count(named) == 4
    assert as_arrays(TensorDataset(x, x)) == (x, x)


@pytest.mark.parametrize("data", [[(torch.zeros(2), 1)], (torch.zeros(2), "a"), {}, (), "text", 3])
def test_other_things_are_no_arrays(data: object) -> None:
    assert as_arrays(data) is None


def test_tensors_that_are_changed_when_they_are_read_are_no_arrays() -> None:
    class Halved(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return [tensor[index] / 2 for tensor in self.tensors]

    assert as_arrays(Halved(torch.ones(4))) is None


def test_arrays_that_torch_cannot_read_as_they_lie_are_copied(tmp_path: Path) -> None:
    numbers = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.save(tmp_path / "kept.npy", numbers)
    mapped = np.load(tmp_path / "kept.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for array in (numbers[::-1][::-1], numbers.astype(">f4"), mapped):
            found = as_arrays(array)
            assert found is not None
            assert found.tolist() == numbers.tolist()
        turned = as_arrays(numbers[::-1])
        assert turned is not None
        assert turned.tolist() == numbers[::-1].tolist()


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None])])
def test_arrays_of_no_numbers_are_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(UsageError, match=r"an array of .*: allowed are numbers"):
        as_arrays((np.zeros(1), array))


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[4, 3\] samples"):
        sample_count((torch.zeros(4), torch.zeros(3)))
    with pytest.raises(UsageError, match=r"\[4, 0\] samples"):
        sample_count((torch.zeros(4), torch.tensor(3)))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_list_of_samples_is_map_style_and_an_iterable_is_not() -> None:
    assert is_map_style([(1, 2)])
    assert not is_map_style(Endless())
    assert not is_map_style(iter([1]))


def test_a_stream_begins_anew_each_time() -> None:
    for data in (Endless(), lambda: iter(range(3)), {0, 1, 2}):
        start = iterator_factory(data)
        assert [list(start()), list(start())] == [[0, 1, 2], [0, 1, 2]]


def test_a_generator_is_refused_with_what_to_pass() -> None:
    with pytest.raises(UsageError, match=r"generator can be read only once.*run\.loader"):
        iterator_factory(n for n in range(3))
    with pytest.raises(UsageError, match="a int is no data set"):
        iterator_factory(3)
