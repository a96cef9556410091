"""The ten-layer network in Keras: layer for layer that of ``torch.py``."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from nfold.workloads.cnn10 import CNN10_RATE, CNN10_STAGES, CNN10_WEIGHT_DECAY
from nfold.workloads.keras import SGD, LayerBuilder, LearningRate, cross_entropy

cnn10_loss = cross_entropy


def cnn10_model(_: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    """Images of 32 × 32 pixels in the layout to logits [n, classes]."""
    build = LayerBuilder(layout)
    x = images = build.input_images(32, 3)
    place = 0
    for stage, channels in enumerate(CNN10_STAGES):
        if stage:
            x, place = build.mean_pool(x), place + 1
        for _layer in range(3):
            x = build.convolution(str(place), x, channels, 3, bias=False)
            x = build.relu(build.batch_norm(str(place + 1), x))
            place += 3
    return keras.Model(images, build.dense(str(place + 2), build.global_mean_pool(x), classes))


def cnn10_optimizer(_: Mapping[str, int], schedule: LearningRate = None) -> SGD:
    """SGD at a fixed rate or by a schedule, with weight decay."""
    return SGD(schedule or CNN10_RATE, decay=CNN10_WEIGHT_DECAY)
