"""Batches of any form that a script's DataLoader gives: their tensors, samples and hash."""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from nfold.core.errors import Unsupported
from nfold.engines.torch.input.batch_source import MAX_WHOLE_EPOCH, REPLAYED_BATCHES

functorch = torch._C._functorch
TensorFunction = Callable[[Tensor], Tensor]
NO_ATTRIBUTE_TYPES = (Tensor, Mapping, list, tuple, nn.Module, type)
"""Whose attributes are no part of a batch."""
HASHED_NUMBERS = 256
"""Numbers of a sample, evenly spaced: enough to tell samples apart."""


def iter_tensors(batch: Any) -> Iterator[Tensor]:
    """Its dense tensors, in order, inside sequences and mappings, or an object's attributes.

    Of what torch.func has wrapped, the tensor of all samples.
    """
    return _dense_tensors(_batch_attributes(batch) or batch)


def _dense_tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        whole = _unwrap_functorch(batch)
        if whole.layout is torch.strided and not whole.is_nested:
            yield whole
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _dense_tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _dense_tensors(value)


def _batch_attributes(batch: Any) -> dict[str, Any]:
    """Of an object of a class of the script's that holds a batch; those that are nobody else's.

    A batch of graphs, and whatever else keeps its tensors to itself, moves itself.
    """
    if isinstance(batch, NO_ATTRIBUTE_TYPES) or hasattr(batch, "num_graphs"):
        return {}
    held = getattr(batch, "__dict__", {})
    return {name: value for name, value in held.items() if not name.startswith("_")}


def _unwrap_functorch(tensor: Tensor) -> Tensor:
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def sample_count(batch: Any) -> int:
    """Samples: the leading dimension of the first tensor that has one; of graphs, their number."""
    graphs = getattr(batch, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs
    return next((len(tensor) for tensor in iter_tensors(batch) if tensor.dim()), 0)


def map_tensors(batch: Any, change: TensorFunction) -> Any:
    """The same batch in containers of its own, with every tensor changed."""
    held = _batch_attributes(batch)
    if not any(True for _ in _dense_tensors(held)):
        return _map_nested(batch, change)
    own = copy.copy(batch)
    vars(own).update(_map_nested(held, change))
    return own


def _map_nested(batch: Any, change: TensorFunction) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_nested(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map_nested(value, change) for value in batch)
    if isinstance(batch, Mapping):
        own = copy.copy(batch)
        for name, value in batch.items():
            own[name] = _map_nested(value, change)  # type: ignore[index]  # mappings here are dicts
        return own
    return batch


def sample_hash(batch: Any, indices: Any) -> int:
    """A sum over samples of a hash of each: its index, where known, and its labels.

    ``drawn`` are the samples' indices, or what stands for a whole batch, or None. Labels are the
    whole numbers of a batch: two ranks may augment the same sample differently. Where there are
    none, or all are equal, every tensor counts.
    """
    count, indices = sample_count(batch), _index_list(indices)
    samples = [_to_host(t) for t in iter_tensors(batch) if t.dim() and len(t) == count]
    labels = [t for t in samples if not t.is_floating_point() and t.dim() == 1 and _varies(t)]
    rows = [_row_bytes(tensor) for tensor in labels or samples] if count else []
    total = 0
    for row in range(count if rows else 0):
        digest = hashlib.blake2b(digest_size=8)
        if row < len(indices):
            digest.update(repr(indices[row]).encode())
        for content in rows:
            digest.update(content[row])
        total += int.from_bytes(digest.digest(), "big")
    return total


def _index_list(drawn: Any) -> list[object]:
    with suppress(TypeError):
        return [] if isinstance(drawn, str) else list(drawn)
    return []


def _to_host(tensor: Tensor) -> Tensor:
    own = tensor.detach()
    return own if own.device.type == "cpu" else torch.empty_like(own, device="cpu").copy_(own)


def _varies(tensor: Tensor) -> bool:
    return len(tensor) > 1 and bool((tensor != tensor[0]).any())


def _row_bytes(tensor: Tensor) -> list[bytes]:
    flat = tensor.reshape(len(tensor), -1)
    some = flat[:, :: max(1, flat.shape[1] // HASHED_NUMBERS)]
    numbers = some.float() if some.is_floating_point() else some
    return [row.tobytes() for row in numbers.contiguous().numpy()]


SOURCE_ATTRIBUTE = "_nfold_source"
"""An attribute of a tensor: the one that it was copied from."""
MAX_ORIGINS = 8
"""From a tensor back to the one that it was made of: views and copies."""


def record_source(source: Tensor, copy: Tensor) -> None:
    """Note what a tensor was copied from, unless gradients go through: those are no batches."""
    if copy is not source and not copy.requires_grad:
        setattr(copy, SOURCE_ATTRIBUTE, source)


def origins(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and those that it is a view or a copy of."""
    found: Any = tensor
    for _ in range(MAX_ORIGINS):
        if found is None:
            return
        yield found
        found = getattr(found, SOURCE_ATTRIBUTE, None) if found._base is None else found._base


class DeviceTransferTracker:
    """Which of a batch's tensors a script takes to a device, in the warm-up.

    Lengths of sequences stay on the host: what packs them reads them there.
    """

    def __init__(self) -> None:
        self._indices: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._moved_indices: set[int] = set()
        self._tensor_count = 0

    def record_batch(self, batch: Any) -> None:
        """A batch for the training is there."""
        found = list(iter_tensors(batch))
        self._tensor_count = len(found)
        for place, tensor in enumerate(found):
            self._indices[id(tensor)] = (weakref.ref(tensor), place)

    def record_transfer(self, source: Tensor) -> None:
        """A tensor goes to a device."""
        for one in origins(source):
            known, place = self._indices.get(id(one), (None, 0))
            if known is not None and known() is one:
                self._moved_indices.add(place)

    @property
    def host_tensors(self) -> tuple[int, ...]:
        """The places of those that do not go, among a batch's tensors; none where none was seen."""
        return (
            tuple(sorted({*range(self._tensor_count)} - self._moved_indices))
            if self._moved_indices
            else ()
        )


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
        if self._device is not None and not on_host:
            # Not by Tensor.to: calls of that are counted as the script's.
            return torch.empty_like(tensor, device=self._device).copy_(tensor)
        shared = tensor.device.type == "cpu" and tensor.is_shared()  # type: ignore[no-untyped-call]
        return tensor.clone() if shared else tensor


def _batch_bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in iter_tensors(batch))


def _batch_version(batch: Any) -> int:
    return sum(tensor._version for tensor in iter_tensors(batch))
