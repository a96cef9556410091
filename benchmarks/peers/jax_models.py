"""cnn10, wide residual networks and the MNIST network in plain JAX, layer for layer nfold's own.

Parameters are float32, convolutions and products bf16, batch-norm statistics float32. A model is
a list of parameters and a list of running statistics, both taken in the order of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nfold.workloads import networks

Array = Any
Forward = Callable[["Layers", Array], Array]
"""Layers and images [n, h, w, c] to logits [n, classes]."""
MOMENTUM, EPSILON = 0.1, 1e-5
COMPUTE = jnp.bfloat16


class Layers:
    """Gives layers their parameters; while a model is made, it makes them instead."""

    def __init__(
        self, parameters: list[Array], statistics: list[Array], draw: np.random.Generator | None
    ) -> None:
        self.parameters = parameters
        self.statistics = statistics
        self.updated: list[Array] = []
        self._draw = draw
        self._next: Iterator[Array] = iter(parameters)
        self._next_statistics: Iterator[Array] = iter(statistics)

    def weight(self, shape: tuple[int, ...]) -> Array:
        """A weight whose fan-in is all its dimensions but the last (He and others, 2015)."""
        if self._draw is None:
            return next(self._next).astype(COMPUTE)
        deviation = np.sqrt(2 / np.prod(shape[:-1]))
        return self._made(self._draw.normal(0, deviation, shape)).astype(COMPUTE)

    def constant(self, value: float, channels: int) -> Array:
        """A bias or a scale [channels]."""
        return next(self._next) if self._draw is None else self._made(np.full(channels, value))

    def running(self, channels: int) -> Array:
        """Mean and variance so far: [2, channels]."""
        if self._draw is None:
            return next(self._next_statistics)
        self.statistics.append(np.stack([np.zeros(channels), np.ones(channels)]).astype("f4"))
        return self.statistics[-1]

    def _made(self, values: Any) -> Array:
        self.parameters.append(values.astype("f4"))
        return jnp.asarray(self.parameters[-1])

    def convolution(self, x: Array, outputs: int, side: int, stride: int = 1) -> Array:
        weight = self.weight((side, side, x.shape[-1], outputs))
        edge = (side // 2, side // 2)
        return jax.lax.conv_general_dilated(
            x, weight, (stride, stride), (edge, edge), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(self, x: Array) -> Array:
        channels = x.shape[-1]
        scale, shift = self.constant(1.0, channels), self.constant(0.0, channels)
        wide = x.astype(jnp.float32)
        mean = wide.mean((0, 1, 2))
        variance = jnp.maximum((wide * wide).mean((0, 1, 2)) - mean * mean, 0.0)
        seen = jnp.stack([mean, variance])
        self.updated.append((1 - MOMENTUM) * self.running(channels) + MOMENTUM * seen)
        return ((wide - mean) * (jax.lax.rsqrt(variance + EPSILON) * scale) + shift).astype(COMPUTE)

    def dense(self, x: Array, outputs: int) -> Array:
        product = x @ self.weight((x.shape[-1], outputs))
        return product + self.constant(0.0, outputs).astype(COMPUTE)

    def biased(self, x: Array, outputs: int, side: int) -> Array:
        """A convolution with a bias, then ReLU."""
        added = self.convolution(x, outputs, side) + self.constant(0.0, outputs).astype(COMPUTE)
        return jax.nn.relu(added)


def made(forward: Forward, images: tuple[int, ...]) -> tuple[list[Array], list[Array]]:
    """First parameters and statistics of a model for images of a shape [h, w, c].

    The model is only traced: run as it is, every layer would be compiled on its own.
    """
    layers = Layers([], [], np.random.default_rng(0))
    jax.eval_shape(partial(forward, layers), jax.ShapeDtypeStruct((2, *images), COMPUTE))
    return jax.device_put(layers.parameters), jax.device_put(layers.statistics)


def forward_of(name: str, parameters: Mapping[str, int], classes: int, seed: Array) -> Forward:
    """The forward pass of a workload; ``seed`` is a key for dropout."""
    if name == "cnn10":
        return lambda layers, x: _cnn10(layers, x, classes)
    if name == "wide_resnet":
        return lambda layers, x: _wide_resnet(layers, x, classes, parameters)
    if name == "mnist":
        return lambda layers, x: _mnist(layers, x, classes, seed)
    raise ValueError(f"{name}: in JAX there are cnn10, wide_resnet, mnist")


def _cnn10(layers: Layers, x: Array, classes: int) -> Array:
    for stage, channels in enumerate(networks.CNN10_STAGES):
        if stage:
            x = _squares(x).mean((2, 4))
        for _ in range(3):
            x = jax.nn.relu(layers.norm(layers.convolution(x, channels, 3)))
    return layers.dense(_averaged(x), classes)


def _wide_resnet(layers: Layers, x: Array, classes: int, parameters: Mapping[str, int]) -> Array:
    x = layers.convolution(x, networks.WIDE_RESNET_STAGES[0], 3)
    for stage, base in enumerate(networks.WIDE_RESNET_STAGES):
        for block in range(networks.blocks_per_stage(parameters["depth"])):
            stride = 2 if stage and not block else 1
            x = _block(layers, x, base * parameters["width"], stride)
    return layers.dense(_averaged(jax.nn.relu(layers.norm(x))), classes)


def _block(layers: Layers, x: Array, outputs: int, stride: int) -> Array:
    active = jax.nn.relu(layers.norm(x))
    kept = x if x.shape[-1] == outputs else layers.convolution(active, outputs, 1, stride)
    inner = layers.convolution(active, outputs, 3, stride)
    return kept + layers.convolution(jax.nn.relu(layers.norm(inner)), outputs, 3)


def _mnist(layers: Layers, x: Array, classes: int, seed: Array) -> Array:
    for channels in (32, 64):
        x = _squares(layers.biased(x, channels, 5)).max((2, 4))
    hidden = jax.nn.relu(layers.dense(x.reshape(len(x), -1), 1024))
    kept = jax.random.bernoulli(seed, 0.6, hidden.shape)
    return layers.dense(jnp.where(kept, hidden / 0.6, 0), classes)


def _squares(x: Array) -> Array:
    """Images cut for 2 × 2 pooling over axes 2 and 4: [n, h / 2, 2, w / 2, 2, c]."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels)


def _averaged(x: Array) -> Array:
    return x.astype(jnp.float32).mean((1, 2)).astype(COMPUTE)
