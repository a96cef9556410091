"""Inception-v3 as data, for building the model in every framework and counting operations.

A layer is a convolution (with batch norm and ReLU), a pooling, or a block of branches whose
outputs are concatenated along the channels. A branch may contain a block of branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ConvolutionSpec:
    """A convolution with a ``height`` × ``width`` kernel; ``padded`` keeps the image size."""

    channels: int
    height: int
    width: int
    stride: int = 1
    padded: bool = True


@dataclass(frozen=True)
class Pooling3x3:
    """3 × 3 pooling: maximum at stride 2 without padding, or padded mean at stride 1."""

    is_max: bool


@dataclass(frozen=True)
class InceptionBranches:
    """Branches with the same input, concatenated along the channels."""

    branches: tuple[tuple[Layer, ...], ...]


Layer = ConvolutionSpec | Pooling3x3 | InceptionBranches
Shape = tuple[int, int, int]  # channels, height, width

MAX_POOL = Pooling3x3(is_max=True)
MEAN_POOL = Pooling3x3(is_max=False)
AUXILIARY_GRID_SIDE = 5  # the auxiliary head's grid: a 5 × 5 mean of the 17 × 17 grid at stride 3


def conv1x1(channels: int) -> ConvolutionSpec:
    return ConvolutionSpec(channels, 1, 1)


def conv3x3(channels: int) -> ConvolutionSpec:
    return ConvolutionSpec(channels, 3, 3)


def conv3x3_stride2(channels: int) -> ConvolutionSpec:
    return ConvolutionSpec(channels, 3, 3, stride=2, padded=False)


def conv_row(channels: int, length: int) -> ConvolutionSpec:
    return ConvolutionSpec(channels, 1, length)


def conv_column(channels: int, length: int) -> ConvolutionSpec:
    return ConvolutionSpec(channels, length, 1)


def _block_35(pooled: int) -> InceptionBranches:
    return InceptionBranches(
        (
            (conv1x1(64),),
            (conv1x1(48), ConvolutionSpec(64, 5, 5)),
            (conv1x1(64), conv3x3(96), conv3x3(96)),
            (MEAN_POOL, conv1x1(pooled)),
        )
    )


def _block_17(inner: int) -> InceptionBranches:
    twice = (
        conv1x1(inner),
        conv_column(inner, 7),
        conv_row(inner, 7),
        conv_column(inner, 7),
        conv_row(192, 7),
    )
    return InceptionBranches(
        (
            (conv1x1(192),),
            (conv1x1(inner), conv_row(inner, 7), conv_column(192, 7)),
            twice,
            (MEAN_POOL, conv1x1(192)),
        )
    )


def _block_8() -> InceptionBranches:
    both = InceptionBranches(((conv_row(384, 3),), (conv_column(384, 3),)))
    return InceptionBranches(
        (
            (conv1x1(320),),
            (conv1x1(384), both),
            (conv1x1(448), conv3x3(384), both),
            (MEAN_POOL, conv1x1(192)),
        )
    )


STEM: tuple[Layer, ...] = (
    conv3x3_stride2(32),
    ConvolutionSpec(32, 3, 3, padded=False),
    conv3x3(64),
    MAX_POOL,
    conv1x1(80),
    ConvolutionSpec(192, 3, 3, padded=False),
    MAX_POOL,
)
REDUCTION_17 = InceptionBranches(
    ((conv3x3_stride2(384),), (conv1x1(64), conv3x3(96), conv3x3_stride2(96)), (MAX_POOL,))
)
REDUCTION_8 = InceptionBranches(
    (
        (conv1x1(192), conv3x3_stride2(320)),
        (conv1x1(192), conv_row(192, 7), conv_column(192, 7), conv3x3_stride2(192)),
        (MAX_POOL,),
    )
)
# Up to where the auxiliary head branches off
BODY: tuple[Layer, ...] = (
    *STEM,
    *map(_block_35, (32, 64, 64)),
    REDUCTION_17,
    *map(_block_17, (128, 160, 160, 192)),
)
TOP: tuple[Layer, ...] = (REDUCTION_8, _block_8(), _block_8())
# Of the auxiliary head, between its mean pooling and its dense layer
AUXILIARY: tuple[Layer, ...] = (conv1x1(128), ConvolutionSpec(768, 5, 5, padded=False))


def layer_output_shape(layer: Layer, shape: Shape) -> Shape:
    channels, height, width = shape
    if isinstance(layer, InceptionBranches):
        ends = [output_shape(branch, shape) for branch in layer.branches]
        return sum(end[0] for end in ends), *ends[0][1:]
    if isinstance(layer, Pooling3x3):
        return (channels, (height - 3) // 2 + 1, (width - 3) // 2 + 1) if layer.is_max else shape
    if layer.padded:
        return layer.channels, -(-height // layer.stride), -(-width // layer.stride)
    stride = layer.stride
    return (
        layer.channels,
        (height - layer.height) // stride + 1,
        (width - layer.width) // stride + 1,
    )


def output_shape(layers: tuple[Layer, ...], shape: Shape) -> Shape:
    for layer in layers:
        shape = layer_output_shape(layer, shape)
    return shape


def multiplications(layers: tuple[Layer, ...], shape: Shape) -> Iterator[int]:
    """Yield the multiplications per sample of every convolution."""
    for layer in layers:
        if isinstance(layer, InceptionBranches):
            for branch in layer.branches:
                yield from multiplications(branch, shape)
        elif isinstance(layer, ConvolutionSpec):
            outputs, height, width = layer_output_shape(layer, shape)
            yield outputs * height * width * shape[0] * layer.height * layer.width
        shape = layer_output_shape(layer, shape)
