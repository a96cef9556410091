"""The ten-layer convolution network of the field reports, on CIFAR-10."""

from __future__ import annotations

from nfold.plan import WorkloadDefaults
from nfold.workloads.base import CUTOUT_SIDE, PEAK_RATE, TEST_SAMPLES, TRAIN_SAMPLES, WorkloadInfo

CNN10_STAGES = (64, 128, 256)
"""Channels of the three stages of three 3 × 3 convolutions."""
CNN10_RATE = 0.05
"""The learning rate where no peak is asked for."""
CNN10_WEIGHT_DECAY = 5e-4


def cnn10_flop(_: object) -> float:
    """Nine convolutions at 32, 16 and 8 pixels and a dense layer, times three."""
    total, inputs, side = 0, 3, 32
    for channels in CNN10_STAGES:
        for _layer in range(3):
            total += side**2 * 9 * inputs * channels
            inputs = channels
        side //= 2
    return 3 * 2 * (total + CNN10_STAGES[-1] * 10)


CNN10 = WorkloadInfo(
    name="cnn10",
    summary="nine convolutions with batch norm and a dense layer on CIFAR-10: 1.9 M parameters",
    source=(
        "the 10-layer CNN of a 2019 field report on two GPUs: three stages of three 3 × 3 "
        "convolutions, batch norm, ReLU; average pooling; data: A. Krizhevsky, 2009"
    ),
    dataset="cifar10",
    training_samples=50_000,
    parameters={
        "samples": TRAIN_SAMPLES,
        "test_samples": TEST_SAMPLES,
        "peak": PEAK_RATE,
        "cutout": CUTOUT_SIDE,
    },
    defaults=WorkloadDefaults(batch=128, epochs=1, data_bytes=50_000 * 32 * 32 * 3),
    augmentation=(("crop", 4), ("flip", 0)),
    flop_per_sample=cnn10_flop,
)
