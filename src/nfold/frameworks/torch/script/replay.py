"""The first batches of a script's DataLoader, again and again, from the host or the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from nfold.errors import Unsupported
from nfold.frameworks.torch.ablate import SOME, WHOLE_EPOCH
from nfold.frameworks.torch.script.batches import tensors_of, with_tensors

MOST_BYTES = 2 * 2**30
"""Of the batches that one rank keeps."""


class Replay:
    """Batches that are kept, on ``device`` or where they are, and given in turn.

    Each is given in containers of its own: a script may take things out of a dictionary. Where
    it changes a tensor in place, it is given copies from then on. Tensors whose places among those
    of a batch are in ``stay`` are kept on the host.
    """

    def __init__(self, device: torch.device | None, stay: Collection[int] = ()) -> None:
        self._device = device
        self._stay = stay
        self._batches: list[Any] = []
        self._versions: list[int] = []
        self._copies = False
        self._next = 0
        self.place = 0
        """Of the batch that was given last."""

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def data_bytes(self) -> int:
        """Of the batches, where they stay on the device."""
        return 0 if self._device is None else sum(map(_bytes, self._batches))

    def collect(self, batches: Iterator[Any], length: int | None) -> None:
        """Keep some batches: as many as a pass has, where it is short."""
        wanted = length if length is not None and length <= WHOLE_EPOCH else SOME
        kept = 0
        for batch in islice(batches, wanted):
            self._batches.append(self._kept(batch))
            kept += _bytes(batch)
            if kept > MOST_BYTES:
                break
        self._versions = [_version(batch) for batch in self._batches]

    def next(self) -> Any:
        """The next batch in turn."""
        self.place = self._next % len(self._batches)
        self._next += 1
        batch = self._batches[self.place]
        if self._copies:
            return with_tensors(batch, torch.clone)
        if _version(batch) != self._versions[self.place]:
            self._copies = True
        return with_tensors(batch, lambda tensor: tensor)

    def _kept(self, batch: Any) -> Any:
        """A batch as it is kept; one that holds its tensors out of sight moves itself."""
        dense = list(tensors_of(batch))
        if self._device is None or dense:
            on_host = {id(dense[place]) for place in self._stay if place < len(dense)}
            return with_tensors(batch, lambda one: self._own(one, on_host=id(one) in on_host))
        if not hasattr(batch, "to"):
            raise Unsupported(
                f"input resident: a batch is of type {type(batch).__name__}; allowed are "
                "tensors in lists, tuples and dictionaries, or an object with a method 'to'"
            )
        return batch.to(self._device)

    def _own(self, tensor: Tensor, *, on_host: bool) -> Tensor:
        """On the device, or in memory that is not shared with a worker: of that there is little."""
        if self._device is not None and not on_host:
            # Not by Tensor.to: calls of that are counted as the script's.
            return torch.empty_like(tensor, device=self._device).copy_(tensor)
        shared = tensor.device.type == "cpu" and tensor.is_shared()  # type: ignore[no-untyped-call]
        return tensor.clone() if shared else tensor


def _bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(batch))


def _version(batch: Any) -> int:
    """Grows with every change in place."""
    return sum(tensor._version for tensor in tensors_of(batch))
