"""Crop and flip: each sample by its own draws, whatever batch it comes in."""

import torch

from nfold.frameworks.torch.augment import augment, crop, flip


def _images(n: int) -> torch.Tensor:
    return torch.randint(1, 255, (n, 8, 8, 3), dtype=torch.uint8, generator=_generator())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_crop_is_a_window_of_the_padded_image() -> None:
    images = _images(40)
    cropped = crop(images, torch.arange(40), 0, 0, 2)
    padded = torch.nn.functional.pad(images, (0, 0, 2, 2, 2, 2))
    for image, whole in zip(cropped, padded, strict=True):
        places = [(y, x) for y in range(5) for x in range(5)]
        assert any(torch.equal(image, whole[y : y + 8, x : x + 8]) for y, x in places)


def test_about_half_of_the_images_are_mirrored_and_the_rest_left() -> None:
    images = _images(400)
    flipped = flip(images, torch.arange(400), 0, 0, 0)
    mirrored = (flipped == images.flip(2)).flatten(1).all(dim=1)
    same = (flipped == images).flatten(1).all(dim=1)
    assert bool((mirrored ^ same).all())
    assert 150 < int(mirrored.sum()) < 250


def test_a_sample_is_augmented_the_same_in_any_batch() -> None:
    images, ids = _images(30), torch.arange(100, 130)
    operations = (("crop", 4), ("flip", 0))
    whole = augment(images, ids, 5, 2, operations)
    alone = torch.cat(
        [augment(images[i : i + 1], ids[i : i + 1], 5, 2, operations) for i in range(30)]
    )
    assert torch.equal(whole, alone)
    assert not torch.equal(whole, augment(images, ids, 5, 3, operations))
