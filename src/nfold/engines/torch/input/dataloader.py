"""Loaders of built-in workloads, and the prefetching of batches to a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from nfold.core.child_process import die_with_parent
from nfold.core.plan import PREFETCH_BATCHES, PREFETCH_WARMUP_FACTOR, Plan
from nfold.data.arrays import DataSetArrays
from nfold.engines import sampling
from nfold.engines.base import Task
from nfold.engines.sampling import SampleIds, sample_hash
from nfold.engines.torch.batch import Batch, CanvasTensors, InputSamples, SampleTensors, Tensors
from nfold.engines.torch.input.preprocessing import Augment
from nfold.engines.torch.nested_tensors import collect_tensors, map_tensors

# attribute of a DataLoader: how many batches are read before the step that gets the first
READ_AHEAD_ATTRIBUTE = "_nfold_read_ahead"

Item = TypeVar("Item")
Pending = TypeVar("Pending")
# queues all work that moves a batch to the device, on the current stream
ToDevice = Callable[[Batch, torch.device], Batch]


def copy_batch(batch: Batch, device: torch.device) -> Batch:
    if device.type != "cuda":
        return batch
    return batch.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))


def prefetch_batches(
    batches: Iterable[Batch], device: torch.device, to_device: ToDevice = copy_batch
) -> Iterable[Batch]:
    return prefetch_items(
        batches, device, lambda batch: to_device(batch, device), lambda batch: batch.tensors
    )


def prefetch_items(
    items: Iterable[Item],
    device: torch.device,
    to_device: Callable[[Item], Item],
    tensors: Callable[[Item], Iterable[Tensor]],
) -> Iterable[Item]:
    """Return the items on ``device``, moved by ``to_device``; ``tensors`` lists those of one item.

    On a GPU the next item is copied during the current step, from page-locked memory on a side
    stream.
    """
    if device.type != "cuda":
        return map(to_device, items)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(item: Item) -> tuple[Item, torch.cuda.Event]:
        # PyTorch keeps the host's memory until the copies are done.
        with torch.cuda.stream(stream):
            return to_device(item), stream.record_event()

    def finish(copying: tuple[Item, torch.cuda.Event]) -> Item:
        item, copied = copying
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        # Without ``record_stream`` the allocator would reuse the memory, which belongs to the side
        # stream, as soon as Python frees the item, while the step still reads it.
        for tensor in tensors(item):
            if tensor.is_cuda:
                tensor.record_stream(current)
        return item

    return one_ahead(items, begin, finish)


def one_ahead(
    items: Iterable[Item], begin: Callable[[Item], Pending], finish: Callable[[Pending], Item]
) -> Iterator[Item]:
    """Yield every item through ``begin`` and ``finish``; begins the next one before each."""
    remaining = iter(items)
    begun = [begin(item) for item in islice(remaining, 1)]
    for item in remaining:
        begun.append(begin(item))
        yield finish(begun.pop(0))
    for last in begun:
        yield finish(last)


Description = TypeVar("Description")


def to_device(
    value: Any, device: torch.device, memory_format: torch.memory_format | None = None
) -> Any:
    """Return ``value`` with its tensors on ``device``, images [n, c, h, w] in ``memory_format``."""

    def move(tensor: Tensor) -> Tensor:
        if memory_format is not None and tensor.dim() == 4:
            return tensor.to(device, non_blocking=True, memory_format=memory_format)
        return tensor.to(device, non_blocking=True)

    return map_tensors(value, move)


def prefetch_to_device(
    batches: Iterable[tuple[Description, Any, Tensor]], device: torch.device
) -> Iterable[tuple[Description, Any, Tensor]]:
    """Return the (description, batch, ids) of a loader, the batch on ``device``."""

    def move(item: tuple[Description, Any, Tensor]) -> tuple[Description, Any, Tensor]:
        description, batch, ids = item
        return description, to_device(batch, device), ids

    return prefetch_items(batches, device, move, lambda item: collect_tensors(item[1]))


def mark_read_ahead(loader: DataLoader[Any], device: torch.device) -> DataLoader[Any]:
    """Note on a loader that ``prefetch_to_device`` reads it: on GPUs one batch ahead."""
    vars(loader)[READ_AHEAD_ATTRIBUTE] = int(device.type == "cuda")
    return loader


MAX_READY_FRACTION = 0.1  # part of the timed steps whose batches may be ready before they begin


@dataclass(frozen=True)
class BatchKey:
    """One rank's part of one global batch: ``ids``, of which ``count`` count (others pad)."""

    epoch: int
    ids: SampleIds
    count: int
    global_count: int


class BatchKeySampler(sampling.EpochSampler, Sampler[BatchKey]):
    """The keys of one rank: epoch by epoch, or up to ``limit`` steps."""

    def __init__(self, samples: int, task: Task, *, limit: int | None = None) -> None:
        sampling.EpochSampler.__init__(
            self, samples, task.plan, rank=task.rank, ranks=task.world_size, limit=limit
        )

    def __iter__(self) -> Iterator[BatchKey]:
        for epoch, cuts in self.epochs():
            order = self.epoch_order(epoch)
            for cut in cuts:
                share = cut.share
                yield BatchKey(epoch, order[cut.positions], share.count, share.global_count)


class ArrayBatches(Dataset[Batch]):
    """Batches by key, gathered and hashed in a loader worker.

    ``augment`` is applied in the worker. Without it the ids are part of the batch, for
    augmentation on the device.
    """

    def __init__(self, arrays: DataSetArrays, augment: Augment | None) -> None:
        self._images = arrays.train_images
        self._labels = arrays.train_labels
        self._augment = augment

    def __getitem__(self, key: BatchKey) -> Batch:
        images, ids = torch.from_numpy(self._images[key.ids]), torch.from_numpy(key.ids)
        if self._augment is not None:
            images, ids = self._augment(images, ids, key.epoch), torch.empty(0, dtype=torch.int64)
        return build_batch(key, (images, torch.from_numpy(self._labels[key.ids]), ids))


def build_batch(key: BatchKey, tensors: Tensors) -> Batch:
    return Batch(
        tensors=tensors,
        epoch=key.epoch,
        count=key.count,
        global_count=key.global_count,
        sample_hash=sample_hash(key.ids[: key.count]),
    )


class BatchSource(ABC):
    """A rank's batches on its device: set ``epoch``, then iterate.

    ``data_bytes`` of the training set stay on the device; ``notes`` are caveats of the measurement,
    as (kind, text).
    """

    epoch: int
    data_bytes = 0
    notes: tuple[tuple[str, str], ...] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """The batches of ``epoch``, or all batches of a run measured in steps."""

    @abstractmethod
    def unpack(self, tensors: Tensors) -> InputSamples:
        """Return the samples of a batch's tensors; may be captured in a CUDA graph."""


class LoaderSource(BatchSource):
    """Batches of a DataLoader, on the device; set ``epoch``, then iterate once per epoch."""

    def __init__(
        self,
        batches: Dataset[Batch],
        task: Task,
        sampler: BatchKeySampler,
        device: torch.device,
        to_device: ToDevice = copy_batch,
        notes: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._sampler = sampler
        self._loader = build_loader(batches, task, sampler)
        self._device = device
        self.to_device = to_device
        self.notes = (*notes, *queued_input_notes(task.plan))

    @property
    def epoch(self) -> int:
        return self._sampler.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._sampler.epoch = epoch

    @property
    def steps_per_epoch(self) -> int:
        return self._sampler.steps_per_epoch

    def host_batches(self) -> Iterator[Batch]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        return iter(prefetch_batches(self._loader, self._device, self.to_device))

    def unpack(self, tensors: Tensors) -> InputSamples:
        if len(tensors) == len(SampleTensors._fields):
            return SampleTensors(*tensors)
        return CanvasTensors(*tensors)


def queued_input_notes(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return a caveat if the run is too short to show the speed of its workers.

    During compilation and warm-up, workers fill their queues; the first timed steps do not wait.
    """
    ready, steps = PREFETCH_BATCHES * (plan.workers or 0), plan.steps
    used = (plan.warmup_steps or 0) >= PREFETCH_WARMUP_FACTOR * ready
    if steps is None or ready <= MAX_READY_FRACTION * steps or used:
        return ()
    text = (
        f"up to {ready} batches may have been ready before the {steps} timed steps began: the "
        "result does not show the speed of the workers; "
        f"next: --steps {round(ready / MAX_READY_FRACTION)}"
    )
    return (("queued_input", text),)


def build_loader(
    batches: Dataset[Batch], task: Task, sampler: BatchKeySampler
) -> DataLoader[Batch]:
    """Return the DataLoader of a built-in workload.

    It has a generator of its own to seed its workers: dropout draws from the default generator,
    which must not depend on where a resumed run began.
    """
    workers = task.plan.workers or 0
    options = {"prefetch_factor": PREFETCH_BATCHES} if workers else {}
    return DataLoader(
        batches,
        batch_size=None,
        sampler=sampler,
        collate_fn=identity,
        generator=torch.Generator(),
        **loader_options(workers, str(task.plan.device), options),
    )


def loader_options(workers: int, device: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a DataLoader: ``options`` over persistent workers, pinned memory for GPUs."""
    return {
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "pin_memory": device == "cuda",
        **options,
        "worker_init_fn": partial(_init_worker, options.get("worker_init_fn")),
    }


def _init_worker(user_init: Callable[[int], Any] | None, worker: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    if user_init is not None:
        user_init(worker)


def identity(batch: Any) -> Any:
    return batch
