"""Wide residual networks WRN-d-k on CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping

from nfold.plan import WorkloadDefaults
from nfold.workloads.base import (
    CUTOUT_SIDE,
    PEAK_RATE,
    TEST_SAMPLES,
    TRAIN_SAMPLES,
    WorkloadInfo,
    WorkloadParameter,
)

WIDE_RESNET_STAGES = (16, 32, 64)
"""Channels of the three stages before widening; the first convolution has 16."""
WIDE_RESNET_RATE = 0.1
"""The paper's first learning rate, where no peak is asked for."""
WIDE_RESNET_WEIGHT_DECAY = 5e-4


def blocks_per_stage(depth: int) -> int:
    """A depth of 6n + 4 layers has n blocks of two convolutions in each of three stages."""
    return (depth - 4) // 6


def impossible_depth(parameters: Mapping[str, int]) -> str | None:
    """A depth must be 6n + 4, n at least 1."""
    depth = parameters["depth"]
    n = blocks_per_stage(depth)
    if n >= 1 and depth == 6 * n + 4:
        return None
    nearest = [6 * max(1, m) + 4 for m in (n, n + 1)]
    return f"depth {depth} is not 6n + 4; the nearest allowed are {nearest[0]} and {nearest[1]}"


def wide_resnet_flop(parameters: Mapping[str, int]) -> float:
    """All convolutions and the dense layer, forward and twice that backward."""
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


WIDE_RESNET = WorkloadInfo(
    name="wide_resnet",
    summary="WRN-d-k on CIFAR-10, 28-10 by default (36.5 M parameters), any depth 6n + 4 and width",
    source="S. Zagoruyko and N. Komodakis, Wide Residual Networks (BMVC 2016), without dropout",
    dataset="cifar10",
    training_samples=50_000,
    parameters={
        "depth": WorkloadParameter(default=28, help="layers, 6n + 4", minimum=10),
        "width": WorkloadParameter(default=10, help="factor on the channels of every stage"),
        "samples": TRAIN_SAMPLES,
        "test_samples": TEST_SAMPLES,
        "peak": PEAK_RATE,
        "cutout": CUTOUT_SIDE,
    },
    defaults=WorkloadDefaults(batch=128, epochs=1, data_bytes=50_000 * 32 * 32 * 3),
    augmentation=(("crop", 4), ("flip", 0)),
    flop_per_sample=wide_resnet_flop,
    check_parameters=impossible_depth,
)
