"""Digits: the embedded default. A small convolutional network on 1,797 scanned digits."""

from __future__ import annotations

from nfold.plan import Defaults
from nfold.workloads.base import SAMPLES, Info

CHANNELS = 48
SIDE = 8
RATE = 0.05
"""The learning rate where no peak is asked for."""


def flop_per_sample(_: object) -> float:
    """Three 3 × 3 convolutions and a dense layer, forward and twice that backward."""
    convolutions = 9 * CHANNELS * SIDE**2 * (1 + 2 * CHANNELS)
    return 3 * 2 * (convolutions + CHANNELS * (SIDE // 2) ** 2 * 10)


INFO = Info(
    name="digits",
    summary="a small CNN on 1,797 real 8 × 8 digits; needs no file and no network",
    source="data: E. Alpaydin and C. Kaynak, UCI, 1998, part of this package; our own CNN",
    dataset="digits",
    training_samples=1_437,
    parameters={"samples": SAMPLES},
    defaults=Defaults(batch=128, epochs=10, data_bytes=1_437 * 8 * 8),
    flop_per_sample=flop_per_sample,
)
