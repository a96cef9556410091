"""Inception's distortion on the CPU and on a device: the same pixels, up to rounding."""

from __future__ import annotations

import colorsys

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nfold.data.distortion import (
    AREA,
    BICUBIC,
    BILINEAR,
    METHODS,
    NEAREST,
    Distorter,
    DistortionParameters,
    resize,
)
from nfold.engines.builtin_workloads import draw_distortions as each_look
from nfold.engines.distortion import DistortionParameterBatch
from nfold.engines.torch.batch import CanvasTensors
from nfold.engines.torch.input.image_files import fill_canvases
from nfold.engines.torch.input.preprocessing import DeviceDistortion
from photos import picture

CPU = torch.device("cpu")
SIZE = 75
MEAN_LEVELS, MOST_LEVELS = 0.5, 4
"""Of 255: how far the placements may be apart, in the mean and in one pixel of 10,000."""


def stacked(regions: list[npt.NDArray[np.uint8]], ids: torch.Tensor) -> CanvasTensors:
    places = torch.tensor([region.shape[:2] for region in regions])
    pixels = torch.from_numpy(np.concatenate([region.ravel() for region in regions]))
    images = fill_canvases(pixels, places, 128)
    return CanvasTensors(images, torch.zeros(len(ids)), ids, places)


def fixed(monkeypatch: pytest.MonkeyPatch, look: DistortionParameters, n: int) -> None:
    def drawn(*_: object) -> DistortionParameterBatch:
        values = {name: torch.tensor([value] * n) for name, value in vars(look).items()}
        return DistortionParameterBatch(**values)

    monkeypatch.setattr(DeviceDistortion, "parameters", drawn)


@pytest.mark.parametrize("method", range(len(METHODS)), ids=METHODS)
@pytest.mark.parametrize("mirrored", [False, True])
def test_both_resize_alike(monkeypatch: pytest.MonkeyPatch, method: int, mirrored: bool) -> None:
    sides = ((128, 97), (30, 110), (75, 75), (40, 51), (101, 60), (1, 1), (2, 128))
    regions = [picture(*side, seed) for seed, side in enumerate(sides)]
    look = DistortionParameters(method, mirrored, False, 0.0, 1.0, 0.0, 1.0)
    fixed(monkeypatch, look, len(regions))
    batch = stacked(regions, torch.arange(len(regions)))
    device = DeviceDistortion(SIZE, 0, CPU)(batch, torch.tensor(0)).numpy()
    for made, region in zip(device, regions, strict=True):
        here = resize(region, SIZE, method)
        here = here[:, ::-1] if mirrored else here
        assert np.abs(made.astype(int) - here).max() <= (0 if method == NEAREST else 2)
        assert np.abs(made.astype(int) - here).mean() < 0.5


def test_colours_change_alike_and_as_in_hsv() -> None:
    image = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    ids = torch.arange(12)
    distortion = DeviceDistortion(SIZE, 3, CPU)
    found = distortion.parameters(1, ids)
    device = distortion.adjust_colours(
        torch.from_numpy(image).float().expand(12, *image.shape), found
    ).numpy()
    distort = Distorter(SIZE)
    for made, look in zip(device, each_look(3, 1, ids.numpy()), strict=True):
        here = np.empty_like(image)
        distort.adjust_colors(image, look, here)
        assert np.abs(made.astype(int) - here).max() <= 2
        np.testing.assert_allclose(here[:4, :4], by_hand(image, look)[:4, :4], atol=1)


def by_hand(image: npt.NDArray[np.uint8], look: DistortionParameters) -> npt.NDArray[np.float64]:
    """The published order of operations with Python's own HSV, on levels."""

    def contrast(colours: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        mean = colours.mean((0, 1))
        changed: npt.NDArray[np.float64] = (colours - mean) * look.contrast + mean
        return changed

    def changed(colour: npt.NDArray[np.float64]) -> tuple[float, float, float]:
        hue, saturation, value = colorsys.rgb_to_hsv(*np.maximum(colour, 0))
        return colorsys.hsv_to_rgb(
            (hue + look.hue) % 1, min(1, saturation * look.saturation), value
        )

    colours = image / 255 + look.brightness
    colours = contrast(colours) if look.contrast_second else colours
    colours = np.apply_along_axis(changed, 2, colours)
    colours = colours if look.contrast_second else contrast(colours)
    clipped: npt.NDArray[np.float64] = np.clip(colours * 255, 0, 255)
    return clipped


def test_the_whole_distortion_agrees() -> None:
    ids = torch.arange(64)
    regions = [picture(20 + 3 * (i % 32), 128 - 2 * (i % 50), i) for i in range(64)]
    device = DeviceDistortion(SIZE, 9, CPU)(stacked(regions, ids), torch.tensor(2)).numpy()
    distort = Distorter(SIZE)
    here = np.empty_like(device)
    for row, look in enumerate(each_look(9, 2, ids.numpy())):
        distort(regions[row], look, here[row])
    apart = np.abs(device.astype(int) - here)
    assert apart.mean() < MEAN_LEVELS
    assert (apart > MOST_LEVELS).mean() < 1e-4


def test_area_is_the_mean_of_what_a_pixel_covers() -> None:
    region = picture(150, 225)
    means = region.reshape(75, 2, 75, 3, 3).mean((1, 3))
    np.testing.assert_allclose(resize(region, 75, AREA), means, atol=0.51)


@pytest.mark.parametrize("method", [BILINEAR, BICUBIC, AREA, NEAREST])
def test_the_same_size_changes_nothing(method: int) -> None:
    region = picture(75, 75)
    np.testing.assert_array_equal(resize(region, 75, method), region)


def test_cubic_weights_sum_to_one() -> None:
    past = torch.linspace(0, 1, 11)[:, None]
    weights = DeviceDistortion(SIZE, 0, CPU).cubic_weight((torch.arange(4) - 1 - past).abs())
    torch.testing.assert_close(weights.sum(1), torch.ones(11))


def test_draws_cover_their_ranges() -> None:
    distortion = DeviceDistortion(SIZE, 1, CPU)
    found = distortion.parameters(0, torch.arange(4000))
    counts = torch.bincount(found.method)
    assert len(counts) == 4
    assert counts.min() > 850
    for name, low, high in (
        ("brightness", -32 / 255, 32 / 255),
        ("saturation", 0.5, 1.5),
        ("hue", -0.2, 0.2),
        ("contrast", 0.5, 1.5),
    ):
        values = getattr(found, name)
        assert low <= values.min() < low + 0.02
        assert high - 0.02 < values.max() <= high
    assert 1800 < int(found.mirrored.sum()) < 2200
    assert 1800 < int(found.contrast_second.sum()) < 2200
    again = distortion.parameters(1, torch.arange(4000))
    assert not torch.equal(found.method, again.method)
