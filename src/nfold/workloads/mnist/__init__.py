"""MNIST under the convolution network of TensorFlow's classic tutorial."""

from __future__ import annotations

from nfold.plan import WorkloadDefaults
from nfold.workloads.base import TRAIN_SAMPLES, WorkloadInfo

MNIST_RATE = 0.02
"""The learning rate where no peak is asked for."""


def mnist_flop(_: object) -> float:
    """Two 5 × 5 convolutions at 28 and 14 pixels and two dense layers, times three."""
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
    flop_per_sample=mnist_flop,
)
