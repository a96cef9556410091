"""Wide residual networks WRN-d-k on CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping

from nfold.plan import Defaults
from nfold.workloads.base import CUTOUT, PEAK, SAMPLES, TEST_SAMPLES, Info, Parameter

STAGES = (16, 32, 64)
"""Channels of the three stages before widening; the first convolution has 16."""
RATE = 0.1
"""The paper's first learning rate, where no peak is asked for."""
WEIGHT_DECAY = 5e-4


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


def flop_per_sample(parameters: Mapping[str, int]) -> float:
    """All convolutions and the dense layer, forward and twice that backward."""
    side, inputs = 32, STAGES[0]
    total = side**2 * 9 * 3 * inputs
    for stage, base in enumerate(STAGES):
        channels = base * parameters["width"]
        side = 32 >> stage
        total += side**2 * inputs * channels * (inputs != channels)
        total += side**2 * 9 * channels * (inputs + channels)
        total += side**2 * 9 * channels**2 * 2 * (blocks_per_stage(parameters["depth"]) - 1)
        inputs = channels
    return 3 * 2 * (total + inputs * 10)


INFO = Info(
    name="wide_resnet",
    summary="WRN-d-k on CIFAR-10, 28-10 by default (36.5 M parameters), any depth 6n + 4 and width",
    source="S. Zagoruyko and N. Komodakis, Wide Residual Networks (BMVC 2016), without dropout",
    dataset="cifar10",
    training_samples=50_000,
    parameters={
        "depth": Parameter(default=28, meaning="layers, 6n + 4", minimum=10),
        "width": Parameter(default=10, meaning="factor on the channels of every stage"),
        "samples": SAMPLES,
        "test_samples": TEST_SAMPLES,
        "peak": PEAK,
        "cutout": CUTOUT,
    },
    defaults=Defaults(batch=128, epochs=1, data_bytes=50_000 * 32 * 32 * 3),
    augmentation=(("crop", 4), ("flip", 0)),
    flop_per_sample=flop_per_sample,
    check=impossible_depth,
)
