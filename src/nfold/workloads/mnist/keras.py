"""The tutorial's network in Keras: layer for layer that of ``torch.py``."""

from __future__ import annotations

from collections.abc import Mapping

import keras
from keras import layers

from nfold.workloads.keras import SGD, LayerBuilder, LearningRate, cross_entropy
from nfold.workloads.mnist import MNIST_RATE

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
