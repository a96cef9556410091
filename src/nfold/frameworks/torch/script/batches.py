"""Batches of any form that a script's DataLoader gives: their tensors, samples and hash."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

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
    """What vmap and grad compute with, one for each of its samples."""
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
    """A batch sampler's indices; a sampler of whole batches draws one for all of their samples."""
    with suppress(TypeError):
        return [] if isinstance(drawn, str) else list(drawn)
    return []


def _to_host(tensor: Tensor) -> Tensor:
    """Not by Tensor.cpu: calls of that are counted as the script's."""
    own = tensor.detach()
    return own if own.device.type == "cpu" else torch.empty_like(own, device="cpu").copy_(own)


def _varies(tensor: Tensor) -> bool:
    return len(tensor) > 1 and bool((tensor != tensor[0]).any())


def _row_bytes(tensor: Tensor) -> list[bytes]:
    """Some bytes of every sample."""
    flat = tensor.reshape(len(tensor), -1)
    some = flat[:, :: max(1, flat.shape[1] // HASHED_NUMBERS)]
    numbers = some.float() if some.is_floating_point() else some
    return [row.tobytes() for row in numbers.contiguous().numpy()]
