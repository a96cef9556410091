"""Inception-v3 in Keras: layer for layer that of ``torch.py``, with its auxiliary head.

Built from ``architecture.py``, not from keras.applications, whose network has no auxiliary head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras import layers, losses, ops

from nfold.workloads.inception_v3 import (
    AUXILIARY_WEIGHT,
    LABEL_SMOOTHING,
    LEARNING_RATE,
    WEIGHT_DECAY,
)
from nfold.workloads.inception_v3.architecture import (
    AUXILIARY,
    AUXILIARY_GRID_SIDE,
    BODY,
    TOP,
    ConvolutionSpec,
    InceptionBranches,
    Layer,
    Pooling3x3,
)
from nfold.workloads.keras_networks import SGD, KerasTensor, LayerBuilder, LearningRate, head_logits

INIT_STD = 0.1
# Of the first weights of the layers that do not have DEVIATION
SMALLER_INIT_STD = {"auxiliary.convolutions.3": 0.01, "auxiliary.dense": 0.001}


def weight_initializer(name: str) -> Any:
    """What draws a layer's first weights: normal, cut off at two deviations."""
    return keras.initializers.TruncatedNormal(stddev=SMALLER_INIT_STD.get(name, INIT_STD))


class InceptionBuilder(LayerBuilder):
    """Builds the layers of ``architecture.py``, under the names that PyTorch's modules have."""

    def build_layers(self, name: str, x: KerasTensor, inner: tuple[Layer, ...]) -> KerasTensor:
        """The layers, one after the other."""
        place = 0
        for layer in inner:
            x = self._layer(name, place, x, layer)
            place += 3 if isinstance(layer, ConvolutionSpec) else 1
        return x

    def _layer(self, name: str, index: int, x: KerasTensor, layer: Layer) -> KerasTensor:
        if isinstance(layer, ConvolutionSpec):
            return self._convolution(name, index, x, layer)
        if isinstance(layer, Pooling3x3):
            return self._pooling(x, layer)
        return self._branches(f"{name}.{index}", x, layer)

    def _convolution(
        self, name: str, index: int, x: KerasTensor, layer: ConvolutionSpec
    ) -> KerasTensor:
        convolution = layers.Conv2D(
            layer.channels,
            (layer.height, layer.width),
            strides=layer.stride,
            padding="same" if layer.padded else "valid",
            data_format=self.layout,
            use_bias=False,
            kernel_initializer=weight_initializer(f"{name}.{index}"),
            name=f"{name}.{index}",
        )
        norm = layers.BatchNormalization(
            axis=self.channel_axis, momentum=1 - 3e-4, epsilon=1e-3, name=f"{name}.{index + 1}"
        )
        return self.relu(norm(convolution(x)))

    def _pooling(self, x: KerasTensor, layer: Pooling3x3) -> KerasTensor:
        if layer.is_max:
            return layers.MaxPooling2D(3, strides=2, data_format=self.layout)(x)
        x = layers.ZeroPadding2D(1, data_format=self.layout)(x)
        return layers.AveragePooling2D(3, strides=1, data_format=self.layout)(x)

    def _branches(self, name: str, x: KerasTensor, layer: InceptionBranches) -> KerasTensor:
        pairs = enumerate(layer.branches)
        ends = [
            self.build_layers(f"{name}.branches.{number}", x, branch) for number, branch in pairs
        ]
        return layers.Concatenate(axis=self.channel_axis)(ends)

    def logits(self, name: str, grid: KerasTensor, classes: int) -> KerasTensor:
        """The mean over a grid, and a dense layer."""
        dense = layers.Dense(classes, kernel_initializer=weight_initializer(name), name=name)
        return dense(self.global_mean_pool(grid))

    def auxiliary(self, grid: KerasTensor, classes: int) -> KerasTensor:
        """The head over the 17 × 17 grid; see ``torch.py``."""
        side = int(grid.shape[2])
        if side >= 17:
            pooled = layers.AveragePooling2D(5, strides=3, data_format=self.layout)(grid)
        else:
            pooled = self._adaptive_mean(grid, adaptive_pool_weights(side))
        convolved = self.build_layers("auxiliary.convolutions", pooled, AUXILIARY)
        return self.logits("auxiliary.dense", convolved, classes)

    def _adaptive_mean(self, grid: KerasTensor, parts: npt.NDArray[np.float32]) -> KerasTensor:
        first = self.layout == "channels_first"
        return ops.einsum("nchw,ih,jw->ncij" if first else "nhwc,ih,jw->nijc", grid, parts, parts)


def adaptive_pool_weights(side: int) -> npt.NDArray[np.float32]:
    """What each pixel of ``side`` counts in the mean of each part: [SIDE_OF_17, side].

    A part begins at its rounded-down and ends at its rounded-up border, so that parts may share
    a pixel (PyTorch's adaptive pooling; Keras has one from 3.13 on).
    """
    parts = np.zeros((AUXILIARY_GRID_SIDE, side), np.float32)
    for part, row in enumerate(parts):
        start, end = (
            part * side // AUXILIARY_GRID_SIDE,
            -(-(part + 1) * side // AUXILIARY_GRID_SIDE),
        )
        row[start:end] = 1 / (end - start)
    return parts


def model(parameters: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    """Images of ``size`` pixels in the layout to logits [n, classes], or those of both heads."""
    build = InceptionBuilder(layout)
    images = build.input_images(parameters["size"], 3)
    grid = build.build_layers("body", images, BODY)
    logits = build.logits("dense", build.build_layers("top", grid, TOP), classes)
    if not parameters["aux"]:
        return keras.Model(images, logits)
    return keras.Model(images, [logits, build.auxiliary(grid, classes)])


def loss(outputs: Any, labels: Any) -> Any:
    """Mean cross entropy with smoothed labels, and AUXILIARY_WEIGHT times the other head's."""
    first, *others = (_smoothed_cross_entropy(logits, labels) for logits in head_logits(outputs))
    return first + sum(AUXILIARY_WEIGHT * other for other in others)


def _smoothed_cross_entropy(logits: Any, labels: Any) -> Any:
    wide = ops.cast(logits, "float32")
    right = losses.sparse_categorical_crossentropy(labels, wide, from_logits=True)
    every = -ops.mean(ops.log_softmax(wide), axis=-1)
    return ops.mean((1 - LABEL_SMOOTHING) * right + LABEL_SMOOTHING * every)


def optimizer(_: Mapping[str, int], schedule: LearningRate = None) -> SGD:
    """SGD with Nesterov momentum at a fixed rate or by a schedule, with weight decay."""
    return SGD(schedule or LEARNING_RATE, decay=WEIGHT_DECAY)
