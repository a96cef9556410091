"""Wide residual networks in Keras: layer for layer those of ``torch.py``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import keras
from keras import layers

from nfold.workloads.keras import (
    SGD,
    KerasTensor,
    LayerBuilder,
    LearningRate,
    cross_entropy,
    fan_out_normal,
)
from nfold.workloads.wide_resnet import (
    WIDE_RESNET_RATE,
    WIDE_RESNET_STAGES,
    WIDE_RESNET_WEIGHT_DECAY,
    blocks_per_stage,
)

wide_resnet_loss = cross_entropy


def wide_resnet_model(parameters: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    """Images of 32 × 32 pixels in the layout to logits [n, classes]."""
    build = LayerBuilder(layout)
    images = build.input_images(32, 3)
    x = build.convolution(
        "0", images, WIDE_RESNET_STAGES[0], 3, bias=False, kernel=fan_out_normal()
    )
    place = 1
    for stage, base in enumerate(WIDE_RESNET_STAGES):
        for block in range(blocks_per_stage(parameters["depth"])):
            stride = 2 if stage and not block else 1
            x = _wide_resnet_block(build, str(place), x, base * parameters["width"], stride)
            place += 1
    x = build.global_mean_pool(build.relu(build.batch_norm(str(place), x)))
    return keras.Model(images, build.dense(str(place + 4), x, classes))


def _wide_resnet_block(
    build: LayerBuilder, name: str, x: KerasTensor, outputs: int, stride: int
) -> KerasTensor:
    """Batch norm, ReLU, 3 × 3 convolution, twice, added to its input."""
    convolution = partial(build.convolution, bias=False, kernel=fan_out_normal())
    active = build.relu(build.batch_norm(f"{name}_norm1", x))
    inner = convolution(f"{name}_convolution1", active, outputs, 3, stride=stride)
    changes = x.shape[build.channel_axis] != outputs
    kept = convolution(f"{name}_shortcut", active, outputs, 1, stride=stride) if changes else x
    inner = build.relu(build.batch_norm(f"{name}_norm2", inner))
    return layers.Add()([kept, convolution(f"{name}_convolution2", inner, outputs, 3)])


def wide_resnet_optimizer(_: Mapping[str, int], schedule: LearningRate = None) -> SGD:
    """The paper's SGD with weight decay, at its first learning rate or by a schedule."""
    return SGD(schedule or WIDE_RESNET_RATE, decay=WIDE_RESNET_WEIGHT_DECAY)
