"""The image classification workloads: data, parameters, defaults, operation counts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from nfold.core.plan import WorkloadDefaults
from nfold.workloads.workload_info import (
    CUTOUT_SIDE,
    PEAK_RATE,
    TEST_SAMPLES,
    TRAIN_SAMPLES,
    WorkloadInfo,
    WorkloadParameter,
)

DIGITS_CHANNELS = 48
DIGITS_SIDE = 8


def digits_flop(_: object) -> float:
    """Count the operations per sample: forward, and twice that backward."""
    convolutions = 9 * DIGITS_CHANNELS * DIGITS_SIDE**2 * (1 + 2 * DIGITS_CHANNELS)
    return 3 * 2 * (convolutions + DIGITS_CHANNELS * (DIGITS_SIDE // 2) ** 2 * 10)


DIGITS = WorkloadInfo(
    name="digits",
    summary="a small CNN on 1,797 real 8 × 8 digits; needs no file and no network",
    source="data: E. Alpaydin and C. Kaynak, UCI, 1998, part of this package; our own CNN",
    dataset="digits",
    training_samples=1_437,
    parameters={"samples": TRAIN_SAMPLES},
    defaults=WorkloadDefaults(batch=128, epochs=10, data_bytes=1_437 * 8 * 8),
    learning_rate=0.05,
    flop_per_sample=digits_flop,
)


def mnist_flop(_: object) -> float:
    convolutions = 28**2 * 25 * 32 + 14**2 * 25 * 32 * 64
    return 3 * 2 * (convolutions + 3136 * 1024 + 1024 * 10)


MNIST = WorkloadInfo(
    name="mnist",
    summary="the CNN of TensorFlow's classic MNIST tutorial: 3.3 M parameters, most of them dense",
    source=(
        "TensorFlow 1 tutorial 'Deep MNIST for Experts' / tf.layers guide: conv 5×5×32, pool, "
        "conv 5×5×64, pool, dense 1024, dropout 0.4, dense 10; data: LeCun and others, 1998"
    ),
    dataset="mnist",
    training_samples=60_000,
    parameters={"samples": TRAIN_SAMPLES},
    defaults=WorkloadDefaults(batch=100, epochs=3, data_bytes=60_000 * 28 * 28),
    learning_rate=0.02,
    flop_per_sample=mnist_flop,
)


_CIFAR10_PARAMETERS = {
    "samples": TRAIN_SAMPLES,
    "test_samples": TEST_SAMPLES,
    "peak": PEAK_RATE,
    "cutout": CUTOUT_SIDE,
}
_cifar10_info = partial(
    WorkloadInfo,
    dataset="cifar10",
    training_samples=50_000,
    defaults=WorkloadDefaults(batch=128, epochs=1, data_bytes=50_000 * 32 * 32 * 3),
    weight_decay=5e-4,
    augmentation=(("crop", 4), ("flip", 0)),
)
CNN10_STAGES = (64, 128, 256)  # channels of the three stages of three 3 × 3 convolutions


def cnn10_flop(_: object) -> float:
    total, inputs, side = 0, 3, 32
    for channels in CNN10_STAGES:
        for _layer in range(3):
            total += side**2 * 9 * inputs * channels
            inputs = channels
        side //= 2
    return 3 * 2 * (total + CNN10_STAGES[-1] * 10)


CNN10 = _cifar10_info(
    name="cnn10",
    summary="nine convolutions with batch norm and a dense layer on CIFAR-10: 1.9 M parameters",
    source=(
        "the 10-layer CNN of a 2019 field report on two GPUs: three stages of three 3 × 3 "
        "convolutions, batch norm, ReLU; average pooling; data: A. Krizhevsky, 2009"
    ),
    parameters=_CIFAR10_PARAMETERS,
    learning_rate=0.05,
    flop_per_sample=cnn10_flop,
)


# Channels of the three stages before widening; the first convolution has 16
WIDE_RESNET_STAGES = (16, 32, 64)


def blocks_per_stage(depth: int) -> int:
    """Return n for a depth of 6n + 4 layers in three stages."""
    return (depth - 4) // 6


def impossible_depth(parameters: Mapping[str, int]) -> str | None:
    """Return why a depth is not 6n + 4 with n at least 1, or None."""
    depth = parameters["depth"]
    n = blocks_per_stage(depth)
    if n >= 1 and depth == 6 * n + 4:
        return None
    nearest = [6 * max(1, m) + 4 for m in (n, n + 1)]
    return f"depth {depth} is not 6n + 4; the nearest allowed are {nearest[0]} and {nearest[1]}"


def wide_resnet_flop(parameters: Mapping[str, int]) -> float:
    side, inputs = 32, WIDE_RESNET_STAGES[0]
    total = side**2 * 9 * 3 * inputs
    for stage, base in enumerate(WIDE_RESNET_STAGES):
        channels = base * parameters["width"]
        side = 32 >> stage
        total += side**2 * inputs * channels * (inputs != channels)
        total += side**2 * 9 * channels * (inputs + channels)
        total += side**2 * 9 * channels**2 * 2 * (blocks_per_stage(parameters["depth"]) - 1)
        inputs = channels
    return 3 * 2 * (total + inputs * 10)


WIDE_RESNET = _cifar10_info(
    name="wide_resnet",
    summary="WRN-d-k on CIFAR-10, 28-10 by default (36.5 M parameters), any depth 6n + 4 and width",
    source="S. Zagoruyko and N. Komodakis, Wide Residual Networks (BMVC 2016), without dropout",
    parameters={
        "depth": WorkloadParameter(default=28, help="layers, 6n + 4", minimum=10),
        "width": WorkloadParameter(default=10, help="factor on the channels of every stage"),
        **_CIFAR10_PARAMETERS,
    },
    learning_rate=0.1,  # the initial rate of the paper
    flop_per_sample=wide_resnet_flop,
    check_parameters=impossible_depth,
)
