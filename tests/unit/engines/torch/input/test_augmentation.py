"""Crop, flip and cutout: the draws of a sample do not depend on its batch."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from made import arrays
from nfold.data.arrays import DataSetArrays
from nfold.engines.builtin_workloads import OPERATION_KEYS
from nfold.engines.sampling import SHUFFLE_KEY
from nfold.engines.torch.input.preprocessing import (
    AUGMENTATIONS,
    Augment,
    Crop,
    Cutout,
    Flip,
    build_augmentation,
    draws,
    keep_images,
    uniform_int,
)

CPU = torch.device("cpu")
ALL = (("crop", 4), ("flip", 0), ("cutout", 3))


def _coloured() -> DataSetArrays:
    """A data set of 8 × 8 images of three channels with different means."""
    shape = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    return dataclasses.replace(
        arrays(4), train_images=shape, mean=(10.4, 120.5, 255.0), std=(60.0,) * 3
    )


def _images(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 255, (n, 8, 8, 3), dtype=torch.uint8, generator=generator)


def _built(*operations: tuple[str, int], seed: int = 5) -> Augment:
    return build_augmentation(operations, _coloured(), seed, CPU)


def _drawn(value: float, n: int = 1) -> Tensor:
    """A draw [n] at a share of its range of 32 bits."""
    return torch.full((n,), int(value * 2**32), dtype=torch.int64)


def test_a_crop_is_a_window_of_the_padded_image() -> None:
    images = _images(40)
    cropped = Crop(2, _coloured(), CPU)(images, draws(0, 0, torch.arange(40), 1))
    padded = torch.nn.functional.pad(images, (0, 0, 2, 2, 2, 2))
    for image, whole in zip(cropped, padded, strict=True):
        places = [(y, x) for y in range(5) for x in range(5)]
        assert any(torch.equal(image, whole[y : y + 8, x : x + 8]) for y, x in places)


def test_about_half_of_the_images_are_mirrored_and_the_rest_left() -> None:
    images = _images(400)
    flipped = Flip(0, _coloured(), CPU)(images, draws(0, 0, torch.arange(400), 2))
    mirrored = (flipped == images.flip(2)).flatten(1).all(dim=1)
    same = (flipped == images).flatten(1).all(dim=1)
    assert bool((mirrored ^ same).all())
    assert 150 < int(mirrored.sum()) < 250


@pytest.mark.parametrize(
    ("size", "row", "column", "rows", "columns"),
    [
        (4, 4, 4, range(2, 6), range(2, 6)),
        (3, 4, 4, range(3, 6), range(3, 6)),
        (4, 0, 7, range(2), range(5, 8)),
        (4, 7, 0, range(5, 8), range(2)),
        (1, 0, 0, range(1), range(1)),
        (16, 3, 5, range(8), range(8)),
    ],
)
def test_a_cutout_covers_its_square_as_far_as_it_is_inside(
    size: int, row: int, column: int, rows: range, columns: range
) -> None:
    images = _images(1)
    drawn = [_drawn((row + 0.5) / 8), _drawn((column + 0.5) / 8), _drawn(0), _drawn(0)]
    cut = Cutout(size, _coloured(), CPU)(images, drawn)
    expected = images.clone()
    for y in rows:
        for x in columns:
            expected[0, y, x] = torch.tensor([10, 120, 255], dtype=torch.uint8)
    assert torch.equal(cut, expected)


def test_the_centres_of_cutouts_are_everywhere_alike() -> None:
    images = torch.zeros((8_000, 8, 8, 3), dtype=torch.uint8)
    cut = _built(("cutout", 1))(images, torch.arange(8_000), 0)
    covered = (cut[..., 2] == 255).sum(dim=0)
    assert int(covered.sum()) == 8_000
    assert int(covered.min()) > 80
    assert int(covered.max()) < 175


def test_each_operation_draws_independently_of_the_others() -> None:
    """One call of the generator serves all of them, with the numbers of a call for each."""
    images, ids = _images(30), torch.arange(100, 130)
    together = _built(*ALL)(images, ids, 3)
    one_by_one = images
    for name, argument in ALL:
        operation = AUGMENTATIONS[name](argument, _coloured(), CPU)
        one_by_one = operation(one_by_one, draws(5, 3, ids, OPERATION_KEYS[name]))
    assert torch.equal(together, one_by_one)


def test_the_draws_of_earlier_versions_have_not_changed() -> None:
    """Made by version 0.1.0 before its operations drew together: results stay comparable."""
    assert {"shuffle": SHUFFLE_KEY, **OPERATION_KEYS} == {
        "shuffle": 0,
        "crop": 1,
        "flip": 2,
        "cutout": 3,
    }
    ids = torch.arange(6)
    down, right, _, _ = draws(5, 3, ids, OPERATION_KEYS["crop"])
    assert uniform_int(down, 9).tolist() == [7, 4, 4, 1, 0, 2]
    assert uniform_int(right, 9).tolist() == [4, 0, 5, 3, 6, 6]
    assert (draws(5, 3, ids, OPERATION_KEYS["flip"])[0] >> 31).tolist() == [0, 1, 0, 0, 0, 1]


def test_a_sample_is_augmented_the_same_in_any_batch() -> None:
    images, ids = _images(30), torch.arange(100, 130)
    augment = _built(*ALL)
    whole = augment(images, ids, 2)
    one_device = torch.cat([augment(images[i : i + 1], ids[i : i + 1], 2) for i in range(30)])
    assert torch.equal(whole, one_device)
    assert not torch.equal(whole, augment(images, ids, 3))
    assert not torch.equal(whole, _built(*ALL, seed=6)(images, ids, 2))


def test_an_epoch_may_be_a_tensor_that_changes_in_place() -> None:
    images, ids = _images(30), torch.arange(30)
    augment = _built(*ALL)
    epoch = torch.tensor(2)
    assert torch.equal(augment(images, ids, epoch), augment(images, ids, 2))
    epoch += 1
    assert torch.equal(augment(images, ids, epoch), augment(images, ids, 3))


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.add(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_host_or_depends_on_a_draw_s_value() -> None:
    """None of the operators that a CUDA graph cannot capture: reading, searching, copying in."""
    augment = _built(*ALL)
    images, ids, epoch = _images(30), torch.arange(30), torch.tensor(2)
    with _Seen() as seen:
        augment(images, ids, epoch)
    assert "bitwise_xor" in seen.names
    forbidden = {"_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "copy_"}
    assert not seen.names & forbidden


def test_without_operations_images_stay_as_they_are() -> None:
    assert build_augmentation((), arrays(4), 0, CPU) is keep_images
    images = _images(2)
    assert keep_images(images, torch.arange(2), 0) is images
