"""What a user's own workload returns: ``nfold.Training``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """A model, its data, its loss and its optimizer, for ``nfold train my_module:function``.

    ``train`` and ``test`` are pairs (samples, targets) of NumPy arrays or tensors [n, ...] on
    the CPU. uint8 images [n, h, w, c] of 1 to 4 channels reach the model as float [n, c, h, w],
    normalised by the training images' channels; everything else reaches it as it is, float64 as
    float32. ``optimizer`` is a function of the model. ``loss(outputs, targets)`` returns the
    mean over the samples, [] (default: cross entropy). ``augmentation`` is for images:
    ``("crop", 4), ("flip", 0), ("cutout", 8)``. ``batch`` and ``epochs`` hold where neither a
    flag nor nfold.toml says otherwise.
    """

    model: Any
    train: tuple[Any, Any]
    optimizer: Callable[[Any], Any]
    test: tuple[Any, Any] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    augmentation: tuple[tuple[str, int], ...] = ()
    batch: int = 128
    epochs: int = 1
