"""Weights by PyTorch's names and shapes, into a Keras model and out of it again.

A Keras layer has the name of its counterpart in PyTorch, with _ for a dot. Convolutions are
[outputs, inputs, h, w] there and [h, w, inputs, outputs] in Keras, dense layers are transposed, and
after a flattening of channels_last images their rows are in another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
NAMES = {
    "Conv2D": ("weight", "bias"),
    "Dense": ("weight", "bias"),
    "BatchNormalization": ("weight", "bias", "running_mean", "running_var"),
}


def give(model: Any, state: dict[str, Array]) -> None:
    """Set all weights of a Keras model from PyTorch's ``state_dict``."""
    used = set()
    for layer in layers(model):
        names = names_of(layer)
        layer.set_weights([to_keras(model, layer, state[name]) for name in names])
        used |= set(names)
    left = {name for name in state if not name.endswith("num_batches_tracked")} - used
    assert not left, f"Keras has no place for {sorted(left)}"


def layers(model: Any) -> list[Any]:
    """The layers that have weights."""
    return [layer for layer in model.layers if type(layer).__name__ in NAMES]


def names_of(layer: Any) -> list[str]:
    """PyTorch's names of a layer's weights, in Keras's order."""
    kinds = NAMES[type(layer).__name__][: len(layer.weights)]
    path = layer.name.replace("_", ".")
    return [f"{path}.{kind}" for kind in kinds]


def to_keras(model: Any, layer: Any, value: Array) -> Array:
    """A value of PyTorch's as the Keras layer holds it."""
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    if value.ndim == 2:
        return value[:, rows(model, layer, value.shape[1])].T
    return value


def to_torch(model: Any, layer: Any, value: Array) -> Array:
    """The same value as PyTorch would hold it."""
    if value.ndim == 4:
        return value.transpose(3, 2, 0, 1)
    if value.ndim == 2:
        back = np.argsort(rows(model, layer, len(value)))
        return value.T[:, back]
    return value


def rows(model: Any, layer: Any, count: int) -> Array:
    """Where in PyTorch's order [c, h, w] each of a dense layer's inputs is."""
    flat = next((one for one in model.layers if type(one).__name__ == "Flatten"), None)
    first = next(one for one in model.layers if type(one).__name__ == "Dense")
    _, *shape = flat.input.shape if flat else (None,)
    channels_last = len(shape) == 3 and shape[0] == shape[1]
    if layer is not first or not channels_last:
        return np.arange(count)
    height, width, channels = shape
    return np.arange(count).reshape(channels, height, width).transpose(1, 2, 0).reshape(-1)
