"""Inception-v3 in Keras with the layers of ``torch.py``.

Not from keras.applications, whose network has no auxiliary head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras import layers, losses, ops

from nfold.workloads.inception_v3 import (
    AUXILIARY,
    AUXILIARY_GRID_SIDE,
    AUXILIARY_WEIGHT,
    BODY,
    LABEL_SMOOTHING,
    TOP,
    ConvolutionSpec,
    InceptionBranches,
    Layer,
    Pooling3x3,
)
from nfold.workloads.keras_networks import KerasTensor, LayerBuilder, head_logits

INIT_STD = 0.1
SMALLER_INIT_STD = {"auxiliary.convolutions.3": 0.01, "auxiliary.dense": 0.001}


def weight_initializer(name: str) -> Any:
    """Return a layer's initializer: normal, truncated at two standard deviations."""
    return keras.initializers.TruncatedNormal(stddev=SMALLER_INIT_STD.get(name, INIT_STD))


class InceptionBuilder(LayerBuilder):
    """Builds the layers of the architecture with the names of PyTorch's modules."""

    def build_layers(self, name: str, x: KerasTensor, specs: tuple[Layer, ...]) -> KerasTensor:
        """Build consecutive layers; a convolution counts as three modules of PyTorch."""
        index = 0
        for layer in specs:
            if isinstance(layer, ConvolutionSpec):
                x = self._convolution(name, index, x, layer)
                index += 3
                continue
            if isinstance(layer, Pooling3x3):
                x = self._pooling(x, layer)
            else:
                x = self._branches(f"{name}.{index}", x, layer)
            index += 1
        return x

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
        return layers.ReLU()(norm(convolution(x)))

    def _pooling(self, x: KerasTensor, layer: Pooling3x3) -> KerasTensor:
        if layer.is_max:
            return layers.MaxPooling2D(3, strides=2, data_format=self.layout)(x)
        x = layers.ZeroPadding2D(1, data_format=self.layout)(x)
        return layers.AveragePooling2D(3, strides=1, data_format=self.layout)(x)

    def _branches(self, name: str, x: KerasTensor, layer: InceptionBranches) -> KerasTensor:
        ends = [
            self.build_layers(f"{name}.branches.{number}", x, branch)
            for number, branch in enumerate(layer.branches)
        ]
        return layers.Concatenate(axis=self.channel_axis)(ends)

    def logits(self, name: str, grid: KerasTensor, classes: int) -> KerasTensor:
        dense = layers.Dense(classes, kernel_initializer=weight_initializer(name), name=name)
        return dense(self.global_mean_pool(grid))

    def auxiliary(self, grid: KerasTensor, classes: int) -> KerasTensor:
        side = int(grid.shape[2])
        if side >= 17:
            pooled = layers.AveragePooling2D(5, strides=3, data_format=self.layout)(grid)
        else:
            weights = adaptive_pool_weights(side)
            first = self.layout == "channels_first"
            equation = "nchw,ih,jw->ncij" if first else "nhwc,ih,jw->nijc"
            pooled = ops.einsum(equation, grid, weights, weights)
        convolved = self.build_layers("auxiliary.convolutions", pooled, AUXILIARY)
        return self.logits("auxiliary.dense", convolved, classes)


def adaptive_pool_weights(side: int) -> npt.NDArray[np.float32]:
    """Return the weights [AUXILIARY_GRID_SIDE, side] of PyTorch's adaptive mean pooling.

    Output cells may share a pixel. Keras has adaptive pooling from 3.13 on.
    """
    weights = np.zeros((AUXILIARY_GRID_SIDE, side), np.float32)
    for cell, row in enumerate(weights):
        start = cell * side // AUXILIARY_GRID_SIDE
        end = -(-(cell + 1) * side // AUXILIARY_GRID_SIDE)
        row[start:end] = 1 / (end - start)
    return weights


def model(parameters: Mapping[str, int], classes: int, layout: str) -> keras.Model:
    """Build the network; with ``aux`` it returns the logits of both heads."""
    build = InceptionBuilder(layout)
    images = build.input_images(parameters["size"], 3)
    grid = build.build_layers("body", images, BODY)
    logits = build.logits("dense", build.build_layers("top", grid, TOP), classes)
    if not parameters["aux"]:
        return keras.Model(images, logits)
    return keras.Model(images, [logits, build.auxiliary(grid, classes)])


def loss(outputs: Any, labels: Any) -> Any:
    """Mean cross entropy with smoothed labels, plus AUXILIARY_WEIGHT times the auxiliary head's."""
    main, *auxiliary = (_smoothed_cross_entropy(logits, labels) for logits in head_logits(outputs))
    return main + sum(AUXILIARY_WEIGHT * other for other in auxiliary)


def _smoothed_cross_entropy(logits: Any, labels: Any) -> Any:
    logits = ops.cast(logits, "float32")
    hard = losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    uniform = -ops.mean(ops.log_softmax(logits), axis=-1)
    return ops.mean((1 - LABEL_SMOOTHING) * hard + LABEL_SMOOTHING * uniform)
