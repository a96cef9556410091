"""Digits: the embedded default. A small convolutional network on 1,797 scanned digits."""

from __future__ import annotations

from nfold.plan import WorkloadDefaults
from nfold.workloads.base import TRAIN_SAMPLES, WorkloadInfo

DIGITS_CHANNELS = 48
DIGITS_SIDE = 8
DIGITS_RATE = 0.05
"""The learning rate where no peak is asked for."""


def digits_flop(_: object) -> float:
    """Three 3 × 3 convolutions and a dense layer, forward and twice that backward."""
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
    flop_per_sample=digits_flop,
)
