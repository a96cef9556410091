"""MNIST under the convolution network of TensorFlow's classic tutorial."""

from __future__ import annotations

from nfold.plan import Defaults
from nfold.workloads.base import SAMPLES, Info

RATE = 0.02
"""The learning rate where no peak is asked for."""


def flop_per_sample(_: object) -> float:
    """Two 5 × 5 convolutions at 28 and 14 pixels and two dense layers, times three."""
    convolutions = 28**2 * 25 * 32 + 14**2 * 25 * 32 * 64
    return 3 * 2 * (convolutions + 3136 * 1024 + 1024 * 10)


INFO = Info(
    name="mnist",
    summary="the CNN of TensorFlow's classic MNIST tutorial: 3.3 M parameters, most of them dense",
    source=(
        "TensorFlow 1 tutorial 'Deep MNIST for Experts' / tf.layers guide: conv 5×5×32, pool, "
        "conv 5×5×64, pool, dense 1024, dropout 0.4, dense 10; data: LeCun and others, 1998"
    ),
    dataset="mnist",
    training_samples=60_000,
    parameters={"samples": SAMPLES},
    defaults=Defaults(batch=100, epochs=3, data_bytes=60_000 * 28 * 28),
    flop_per_sample=flop_per_sample,
)
