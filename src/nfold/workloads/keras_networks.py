"""What the image classification workloads share in Keras: PyTorch's conventions.

A layer has the name of its counterpart in ``torch.py``, ``1_norm1`` for ``1.norm1``, so that
weights convert by name. docs/frameworks.md lists the conventions in which the two libraries differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
from keras import layers, ops

from nfold.workloads.networks import (
    CNN10_RATE,
    CNN10_STAGES,
    CNN10_WEIGHT_DECAY,
    DIGITS_CHANNELS,
    DIGITS_RATE,
    DIGITS_SIDE,
    MNIST_RATE,
    WIDE_RESNET_RATE,
    WIDE_RESNET_STAGES,
    WIDE_RESNET_WEIGHT_DECAY,
    blocks_per_stage,
)

KerasTensor = Any
LearningRate = Any  # A learning rate: a number, or a schedule over steps


def fan_in_uniform(inputs: int) -> Any:
    """Uniform up to 1 / √inputs, as PyTorch draws weights and biases of its layers."""
    limit = 1 / math.sqrt(inputs)
    return keras.initializers.RandomUniform(-limit, limit)


def fan_out_normal() -> Any:
    """Normal with the variance 2 / fan-out, as ``kaiming_normal_(mode="fan_out")`` draws."""
    return keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")


@dataclass(frozen=True)
class LayerBuilder:
    """Builds a model layer by layer in one layout: channels_first or channels_last."""

    layout: str

    @property
    def channel_axis(self) -> int:
        """Of the channels, in images [n, c, h, w] or [n, h, w, c]."""
        return 1 if self.layout == "channels_first" else -1

    def input_images(self, side: int, channels: int) -> KerasTensor:
        """The model's input: square images."""
        first = self.layout == "channels_first"
        return keras.Input((channels, side, side) if first else (side, side, channels))

    def convolution(
        self,
        name: str,
        x: KerasTensor,
        outputs: int,
        side: int,
        *,
        stride: int = 1,
        bias: bool = True,
        kernel: Any = None,
    ) -> KerasTensor:
        """A convolution padded by side // 2 on every side; ``kernel`` draws its first weights.

        Padding ``same`` would add one pixel less at the top and left where the stride is 2.
        """
        inputs = x.shape[self.channel_axis] * side**2
        if stride > 1 and side > 1:
            x = layers.ZeroPadding2D(side // 2, data_format=self.layout)(x)
        return layers.Conv2D(
            outputs,
            side,
            strides=stride,
            padding="same" if stride == 1 else "valid",
            data_format=self.layout,
            use_bias=bias,
            kernel_initializer=kernel or fan_in_uniform(inputs),
            bias_initializer=fan_in_uniform(inputs),
            name=name,
        )(x)

    def batch_norm(self, name: str, x: KerasTensor) -> KerasTensor:
        """Batch norm; PyTorch's momentum 0.1 is the part of the new, Keras's 0.9 of the old."""
        norm = layers.BatchNormalization(
            axis=self.channel_axis, momentum=0.9, epsilon=1e-5, name=name
        )
        return norm(x)

    def relu(self, x: KerasTensor) -> KerasTensor:
        """The positive part."""
        return layers.ReLU()(x)

    def max_pool(self, x: KerasTensor) -> KerasTensor:
        """Maximum pooling over squares of 2 × 2."""
        return layers.MaxPooling2D(2, data_format=self.layout)(x)

    def mean_pool(self, x: KerasTensor) -> KerasTensor:
        """Average pooling over squares of 2 × 2."""
        return layers.AveragePooling2D(2, data_format=self.layout)(x)

    def global_mean_pool(self, x: KerasTensor) -> KerasTensor:
        """Average pooling over the whole image: [n, channels]."""
        return layers.GlobalAveragePooling2D(data_format=self.layout)(x)

    def flatten(self, x: KerasTensor) -> KerasTensor:
        """Everything of a sample in one row, in the order that the layout has in memory."""
        return layers.Flatten()(x)

    def dense(self, name: str, x: KerasTensor, outputs: int) -> KerasTensor:
        """A dense layer."""
        draw = fan_in_uniform(x.shape[-1])
        return layers.Dense(outputs, kernel_initializer=draw, bias_initializer=draw, name=name)(x)


def head_logits(outputs: Any) -> list[Any]:
    """The logits of every head of a model, those that it is scored by first."""
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean cross entropy of logits [n, classes] and labels [n], computed in float32."""
    wide = ops.cast(logits, "float32")
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, wide, from_logits=True))


class SGD(keras.optimizers.Optimizer):
    """SGD with Nesterov momentum as PyTorch defines it.

    Weight decay is added to the gradient and so goes through the momentum (Keras's own is apart
    from it), and the rate multiplies the momentum when it is used (in Keras's own SGD when it is
    added, which differs as soon as the rate changes).
    """

    def __init__(
        self, learning_rate: LearningRate, *, momentum: float = 0.9, decay: float = 0.0
    ) -> None:
        super().__init__(learning_rate=learning_rate, name="sgd")
        self.momentum = momentum
        self.decay = decay
        self.momentums: list[Any] = []

    def build(self, variables: list[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self.momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        momentum = self.momentums[self._get_variable_index(variable)]
        rate = ops.cast(learning_rate, variable.dtype)
        full = ops.cast(gradient, variable.dtype)
        if self.decay:
            full = ops.add(full, ops.multiply(ops.convert_to_tensor(variable), self.decay))
        moved = ops.add(ops.multiply(ops.convert_to_tensor(momentum), self.momentum), full)
        self.assign(momentum, moved)
        step = ops.add(full, ops.multiply(moved, self.momentum))
        self.assign_sub(variable, ops.multiply(step, rate))


class MixedSGD(keras.optimizers.LossScaleOptimizer):
    """The same under fp16: the loss is scaled, and a step that overflows is skipped."""

    def __init__(self, inner: SGD) -> None:
        super().__init__(inner, initial_scale=2.0**16, dynamic_growth_steps=2000)


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


mnist_loss = cross_entropy


def mnist_model(_: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    """Images of 28 × 28 pixels in the layout to logits [n, classes]."""
    build = LayerBuilder(layout)
    images = build.input_images(28, 1)
    x = build.max_pool(build.relu(build.convolution("0", images, 32, 5)))
    x = build.max_pool(build.relu(build.convolution("3", x, 64, 5)))
    x = build.relu(build.dense("7", build.flatten(x), 1024))
    return keras.Model(images, build.dense("10", layers.Dropout(0.4)(x), classes))


def mnist_optimizer(_: Mapping[str, int], schedule: LearningRate = None) -> SGD:
    """SGD at a fixed rate."""
    return SGD(schedule or MNIST_RATE)


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
