"""The digits network in Keras: layer for layer that of ``torch.py``."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from nfold.workloads.digits import CHANNELS, RATE, SIDE
from nfold.workloads.keras import SGD, Layers, Rate, cross_entropy

loss = cross_entropy


def model(_: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    """Images of 8 × 8 pixels in the layout to logits [n, classes]."""
    build = Layers(layout)
    x = images = build.images(SIDE, 1)
    for name in ("0", "2", "4"):
        x = build.relu(build.convolution(name, x, CHANNELS, 3))
    x = build.flat(build.largest(x))
    return keras.Model(images, build.dense("8", x, classes))


def optimizer(_: Mapping[str, int], schedule: Rate = None) -> SGD:
    """SGD at a fixed rate."""
    return SGD(schedule or RATE)
