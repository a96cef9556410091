"""Tensors, samples and hashes of batches of any type, and their replay."""

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
from nfold.engines.torch.input.batch_source import REPLAYED_BATCHES
from nfold.engines.torch.nested_tensors import with_items
from nfold.instrument import torch_private

TensorFunction = Callable[[Tensor], Tensor]
NO_ATTRIBUTE_TYPES = (Tensor, Mapping, list, tuple, nn.Module, type)
HASHED_VALUES = 256  # values per sample, evenly spaced
MAX_INDEXED_SAMPLES = 4096  # of a rank: enough that two ranks share some of a million
LABEL_BYTES = 4  # of the hash of a sample's labels


def iter_tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the dense tensors of a batch in order: in sequences, mappings or attributes of an
    object.

    A tensor inside vmap or grad of torch.func is skipped: it hides the dimension of the samples.
    """
    yield from _dense_tensors(_batch_attributes(batch) or batch)


def _dense_tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        is_dense = batch.layout is torch.strided and not batch.is_nested
        if is_dense and not torch_private.is_functorch_wrapped(batch):
            yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _dense_tensors(value)


def on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _batch_attributes(batch: Any) -> dict[str, Any]:
    # A batch of graphs moves itself.
    if isinstance(batch, NO_ATTRIBUTE_TYPES) or hasattr(batch, "num_graphs"):
        return {}
    attributes = getattr(batch, "__dict__", {})
    return {name: value for name, value in attributes.items() if not name.startswith("_")}


def sample_count(batch: Any) -> int:
    """Return the number of samples: ``num_graphs``, or the size of the first dimension."""
    graphs = getattr(batch, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs
    return next((len(tensor) for tensor in iter_tensors(batch) if tensor.dim()), 0)


def map_tensors(batch: Any, change: TensorFunction) -> Any:
    """Return a batch in new containers with ``change`` applied to each tensor."""
    attributes = _batch_attributes(batch)
    if not any(True for _ in _dense_tensors(attributes)):
        return _map_nested(batch, change)
    mapped = copy.copy(batch)
    vars(mapped).update(_map_nested(attributes, change))
    return mapped


def _map_nested(batch: Any, change: TensorFunction) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, list | tuple | Mapping):
        values = batch.values() if isinstance(batch, Mapping) else batch
        return with_items(batch, [_map_nested(value, change) for value in values])
    return batch


class SampleLog:
    """Hashes of the samples of a data set, and the epochs of its sampler, within the warm-up.

    With ``keeps_contents`` it keeps those of every batch and sample of the first epoch.
    """

    def __init__(self, *, keeps_contents: bool = False) -> None:
        self._keeps_contents = keeps_contents
        self.batch_hashes: list[str] = []
        self.indexed_samples: dict[int, int] = {}
        self._epochs: list[tuple[int, int | None]] = []  # steps before, epoch of the sampler

    def begin_epoch(self, steps: int, sampler_epoch: int | None) -> None:
        self._epochs.append((steps, sampler_epoch))

    def sampler_epochs(self, steps: int) -> tuple[int, ...]:
        """Return the sampler's epoch of every pass in which there was a step."""
        ends = [*(begin for begin, _ in self._epochs[1:]), steps]
        passes = zip(self._epochs, ends, strict=False)
        return tuple(e for (begin, e), end in passes if e is not None and end > begin)

    def record(self, batch: Any, indices: Any) -> int:
        """Record a batch; return the sum over samples of a hash of each: of its index and labels.

        ``indices`` are the indices of the samples, any value for a whole batch, or None. The sum is 0
        after the first pass with steps: numbers drawn in a pass may decide the order of the next.
        """
        digests, index_list = _sample_digests(batch), list[object]()
        with suppress(TypeError):
            index_list = [] if isinstance(indices, str) else list(indices)
        if self._keeps_contents and digests and len(self._epochs) <= 1:
            self.batch_hashes.append(content_hash(batch))
            for index, digest in zip(index_list, digests, strict=False):
                if isinstance(index, int) and len(self.indexed_samples) < MAX_INDEXED_SAMPLES:
                    self.indexed_samples[index] = int.from_bytes(digest[:LABEL_BYTES], "big")
        total = 0
        if any(steps for steps, _ in self._epochs):
            return total
        for row, digest in enumerate(digests):
            index = repr(index_list[row]).encode() if row < len(index_list) else b""
            total += int.from_bytes(hashlib.blake2b(index + digest, digest_size=8).digest(), "big")
        return total


def _sample_digests(batch: Any) -> list[bytes]:
    """Return a digest of the labels of each sample.

    Labels are integers of one dimension: two ranks may augment the same sample differently. Without
    labels, or if all are equal, every tensor counts.
    """
    count = sample_count(batch)
    samples = [_to_host(t) for t in iter_tensors(batch) if t.dim() and len(t) == count]
    labels = [t for t in samples if not t.is_floating_point() and t.dim() == 1]
    labels = [t for t in labels if len(t) > 1 and bool((t != t[0]).any())]
    rows = [_row_bytes(tensor) for tensor in labels or samples] if count else []
    contents = zip(*rows, strict=True)
    return [hashlib.blake2b(b"".join(row), digest_size=8).digest() for row in contents]


def content_hash(batch: Any) -> str:
    """Return a hash of the tensors of a batch in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in iter_tensors(batch):
        host = _to_host(tensor)
        for content in _row_bytes(host if host.dim() else host[None]):
            digest.update(content)
    return digest.hexdigest()


def _to_host(tensor: Tensor) -> Tensor:
    # Not by Tensor.cpu, whose calls are counted.
    tensor = tensor.detach()
    on_host = tensor.device.type == "cpu"
    return tensor if on_host else torch.empty_like(tensor, device="cpu").copy_(tensor)


def _row_bytes(tensor: Tensor) -> list[bytes]:
    flat = tensor.reshape(len(tensor), -1)
    values = flat[:, :: max(1, flat.shape[1] // HASHED_VALUES)]
    values = values.float() if values.is_floating_point() else values
    return [row.tobytes() for row in values.contiguous().numpy()]


SOURCE_ATTRIBUTE = "_nfold_source"  # attribute of a tensor: the tensor that it was copied from
MAX_ORIGINS = 8  # length of a chain of views and copies


def record_source(source: Tensor, copy: Tensor) -> None:
    """Remember the source of a copy. A tensor that requires gradients is no batch."""
    if copy is not source and not copy.requires_grad:
        setattr(copy, SOURCE_ATTRIBUTE, source)


def origins(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor, and the tensors that it is a view or a copy of."""
    origin: Any = tensor
    for _ in range(MAX_ORIGINS):
        if origin is None:
            return
        yield origin
        base = torch_private.base(origin)
        origin = getattr(origin, SOURCE_ATTRIBUTE, None) if base is None else base


class DeviceTransferTracker:
    """Records which tensors of a batch the script copies to a device, in the warm-up.

    Lengths of sequences, for example, stay on the host.
    """

    def __init__(self) -> None:
        self._indices: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._moved_indices: set[int] = set()
        self._tensor_count = 0

    def record_batch(self, batch: Any) -> None:
        tensors = list(iter_tensors(batch))
        self._tensor_count = len(tensors)
        for index, tensor in enumerate(tensors):
            self._indices[id(tensor)] = (weakref.ref(tensor), index)

    def record_transfer(self, source: Tensor) -> None:
        for origin in origins(source):
            reference, index = self._indices.get(id(origin), (None, 0))
            if reference is not None and reference() is origin:
                self._moved_indices.add(index)

    @property
    def host_tensors(self) -> tuple[int, ...]:
        """Indices of the tensors of a batch that stay on the host; () if no tensor was copied."""
        moved = self._moved_indices
        return tuple(sorted({*range(self._tensor_count)} - moved)) if moved else ()


MAX_REPLAY_BYTES = 2 * 2**30  # stored batches of one rank


class BatchReplay:
    """Batches that are stored on ``device``, or where they are (None), and replayed in turn.

    Replays in new containers, because a script may remove items of a dictionary. If a script
    changes a tensor in place, it gets clones from then on. Tensors with an index in
    ``host_tensors`` stay on the host.
    """

    def __init__(self, device: torch.device | None, host_tensors: Collection[int] = ()) -> None:
        self._device = device
        self._host_tensors = host_tensors
        self.batches: list[Any] = []
        self._versions: list[int] = []
        self._clones = False
        self._next = 0
        self.index = 0  # of the batch that was replayed last

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def data_bytes(self) -> int:
        """Bytes of the batches if they are stored on the device, else 0."""
        return 0 if self._device is None else sum(map(_batch_bytes, self.batches))

    def collect(self, batches: Iterator[Any]) -> None:
        """Store the first batches; a slot of usual length replays each of them at least once."""
        stored_bytes = 0
        for batch in islice(batches, REPLAYED_BATCHES):
            self.batches.append(self._store(batch))
            stored_bytes += _batch_bytes(batch)
            if stored_bytes > MAX_REPLAY_BYTES:
                break
        self._versions = [_batch_version(batch) for batch in self.batches]

    def next(self) -> Any:
        self.index = self._next % len(self.batches)
        self._next += 1
        batch = self.batches[self.index]
        if self._clones:
            return map_tensors(batch, torch.clone)
        if _batch_version(batch) != self._versions[self.index]:
            self._clones = True
        return map_tensors(batch, lambda tensor: tensor)

    def _store(self, batch: Any) -> Any:
        dense = list(iter_tensors(batch))
        if self._device is None or dense:
            on_host = {id(dense[index]) for index in self._host_tensors if index < len(dense)}
            return map_tensors(batch, lambda x: self._store_tensor(x, on_host=id(x) in on_host))
        if not hasattr(batch, "to"):
            raise Unsupported(
                f"input resident: batches of type {type(batch).__name__} are not supported; "
                "allowed are tensors in lists, tuples and dictionaries, or an object with a method "
                "'to'"
            )
        return batch.to(self._device)

    def _store_tensor(self, tensor: Tensor, *, on_host: bool) -> Tensor:
        if self._device is not None and not on_host:
            # Not by Tensor.to, whose calls are counted.
            return torch.empty_like(tensor, device=self._device).copy_(tensor)
        shared = tensor.device.type == "cpu" and tensor.is_shared()  # type: ignore[no-untyped-call]
        return tensor.clone() if shared else tensor


def _batch_bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in iter_tensors(batch))


def _batch_version(batch: Any) -> int:
    return sum(torch_private.version(tensor) for tensor in iter_tensors(batch))
