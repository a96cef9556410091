"""Inception-v3 as data: what every framework builds its model from, and what is counted.

A layer is a convolution (with batch norm and ReLU), a pooling, or a block of branches whose
outputs are joined along the channels; a branch may end in branches of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Convolution:
    """``channels`` outputs of a ``height`` × ``width`` kernel; padded to keep the size, or not."""

    channels: int
    height: int
    width: int
    stride: int = 1
    padded: bool = True


@dataclass(frozen=True)
class Pooling:
    """3 × 3: the largest value at stride 2, unpadded; or the mean at stride 1, padded."""

    largest: bool


@dataclass(frozen=True)
class Branches:
    """Branches over the same input, joined along the channels in their order."""

    branches: tuple[tuple[Layer, ...], ...]


Layer = Convolution | Pooling | Branches
Shape = tuple[int, int, int]
"""Channels, height, width."""

LARGEST = Pooling(largest=True)
MEAN = Pooling(largest=False)
SIDE_OF_17 = 5
"""The auxiliary head's grid: a 5 × 5 mean of the 17 × 17 grid at stride 3."""


def one(channels: int) -> Convolution:
    """1 × 1."""
    return Convolution(channels, 1, 1)


def three(channels: int) -> Convolution:
    """3 × 3."""
    return Convolution(channels, 3, 3)


def halving(channels: int) -> Convolution:
    """3 × 3 at stride 2, unpadded."""
    return Convolution(channels, 3, 3, stride=2, padded=False)


def row(channels: int, length: int) -> Convolution:
    """1 × ``length``."""
    return Convolution(channels, 1, length)


def column(channels: int, length: int) -> Convolution:
    """``length`` × 1."""
    return Convolution(channels, length, 1)


def _of_35(pooled: int) -> Branches:
    return Branches(
        (
            (one(64),),
            (one(48), Convolution(64, 5, 5)),
            (one(64), three(96), three(96)),
            (MEAN, one(pooled)),
        )
    )


def _of_17(inner: int) -> Branches:
    """7 × 7 convolutions as rows and columns of 7."""
    twice = (one(inner), column(inner, 7), row(inner, 7), column(inner, 7), row(192, 7))
    return Branches(
        (
            (one(192),),
            (one(inner), row(inner, 7), column(192, 7)),
            twice,
            (MEAN, one(192)),
        )
    )


def _of_8() -> Branches:
    """The widest: rows and columns of 3 side by side."""
    both = Branches(((row(384, 3),), (column(384, 3),)))
    return Branches(((one(320),), (one(384), both), (one(448), three(384), both), (MEAN, one(192))))


STEM: tuple[Layer, ...] = (
    halving(32),
    Convolution(32, 3, 3, padded=False),
    three(64),
    LARGEST,
    one(80),
    Convolution(192, 3, 3, padded=False),
    LARGEST,
)
TO_17 = Branches(((halving(384),), (one(64), three(96), halving(96)), (LARGEST,)))
TO_8 = Branches(
    ((one(192), halving(320)), (one(192), row(192, 7), column(192, 7), halving(192)), (LARGEST,))
)
BODY: tuple[Layer, ...] = (
    *STEM,
    *map(_of_35, (32, 64, 64)),
    TO_17,
    *map(_of_17, (128, 160, 160, 192)),
)
"""Up to where the auxiliary head branches off."""
TOP: tuple[Layer, ...] = (TO_8, _of_8(), _of_8())
AUXILIARY: tuple[Layer, ...] = (one(128), Convolution(768, 5, 5, padded=False))
"""Of the auxiliary head, between its mean pooling and its dense layer."""


def shape_after(layer: Layer, given: Shape) -> Shape:
    """The shape that a layer makes of another."""
    channels, height, width = given
    if isinstance(layer, Branches):
        ends = [after(branch, given) for branch in layer.branches]
        return sum(end[0] for end in ends), *ends[0][1:]
    if isinstance(layer, Pooling):
        return (channels, _side(height, 3, 2), _side(width, 3, 2)) if layer.largest else given
    if layer.padded:
        return layer.channels, -(-height // layer.stride), -(-width // layer.stride)
    tall, wide = (
        _side(side, kernel, layer.stride)
        for side, kernel in ((height, layer.height), (width, layer.width))
    )
    return layer.channels, tall, wide


def _side(side: int, kernel: int, stride: int) -> int:
    return (side - kernel) // stride + 1


def after(layers: tuple[Layer, ...], given: Shape) -> Shape:
    """The shape that layers make of another, one after the other."""
    for layer in layers:
        given = shape_after(layer, given)
    return given


def multiplications(layers: tuple[Layer, ...], given: Shape) -> Iterator[int]:
    """Of every convolution of the layers, for one sample."""
    for layer in layers:
        if isinstance(layer, Branches):
            for branch in layer.branches:
                yield from multiplications(branch, given)
        elif isinstance(layer, Convolution):
            outputs, height, width = shape_after(layer, given)
            yield outputs * height * width * given[0] * layer.height * layer.width
        given = shape_after(layer, given)
