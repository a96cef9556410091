"""Draws and augmentation in NumPy equal those of PyTorch bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch

from made import arrays
from nfold.engines import builtin_workloads, sampling
from nfold.engines.torch.input import preprocessing as torch_augment
from nfold.engines.torch.input import preprocessing as torch_philox
from philox_answers import KNOWN_ANSWERS


def test_published_vectors() -> None:
    for counter, key, expected in KNOWN_ANSWERS:
        words = [np.array([word], dtype=np.uint64) for word in counter]
        got = sampling.philox((words[0], words[1], words[2], words[3]), key)
        assert tuple(int(word[0]) for word in got) == expected


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (2**40 + 7, 3)])
def test_draws_are_those_of_pytorch(seed: int, epoch: int) -> None:
    ids = np.arange(2**33, 2**33 + 500)
    own = sampling.draws(seed, epoch, ids, 2)
    theirs = torch_philox.draws(seed, epoch, torch.from_numpy(ids), 2)
    for word, other in zip(own, theirs, strict=True):
        assert np.array_equal(word.astype(np.int64), other.numpy())
        assert np.array_equal(
            sampling.uniform_int(word, 9), torch_philox.uniform_int(other, 9).numpy()
        )


@pytest.mark.parametrize("n", [1, 10, 1437])
def test_the_order_of_an_epoch_is_that_of_pytorch(n: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (5, 2)):
        own = sampling.permutation(seed, epoch, n, 0)
        first, second, _, _ = torch_philox.draws(seed, epoch, torch.arange(n), 0)
        expected = torch.argsort((first << 31) ^ second, stable=True)
        assert np.array_equal(own, expected.numpy())


def test_every_operation_changes_the_pixels_that_pytorch_changes() -> None:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (50, 9, 8, 3), dtype=np.uint8)
    made = dataclasses.replace(arrays(4), train_images=images, mean=(10.4, 120.5, 255.0))
    ids = draw.integers(0, 60_000, 50)
    for operations in ((("crop", 4), ("flip", 0), ("cutout", 3)), (("flip", 0),), ()):
        cpu = torch.device("cpu")
        theirs = torch_augment.build_augmentation(operations, made, 5, cpu)
        expected = theirs(torch.from_numpy(images), torch.from_numpy(ids), 2).numpy()
        assert np.array_equal(
            builtin_workloads.build_augmentation(operations, made, 5)(images, ids, 2), expected
        ), operations
    assert (
        set(builtin_workloads.OPERATION_KEYS)
        == set(builtin_workloads.AUGMENTATIONS)
        == set(torch_augment.AUGMENTATIONS)
    )


def test_a_permutation_has_every_sample_once_and_differs_by_epoch() -> None:
    first, second = sampling.permutation(0, 0, 1000, 0), sampling.permutation(0, 1, 1000, 0)
    assert np.array_equal(np.sort(first), np.arange(1000))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, sampling.permutation(0, 0, 1000, 0))
