"""``run.loader(pad_to=...)``: which tensors are padded, with what, and to which length."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

import nfold
from nfold.core.errors import UsageError
from nfold.engines.torch.run.padding import PADDING_VALUES, PaddingCollate

COLLATE = PaddingCollate(default_collate, 4, PADDING_VALUES)


class Pair(NamedTuple):
    text: Any
    label: int


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def texts(*lengths: int) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": list(range(1, n + 1)),
            "attention_mask": np.ones(n, bool),
            "labels": torch.ones(n, dtype=torch.int64),
            "weight": float(n),
        }
        for n in lengths
    ]


def shapes(batches: Any) -> list[tuple[int, ...]]:
    return [tuple(batch["input_ids"].shape) for batch in batches]


def test_samples_are_padded_at_their_end_with_the_value_of_their_name() -> None:
    batch = COLLATE(texts(2, 5))
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch["attention_mask"].dtype == torch.bool
    assert batch["attention_mask"].sum(1).tolist() == [2, 5]
    assert batch["labels"][0].tolist() == [1, 1, *[-100] * 6]
    assert batch["weight"].tolist() == [2.0, 5.0]


def test_a_length_that_is_a_multiple_stays() -> None:
    assert COLLATE(texts(4, 3))["input_ids"].shape == (2, 4)
    assert COLLATE(texts(0))["input_ids"].shape == (1, 0)


@pytest.mark.parametrize(
    "samples", [[(1, [1, 2]), (0, [3])], [Pair([1, 2], 1), Pair([3], 0)], [[1, 2], [3]]]
)
def test_tuples_and_bare_sequences_have_positions(samples: Any) -> None:
    place = 1 if type(samples[0]) is tuple else 0
    batch = PaddingCollate(default_collate, 4, {place: 9})(samples)
    tensor = batch if isinstance(batch, Tensor) else batch[place]
    assert tensor.tolist() == [[1, 2, 9, 9], [3, 9, 9, 9]]


def test_a_collate_of_the_users_is_padded_further() -> None:
    def collate(samples: list[int]) -> Any:
        return UserDict(
            input_ids=torch.ones(len(samples), 5, dtype=torch.int64), x=torch.ones(2, 5)
        )

    batch = PaddingCollate(collate, 4, PADDING_VALUES)([1, 2])
    assert isinstance(batch, UserDict)
    assert batch["input_ids"].tolist() == [[1] * 5 + [0] * 3] * 2
    assert batch["x"].shape == (2, 5)


def test_a_tensor_of_no_known_value_is_an_error_and_none_leaves_it() -> None:
    samples = [{"positions": [1, 2]}, {"positions": [3, 4]}]
    with pytest.raises(UsageError, match=r"'positions'; next: .*padding={'positions': 0}"):
        COLLATE(samples)
    left = PaddingCollate(default_collate, 4, {"positions": None})([{"positions": np.arange(2)}])
    assert left["positions"].tolist() == [[0, 1]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_has_few_lengths(workers: int) -> None:
    run = nfold.Run(device="cpu")
    data: Any = texts(*range(1, 25))
    for given in (data, DataLoader(data, batch_size=4)):
        loader = run.loader(given, 4, train=False, workers=workers, pad_to=8)
        assert shapes(loader) == [(4, 8), (4, 8), (4, 16), (4, 16), (4, 24), (4, 24)]
    stream = run.loader(lambda: iter(data), 4, train=False, pad_to=8)
    assert {length for _, length in shapes(stream)} == {8, 16, 24}


def test_arrays_are_padded_at_once() -> None:
    run, tokens = nfold.Run(device="cpu"), torch.ones(6, 5, dtype=torch.int64)
    loader = run.loader({"input_ids": tokens, "labels": tokens}, 3, train=False, pad_to=4)
    assert [batch["labels"][0].tolist() for batch in loader] == [[1] * 5 + [-100] * 3] * 2
    dataset = TensorDataset(tokens, torch.ones(6))
    (batch,) = run.loader(dataset, 6, train=False, pad_to=4, padding={0: 7})
    assert batch[0][0].tolist() == [1] * 5 + [7] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_to": 0}, "pad_to 0: allowed are whole numbers from 1"),
        ({"pad_to": True}, "pad_to True"),
        ({"padding": {"labels": 0}}, r"padding needs pad_to; next: run.loader\(..., pad_to=64\)"),
        ({"pad_to": 8, "padding": {"labels": 0.5}}, r"padding {'labels': 0.5}: allowed is a dict"),
        ({"pad_to": 8, "padding": -100}, "padding -100: allowed is a dictionary"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        nfold.Run(device="cpu").loader(texts(1, 2), 2, **options)
