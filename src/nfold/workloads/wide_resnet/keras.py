"""Wide residual networks in Keras: layer for layer those of ``torch.py``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import keras
from keras import layers

from nfold.workloads.keras import SGD, KerasTensor, Layers, Rate, cross_entropy, from_fan_out
from nfold.workloads.wide_resnet import RATE, STAGES, WEIGHT_DECAY, blocks_per_stage

loss = cross_entropy


def model(parameters: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    """Images of 32 × 32 pixels in the layout to logits [n, classes]."""
    build = Layers(layout)
    images = build.images(32, 3)
    x = build.convolution("0", images, STAGES[0], 3, bias=False, kernel=from_fan_out())
    place = 1
    for stage, base in enumerate(STAGES):
        for block in range(blocks_per_stage(parameters["depth"])):
            stride = 2 if stage and not block else 1
            x = _block(build, str(place), x, base * parameters["width"], stride)
            place += 1
    x = build.global_mean(build.relu(build.norm(str(place), x)))
    return keras.Model(images, build.dense(str(place + 4), x, classes))


def _block(build: Layers, name: str, x: KerasTensor, outputs: int, stride: int) -> KerasTensor:
    """Batch norm, ReLU, 3 × 3 convolution, twice, added to its input."""
    convolution = partial(build.convolution, bias=False, kernel=from_fan_out())
    active = build.relu(build.norm(f"{name}_norm1", x))
    inner = convolution(f"{name}_convolution1", active, outputs, 3, stride=stride)
    changes = x.shape[build.axis] != outputs
    kept = convolution(f"{name}_shortcut", active, outputs, 1, stride=stride) if changes else x
    inner = build.relu(build.norm(f"{name}_norm2", inner))
    return layers.Add()([kept, convolution(f"{name}_convolution2", inner, outputs, 3)])


def optimizer(_: Mapping[str, int], schedule: Rate = None) -> SGD:
    """The paper's SGD with weight decay, at its first learning rate or by a schedule."""
    return SGD(schedule or RATE, decay=WEIGHT_DECAY)
