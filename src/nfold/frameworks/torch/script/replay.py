"""The first batches of a script's DataLoader, again and again, from the host or the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from nfold.errors import Unsupported
from nfold.frameworks.torch.ablate import MAX_WHOLE_EPOCH, REPLAYED_BATCHES
from nfold.frameworks.torch.script.batches import iter_tensors, map_tensors

MAX_REPLAY_BYTES = 2 * 2**30
"""Of the batches that one rank keeps."""


class BatchReplay:
    """Batches that are kept, on ``device`` or where they are, and given in turn.

    Each is given in containers of its own: a script may take things out of a dictionary. Where
    it changes a tensor in place, it is given copies from then on. Tensors whose places among those
    of a batch are in ``stay`` are kept on the host.
    """

    def __init__(self, device: torch.device | None, host_tensors: Collection[int] = ()) -> None:
        self._device = device
        self._host_tensors = host_tensors
        self._batches: list[Any] = []
        self._versions: list[int] = []
        self._clones = False
        self._next = 0
        self.index = 0
        """Of the batch that was given last."""

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def data_bytes(self) -> int:
        """Of the batches, where they stay on the device."""
        return 0 if self._device is None else sum(map(_batch_bytes, self._batches))

    def collect(self, batches: Iterator[Any], length: int | None) -> None:
        """Keep some batches: as many as a pass has, where it is short."""
        wanted = length if length is not None and length <= MAX_WHOLE_EPOCH else REPLAYED_BATCHES
        kept = 0
        for batch in islice(batches, wanted):
            self._batches.append(self._store(batch))
            kept += _batch_bytes(batch)
            if kept > MAX_REPLAY_BYTES:
                break
        self._versions = [_batch_version(batch) for batch in self._batches]

    def next(self) -> Any:
        """The next batch in turn."""
        self.index = self._next % len(self._batches)
        self._next += 1
        batch = self._batches[self.index]
        if self._clones:
            return map_tensors(batch, torch.clone)
        if _batch_version(batch) != self._versions[self.index]:
            self._clones = True
        return map_tensors(batch, lambda tensor: tensor)

    def _store(self, batch: Any) -> Any:
        """A batch as it is kept; one that holds its tensors out of sight moves itself."""
        dense = list(iter_tensors(batch))
        if self._device is None or dense:
            on_host = {id(dense[place]) for place in self._host_tensors if place < len(dense)}
            return map_tensors(
                batch, lambda one: self._store_tensor(one, on_host=id(one) in on_host)
            )
        if not hasattr(batch, "to"):
            raise Unsupported(
                f"input resident: a batch is of type {type(batch).__name__}; allowed are "
                "tensors in lists, tuples and dictionaries, or an object with a method 'to'"
            )
        return batch.to(self._device)

    def _store_tensor(self, tensor: Tensor, *, on_host: bool) -> Tensor:
        """On the device, or in memory that is not shared with a worker: of that there is little."""
        if self._device is not None and not on_host:
            # Not by Tensor.to: calls of that are counted as the script's.
            return torch.empty_like(tensor, device=self._device).copy_(tensor)
        shared = tensor.device.type == "cpu" and tensor.is_shared()  # type: ignore[no-untyped-call]
        return tensor.clone() if shared else tensor


def _batch_bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in iter_tensors(batch))


def _batch_version(batch: Any) -> int:
    """Grows with every change in place."""
    return sum(tensor._version for tensor in iter_tensors(batch))
