"""Inception-v3 on photographs with its published distortions.

The architecture is data, for building the model in every framework and counting operations. A layer
is a convolution (with batch norm and ReLU), a pooling, or a block of branches whose outputs are
concatenated along the channels. A branch may contain a block of branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nfold.core.plan import WorkloadDefaults
from nfold.workloads.workload_info import PEAK_RATE, TRAIN_SAMPLES, WorkloadInfo, WorkloadParameter

CLASSES = 1000
# Of the auxiliary head in the loss, as in Google's training code of 2016 (inception_model.py)
AUXILIARY_WEIGHT = 0.4
LABEL_SMOOTHING = 0.1  # of the labels (section 7 of the paper)
MIN_SIDE = 75  # pixels of the smallest image that leaves a grid for the last blocks


@dataclass(frozen=True)
class ConvolutionSpec:
    """A convolution with a ``height`` × ``width`` kernel; ``padded`` keeps the image size."""

    channels: int
    height: int = 1
    width: int = 1
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


def _halving(channels: int) -> ConvolutionSpec:
    return ConvolutionSpec(channels, 3, 3, stride=2, padded=False)


def _block_35(pooled: int) -> InceptionBranches:
    return InceptionBranches(
        (
            (ConvolutionSpec(64),),
            (ConvolutionSpec(48), ConvolutionSpec(64, 5, 5)),
            (ConvolutionSpec(64), ConvolutionSpec(96, 3, 3), ConvolutionSpec(96, 3, 3)),
            (MEAN_POOL, ConvolutionSpec(pooled)),
        )
    )


def _block_17(inner: int) -> InceptionBranches:
    column, row = ConvolutionSpec(inner, 7, 1), ConvolutionSpec(inner, 1, 7)
    return InceptionBranches(
        (
            (ConvolutionSpec(192),),
            (ConvolutionSpec(inner), row, ConvolutionSpec(192, 7, 1)),
            (ConvolutionSpec(inner), column, row, column, ConvolutionSpec(192, 1, 7)),
            (MEAN_POOL, ConvolutionSpec(192)),
        )
    )


_BOTH = InceptionBranches(((ConvolutionSpec(384, 1, 3),), (ConvolutionSpec(384, 3, 1),)))
_BLOCK_8 = InceptionBranches(
    (
        (ConvolutionSpec(320),),
        (ConvolutionSpec(384), _BOTH),
        (ConvolutionSpec(448), ConvolutionSpec(384, 3, 3), _BOTH),
        (MEAN_POOL, ConvolutionSpec(192)),
    )
)
_REDUCTION_17 = InceptionBranches(
    (
        (_halving(384),),
        (ConvolutionSpec(64), ConvolutionSpec(96, 3, 3), _halving(96)),
        (MAX_POOL,),
    )
)
_REDUCTION_8 = InceptionBranches(
    (
        (ConvolutionSpec(192), _halving(320)),
        (
            ConvolutionSpec(192),
            ConvolutionSpec(192, 1, 7),
            ConvolutionSpec(192, 7, 1),
            _halving(192),
        ),
        (MAX_POOL,),
    )
)
# Up to where the auxiliary head branches off
BODY: tuple[Layer, ...] = (
    _halving(32),
    ConvolutionSpec(32, 3, 3, padded=False),
    ConvolutionSpec(64, 3, 3),
    MAX_POOL,
    ConvolutionSpec(80),
    ConvolutionSpec(192, 3, 3, padded=False),
    MAX_POOL,
    *map(_block_35, (32, 64, 64)),
    _REDUCTION_17,
    *map(_block_17, (128, 160, 160, 192)),
)
TOP: tuple[Layer, ...] = (_REDUCTION_8, _BLOCK_8, _BLOCK_8)
# Of the auxiliary head, between its mean pooling and its dense layer
AUXILIARY: tuple[Layer, ...] = (ConvolutionSpec(128), ConvolutionSpec(768, 5, 5, padded=False))


def output_shape(layers: tuple[Layer, ...], shape: Shape) -> Shape:
    for layer in layers:
        channels, *sides = shape
        if isinstance(layer, InceptionBranches):
            ends = [output_shape(branch, shape) for branch in layer.branches]
            channels, sides = sum(end[0] for end in ends), list(ends[0][1:])
        elif isinstance(layer, Pooling3x3):
            sides = [(side - 3) // 2 + 1 for side in sides] if layer.is_max else sides
        elif layer.padded:
            channels, sides = layer.channels, [-(-side // layer.stride) for side in sides]
        else:
            kernel = layer.height, layer.width
            pairs = zip(sides, kernel, strict=True)
            channels, sides = layer.channels, [(s - k) // layer.stride + 1 for s, k in pairs]
        shape = (channels, sides[0], sides[1])
    return shape


def multiplications(layers: tuple[Layer, ...], shape: Shape) -> Iterator[int]:
    """Yield the multiplications per sample of every convolution."""
    for layer in layers:
        if isinstance(layer, InceptionBranches):
            for branch in layer.branches:
                yield from multiplications(branch, shape)
        elif isinstance(layer, ConvolutionSpec):
            outputs, height, width = output_shape((layer,), shape)
            yield outputs * height * width * shape[0] * layer.height * layer.width
        shape = output_shape((layer,), shape)


def flop_per_sample(parameters: Mapping[str, int]) -> float:
    """Count the operations per sample: forward, and twice that backward."""
    images = 3, parameters["size"], parameters["size"]
    grid = output_shape(BODY, images)
    total = sum(multiplications(BODY, images)) + sum(multiplications(TOP, grid))
    total += output_shape(TOP, grid)[0] * parameters["classes"]
    if parameters["aux"]:
        pooled = (grid[0], AUXILIARY_GRID_SIDE, AUXILIARY_GRID_SIDE)
        total += sum(multiplications(AUXILIARY, pooled))
        total += output_shape(AUXILIARY, pooled)[0] * parameters["classes"]
    return 3 * 2 * total


INFO = WorkloadInfo(
    name="inception_v3",
    summary="Inception-v3 on JPEG photographs with its published distortions: 27.2 M parameters",
    source=(
        "C. Szegedy and others, Rethinking the Inception Architecture for Computer Vision "
        "(arXiv:1512.00567, 2015); distortions as in Google's training code of 2016 "
        "(image_processing.py); data: a folder per class, or Parquet with JPEGs"
    ),
    dataset="photographs",
    training_samples=1_281_167,
    parameters={
        "size": WorkloadParameter(default=299, help="pixels of an image's side", minimum=MIN_SIDE),
        "classes": WorkloadParameter(
            default=CLASSES, help="classes that the labels are of", minimum=2
        ),
        "aux": WorkloadParameter(
            default=1, help="1: with the auxiliary head", minimum=0, maximum=1
        ),
        "repeat": WorkloadParameter(default=1, help="times that an epoch has every photograph"),
        "samples": TRAIN_SAMPLES,
        "peak": PEAK_RATE,
    },
    defaults=WorkloadDefaults(batch=32, epochs=1, encoded=True),
    # SGD: docs/decisions/input-pipeline.md tells why not RMSProp
    learning_rate=0.045,  # the paper's (section 8)
    weight_decay=4e-5,  # as in Google's published training code
    flop_per_sample=flop_per_sample,
)
