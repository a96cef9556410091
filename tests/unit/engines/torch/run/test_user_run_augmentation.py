"""``nfold.Images``: per-sample draws in a user's loader, for any data and devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from nfold.core.errors import UnknownValue, UsageError
from nfold.core.image_augmentation import Images
from nfold.core.plan import Plan
from nfold.engines.sampling import BatchDivision
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.run.augmentation import ImageAugmentation
from nfold.engines.torch.run.datasets import LoaderConfig
from nfold.engines.torch.run.loader import LoaderPosition, RunLoader

CPU = torch.device("cpu")
COUNT = 23
ALL = (("crop", 2), ("flip", 0), ("cutout", 3))


def images(*, first: bool = False) -> Tensor:
    torch.manual_seed(0)
    made = torch.randint(0, 256, (COUNT, 8, 8, 3), dtype=torch.uint8)
    return made.permute(0, 3, 1, 2).contiguous() if first else made


def recipe(rank: int = 0, ranks: int = 1, augment: Images | None = None) -> LoaderConfig:
    plan = Plan(seed=5, step="eager")
    return LoaderConfig(
        division=BatchDivision(batch=8, rank=rank, ranks=ranks),
        device=CPU,
        seed=5,
        shuffle=True,
        train=True,
        augment=ImageAugmentation(augment or Images(*ALL), plan, CPU),
    )


def seen(
    data: Any, made: LoaderConfig, epochs: int = 2, begin: LoaderPosition | None = None
) -> dict[Any, Any]:
    """What every sample looked like, by epoch and label."""
    loader = RunLoader(data, made, CurrentShare(made.division.ranks), lambda: None)
    loader.seek(begin or LoaderPosition())
    found: dict[Any, Any] = {}
    for epoch in range(loader.position.epoch, epochs):
        for pixels, labels in loader:
            found |= {(epoch, int(y)): x for x, y in zip(pixels, labels, strict=True)}
    return found


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_sample_looks_alike_whatever_holds_it() -> None:
    """Arrays, a data set and a stream of an order of its own; channels first or last."""
    labels = torch.arange(COUNT)
    expected = seen((images(), labels), recipe())
    assert len(expected) == 2 * COUNT
    assert same(seen((images(first=True), labels), recipe()), expected)
    assert same(seen(TensorDataset(images(), labels), recipe()), expected)
    assert same(seen(list(zip(images(), labels, strict=True)), recipe()), expected)


def test_a_stream_s_samples_are_drawn_by_their_place() -> None:
    pairs = list(zip(images(), torch.arange(COUNT), strict=True))
    expected = seen((images(), torch.arange(COUNT)), replace(recipe(), shuffle=False))
    assert same(seen(lambda: iter(pairs), recipe()), expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sample_looks_alike_on_any_number_of_devices(ranks: int) -> None:
    data = (images(), torch.arange(COUNT))
    expected = seen(data, recipe())
    found: dict[Any, Any] = {}
    for rank in range(ranks):
        found |= seen(data, recipe(rank, ranks))
    assert same(found, expected)


def test_a_sample_looks_different_in_every_epoch_and_alike_after_going_on() -> None:
    data = (images(), torch.arange(COUNT))
    whole = seen(data, recipe())
    assert sum(torch.equal(whole[0, n], whole[1, n]) for n in range(COUNT)) < COUNT / 2
    later = seen(data, recipe(), begin=LoaderPosition(epoch=1, step=1))
    assert len(later) == COUNT - 8
    assert all(torch.equal(later[key], whole[key]) for key in later)


def test_without_operations_images_are_only_normalised() -> None:
    data = (images(), torch.arange(COUNT))
    plain = seen(data, recipe(augment=Images()))
    shifted = seen(data, recipe(augment=Images(mean=(0.5, 0.25, 0.0), std=(0.5, 0.5, 2.0))))
    for (_, number), pixels in plain.items():
        assert torch.allclose(pixels, images()[number].permute(2, 0, 1) / 255, atol=1e-6)
    for key, pixels in shifted.items():
        channels = (plain[key] - torch.tensor([0.5, 0.25, 0.0])[:, None, None]) / torch.tensor(
            [0.5, 0.5, 2.0]
        )[:, None, None]
        assert torch.allclose(pixels, channels, atol=1e-6)


@pytest.mark.parametrize("batch", [images(), [images(), 1], {"x": images(), "y": 1}])
def test_other_values_of_a_batch_do_not_change(batch: Any) -> None:
    prepared = ImageAugmentation(Images(), Plan(), CPU)(batch, torch.arange(COUNT), 0)
    assert type(prepared) is type(batch)
    whole = prepared if isinstance(batch, Tensor) else prepared["x" if "x" in prepared else 0]
    assert whole.shape == (COUNT, 3, 8, 8)
    if not isinstance(batch, Tensor):
        assert prepared["y" if "y" in prepared else 1] == 1


@pytest.mark.parametrize(
    "batch", [torch.zeros(2, 3, 8, 8), torch.zeros(2, 9, 8, 8, dtype=torch.uint8), 3, ()]
)
def test_what_is_no_image_is_refused(batch: Any) -> None:
    with pytest.raises(UsageError, match="next"):
        ImageAugmentation(Images(), Plan(), CPU)(batch, torch.arange(2), 0)


def test_bad_operations_are_refused() -> None:
    with pytest.raises(UnknownValue, match="crop"):
        Images(("corp", 4))
    with pytest.raises(UsageError, match="pairs"):
        Images("flip")  # type: ignore[arg-type]  # the error is about that
    with pytest.raises(UsageError, match="mean"):
        Images(mean=(0.5,))
    with pytest.raises(UsageError, match="one number per channel"):
        ImageAugmentation(Images(mean=(0.5,), std=(1.0,)), Plan(), CPU)(
            images(), torch.arange(COUNT), 0
        )
