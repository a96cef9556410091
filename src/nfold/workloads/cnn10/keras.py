"""The ten-layer network in Keras: layer for layer that of ``torch.py``."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from nfold.workloads.cnn10 import RATE, STAGES, WEIGHT_DECAY
from nfold.workloads.keras import SGD, Layers, Rate, cross_entropy

loss = cross_entropy


def model(_: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    """Images of 32 × 32 pixels in the layout to logits [n, classes]."""
    build = Layers(layout)
    x = images = build.images(32, 3)
    place = 0
    for stage, channels in enumerate(STAGES):
        if stage:
            x, place = build.mean(x), place + 1
        for _layer in range(3):
            x = build.convolution(str(place), x, channels, 3, bias=False)
            x = build.relu(build.norm(str(place + 1), x))
            place += 3
    return keras.Model(images, build.dense(str(place + 2), build.global_mean(x), classes))


def optimizer(_: Mapping[str, int], schedule: Rate = None) -> SGD:
    """SGD at a fixed rate or by a schedule, with weight decay."""
    return SGD(schedule or RATE, decay=WEIGHT_DECAY)
