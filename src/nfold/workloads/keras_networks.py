"""The image classification networks in Keras, with PyTorch's conventions.

Layers have the names of ``torch_networks.py`` (``1_norm1`` for ``1.norm1``), so that weights can be
converted by name. docs/frameworks.md lists the differences between the conventions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
from keras import layers, ops

from nfold.workloads import networks
from nfold.workloads.workload_info import WorkloadInfo

KerasTensor = Any
LearningRate = Any  # A learning rate: a number, or a schedule over steps


def fan_in_uniform(inputs: int) -> Any:
    """Return PyTorch's default initializer: uniform in ± 1 / √inputs."""
    limit = 1 / math.sqrt(inputs)
    return keras.initializers.RandomUniform(-limit, limit)


def fan_out_normal() -> Any:
    """Return ``kaiming_normal_(mode="fan_out")``: normal with variance 2 / fan-out."""
    return keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")


@dataclass(frozen=True)
class LayerBuilder:
    """Builds a model layer by layer in one layout: channels_first or channels_last."""

    layout: str

    @property
    def channel_axis(self) -> int:
        return 1 if self.layout == "channels_first" else -1

    def input_images(self, side: int, channels: int) -> KerasTensor:
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
        """Add a convolution padded by side // 2; ``kernel`` is its initializer.

        With stride 2, Keras's padding ``same`` would pad one pixel less at the top and left.
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
        # Momentum 0.9 weights the old statistics; PyTorch's 0.1 weights the new ones.
        norm = layers.BatchNormalization(
            axis=self.channel_axis, momentum=0.9, epsilon=1e-5, name=name
        )
        return norm(x)

    def max_pool(self, x: KerasTensor) -> KerasTensor:
        return layers.MaxPooling2D(2, data_format=self.layout)(x)

    def global_mean_pool(self, x: KerasTensor) -> KerasTensor:
        return layers.GlobalAveragePooling2D(data_format=self.layout)(x)

    def dense(self, name: str, x: KerasTensor, outputs: int) -> KerasTensor:
        draw = fan_in_uniform(x.shape[-1])
        return layers.Dense(outputs, kernel_initializer=draw, bias_initializer=draw, name=name)(x)


def head_logits(outputs: Any) -> list[Any]:
    """Return the logits of every head as a list, the main head first."""
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean cross entropy of logits [n, classes] and labels [n], computed in float32."""
    logits = ops.cast(logits, "float32")
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


class SGD(keras.optimizers.Optimizer):
    """SGD with Nesterov momentum as in PyTorch.

    Weight decay is part of the gradient (Keras decouples it). The learning rate scales the update
    (Keras scales the momentum, which differs if the learning rate changes).
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
        gradient = ops.cast(gradient, variable.dtype)
        if self.decay:
            decay = ops.multiply(ops.convert_to_tensor(variable), self.decay)
            gradient = ops.add(gradient, decay)
        velocity = ops.add(ops.multiply(ops.convert_to_tensor(momentum), self.momentum), gradient)
        self.assign(momentum, velocity)
        step = ops.add(gradient, ops.multiply(velocity, self.momentum))
        self.assign_sub(variable, ops.multiply(step, rate))


class MixedSGD(keras.optimizers.LossScaleOptimizer):
    def __init__(self, inner: SGD) -> None:
        super().__init__(inner, initial_scale=2.0**16, dynamic_growth_steps=2000)


def create_optimizer(
    info: WorkloadInfo, _: Mapping[str, int], schedule: LearningRate = None
) -> SGD:
    return SGD(schedule or info.learning_rate, decay=info.weight_decay)


def digits_model(_: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    build = LayerBuilder(layout)
    x = images = build.input_images(networks.DIGITS_SIDE, 1)
    for name in ("0", "2", "4"):
        x = layers.ReLU()(build.convolution(name, x, networks.DIGITS_CHANNELS, 3))
    x = layers.Flatten()(build.max_pool(x))
    return keras.Model(images, build.dense("8", x, classes))


def mnist_model(_: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    build = LayerBuilder(layout)
    images = build.input_images(28, 1)
    x = build.max_pool(layers.ReLU()(build.convolution("0", images, 32, 5)))
    x = build.max_pool(layers.ReLU()(build.convolution("3", x, 64, 5)))
    x = layers.ReLU()(build.dense("7", layers.Flatten()(x), 1024))
    return keras.Model(images, build.dense("10", layers.Dropout(0.4)(x), classes))


def cnn10_model(_: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    build = LayerBuilder(layout)
    x = images = build.input_images(32, 3)
    index = 0
    for stage, channels in enumerate(networks.CNN10_STAGES):
        if stage:
            x, index = layers.AveragePooling2D(2, data_format=layout)(x), index + 1
        for _layer in range(3):
            x = build.convolution(str(index), x, channels, 3, bias=False)
            x = layers.ReLU()(build.batch_norm(str(index + 1), x))
            index += 3
    return keras.Model(images, build.dense(str(index + 2), build.global_mean_pool(x), classes))


def wide_resnet_model(parameters: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    build = LayerBuilder(layout)
    images = build.input_images(32, 3)
    x = build.convolution(
        "0", images, networks.WIDE_RESNET_STAGES[0], 3, bias=False, kernel=fan_out_normal()
    )
    index = 1
    for stage, base in enumerate(networks.WIDE_RESNET_STAGES):
        for block in range(networks.blocks_per_stage(parameters["depth"])):
            stride = 2 if stage and not block else 1
            x = _wide_resnet_block(build, str(index), x, base * parameters["width"], stride)
            index += 1
    x = build.global_mean_pool(layers.ReLU()(build.batch_norm(str(index), x)))
    return keras.Model(images, build.dense(str(index + 4), x, classes))


def _wide_resnet_block(
    build: LayerBuilder, name: str, x: KerasTensor, outputs: int, stride: int
) -> KerasTensor:
    convolution = partial(build.convolution, bias=False, kernel=fan_out_normal())
    active = layers.ReLU()(build.batch_norm(f"{name}_norm1", x))
    inner = convolution(f"{name}_convolution1", active, outputs, 3, stride=stride)
    if x.shape[build.channel_axis] != outputs:
        x = convolution(f"{name}_shortcut", active, outputs, 1, stride=stride)
    inner = layers.ReLU()(build.batch_norm(f"{name}_norm2", inner))
    return layers.Add()([x, convolution(f"{name}_convolution2", inner, outputs, 3)])
