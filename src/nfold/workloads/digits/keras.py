"""The digits network in Keras: layer for layer that of ``torch.py``."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from nfold.workloads.digits import DIGITS_CHANNELS, DIGITS_RATE, DIGITS_SIDE
from nfold.workloads.keras import SGD, LayerBuilder, LearningRate, cross_entropy

digits_loss = cross_entropy


def digits_model(_: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    """Images of 8 × 8 pixels in the layout to logits [n, classes]."""
    build = LayerBuilder(layout)
    x = images = build.input_images(DIGITS_SIDE, 1)
    for name in ("0", "2", "4"):
        x = build.relu(build.convolution(name, x, DIGITS_CHANNELS, 3))
    x = build.flatten(build.max_pool(x))
    return keras.Model(images, build.dense("8", x, classes))


def digits_optimizer(_: Mapping[str, int], schedule: LearningRate = None) -> SGD:
    """SGD at a fixed rate."""
    return SGD(schedule or DIGITS_RATE)
