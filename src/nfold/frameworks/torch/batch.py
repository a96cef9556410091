"""What a rank gets in one step, wherever it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

Tensors = tuple[Tensor, ...]


class SampleTensors(NamedTuple):
    """uint8 images [n, h, w, c], int64 labels [n], and the int64 ids [n] that draws are keyed by.

    ``ids`` is empty where the images are augmented already.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor


class CanvasTensors(NamedTuple):
    """Samples whose images do not fill their canvases [n, s, s, 3].

    ``places`` int64 [n, 2] are the height and width of what lies in the upper left corner.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    sizes: Tensor


InputSamples = SampleTensors | CanvasTensors
"""What is prepared for a model."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's part of a global batch.

    ``tensors`` is what a step reads: samples, or the ids by which it selects them on the device.
    ``count`` of them are this rank's samples, of ``global_count`` in the step; a rank without
    a sample gets one that counts 0, because every rank must take part in the exchange.
    """

    tensors: Tensors
    epoch: int | Tensor
    count: int
    global_count: int
    sample_hash: int

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with ``move`` applied to its tensors."""
        return dataclasses.replace(self, tensors=tuple(map(change, self.tensors)))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; DataLoader calls this."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())


def tensor_signature(tensor: Tensor) -> Hashable:
    """What a graph depends on besides a tensor's values."""
    return tensor.shape, tensor.stride(), tensor.dtype
