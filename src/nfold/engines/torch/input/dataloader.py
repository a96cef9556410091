"""Batches on the device: on a GPU copied one ahead, beside the step, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from nfold.core.parent_death import die_with_parent
from nfold.core.plan import PREFETCH_BATCHES, PREFETCH_WARMUP_FACTOR, Plan
from nfold.data.arrays import DataSetArrays
from nfold.engines import sampling
from nfold.engines.base import Task
from nfold.engines.sampling import SampleIds, sample_hash
from nfold.engines.torch.batch import Batch, CanvasTensors, InputSamples, SampleTensors, Tensors
from nfold.engines.torch.input.preprocessing import Augment
from nfold.engines.torch.nested_tensors import map_tensors

Item = TypeVar("Item")
Pending = TypeVar("Pending")
ToDevice = Callable[[Batch, torch.device], Batch]
"""What queues everything that brings a batch to the device, on the current stream."""


def copy_batch(batch: Batch, device: torch.device) -> Batch:
    """The same batch on ``device``; on a CPU device it is there already."""
    if device.type != "cuda":
        return batch
    return batch.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))


def prefetch_batches(
    batches: Iterable[Batch], device: torch.device, to_device: ToDevice = copy_batch
) -> Iterable[Batch]:
    """The batches as ``land`` brings them to ``device``."""
    return prefetch_items(
        batches, device, lambda batch: to_device(batch, device), lambda batch: batch.tensors
    )


def prefetch_items(
    items: Iterable[Item],
    device: torch.device,
    to_device: Callable[[Item], Item],
    tensors: Callable[[Item], Iterable[Tensor]],
) -> Iterable[Item]:
    """The items as ``land`` brings them to ``device``; ``tensors`` are those of one there."""
    if device.type != "cuda":
        return map(to_device, items)
    copies = CopyStream(device, to_device, tensors)
    return one_ahead(items, copies.begin, copies.finish)


def one_ahead(
    items: Iterable[Item], begin: Callable[[Item], Pending], finish: Callable[[Pending], Item]
) -> Iterator[Item]:
    """Every item through ``begin`` and ``finish``; the next one begins before one is given out."""
    remaining = iter(items)
    begun = [begin(item) for item in islice(remaining, 1)]
    for item in remaining:
        begun.append(begin(item))
        yield finish(begun.pop(0))
    for last in begun:
        yield finish(last)


class CopyStream(Generic[Item]):
    """Copies from page-locked memory on a side stream; the step's stream waits, not the host.

    ``land`` and ``tensors`` are as for ``brought``.
    """

    def __init__(
        self,
        device: torch.device,
        to_device: Callable[[Item], Item],
        tensors: Callable[[Item], Iterable[Tensor]],
    ) -> None:
        self._device = device
        self._to_device = to_device
        self._tensors = tensors
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, item: Item) -> tuple[Item, torch.cuda.Event]:
        """Start copying; returns the item on the device and the event after its copies.

        The host's memory stays taken until they are done (by PyTorch).
        """
        with torch.cuda.stream(self._stream):
            return self._to_device(item), self._stream.record_event()

    def finish(self, copying: tuple[Item, torch.cuda.Event]) -> Item:
        """Let the current stream wait for the copies, and keep their memory until it is through.

        Without ``record_stream`` the allocator would give the memory, which belongs to the side
        stream, to the next copy as soon as Python forgets the item, while the step still reads.
        """
        item, copied = copying
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for tensor in self._tensors(item):
            if tensor.is_cuda:
                tensor.record_stream(current)
        return item


# Batches of any form, tensors inside tuples, lists and dictionaries, moved to a device.
#
# On a GPU a loader's batches are copied one ahead, as in nfold's own training (prefetch.py).

Description = TypeVar("Description")


def to_device(
    value: Any, device: torch.device, memory_format: torch.memory_format | None = None
) -> Any:
    """``value`` with its tensors on ``device``, images [n, c, h, w] in the format ``memory``."""

    def move(tensor: Tensor) -> Tensor:
        if memory_format is not None and tensor.dim() == 4:
            return tensor.to(device, non_blocking=True, memory_format=memory_format)
        return tensor.to(device, non_blocking=True)

    return map_tensors(value, move)


def prefetch_to_device(
    batches: Iterable[tuple[Description, Any, Tensor]], device: torch.device
) -> Iterable[tuple[Description, Any, Tensor]]:
    """What a loader reads, (about it, batch, ids), the batch on ``device``."""

    def land(read: tuple[Description, Any, Tensor]) -> tuple[Description, Any, Tensor]:
        about, batch, ids = read
        return about, to_device(batch, device), ids

    return prefetch_items(batches, device, land, lambda read: _collect_tensors(read[1]))


def _collect_tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


MAX_READY_FRACTION = 0.1
"""The part of the timed steps whose input may lie ready before they begin."""


@dataclass(frozen=True)
class BatchKey:
    """One rank's part of one global batch: sample ids, and how many count (the rest pad)."""

    epoch: int
    ids: SampleIds
    count: int
    global_count: int


class BatchKeySampler(sampling.EpochSampler, Sampler[BatchKey]):
    """The keys of one rank, epoch by epoch, or without end across epochs."""

    def __init__(self, samples: int, task: Task, *, limit: int | None = None) -> None:
        sampling.EpochSampler.__init__(
            self, samples, task.plan, rank=task.rank, ranks=task.world_size, limit=limit
        )

    def __iter__(self) -> Iterator[BatchKey]:
        for epoch, cuts in self.epochs():
            order = self.epoch_order(epoch)
            for cut in cuts:
                yield BatchKey(epoch, order[cut.positions], cut.count, cut.global_count)


class ArrayBatches(Dataset[Batch]):
    """Whole batches by key: gathered and hashed in one go, in a loader worker.

    ``augment`` is applied there too; without it the ids go with the images, so that they are
    augmented on the device.
    """

    def __init__(self, arrays: DataSetArrays, augment: Augment | None) -> None:
        self._images = arrays.train_images
        self._labels = arrays.train_labels
        self._augment = partial(_augment_images, augment) if augment else _keep_images

    def __getitem__(self, key: BatchKey) -> Batch:
        ids = torch.from_numpy(key.ids)
        images, ids = self._augment(torch.from_numpy(self._images[key.ids]), ids, key.epoch)
        return Batch(
            tensors=(images, torch.from_numpy(self._labels[key.ids]), ids),
            epoch=key.epoch,
            count=key.count,
            global_count=key.global_count,
            sample_hash=sample_hash(key.ids[: key.count]),
        )


def _augment_images(
    augment: Augment, images: Tensor, ids: Tensor, epoch: int
) -> tuple[Tensor, Tensor]:
    return augment(images, ids, epoch), torch.empty(0, dtype=torch.int64)


def _keep_images(images: Tensor, ids: Tensor, _epoch: int) -> tuple[Tensor, Tensor]:
    return images, ids


class LoaderSource:
    """Batches from a DataLoader, on the device; iterate once an epoch, after setting ``epoch``."""

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
        self._notes = (*notes, *queued_input_notes(task.plan))

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is."""
        return self._sampler.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._sampler.epoch = epoch

    @property
    def data_bytes(self) -> int:
        """None of the data set stays on the device."""
        return 0

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """What there is to say of the data set."""
        return self._notes

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one pass over the data."""
        return self._sampler.steps_per_epoch

    def host_batches(self) -> Iterator[Batch]:
        """The batches as the loader gives them, not yet on the device."""
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        return iter(prefetch_batches(self._loader, self._device, self.to_device))

    def unpack(self, tensors: Tensors) -> InputSamples:
        """The samples, which the tensors are."""
        return (
            SampleTensors(*tensors)
            if len(tensors) == len(SampleTensors._fields)
            else CanvasTensors(*tensors)
        )


def queued_input_notes(plan: Plan) -> tuple[tuple[str, str], ...]:
    """A doubt where a run and its warm-up are too short to show how fast its workers are.

    While the first steps are compiled and warm up, workers fill their queues; timed steps that
    take from there wait for nobody.
    """
    ready, steps = PREFETCH_BATCHES * (plan.workers or 0), plan.steps
    used = (plan.warmup_steps or 0) >= PREFETCH_WARMUP_FACTOR * ready
    if steps is None or ready <= MAX_READY_FRACTION * steps or used:
        return ()
    text = (
        f"the workers may have had {ready} batches ready when the {steps} timed steps began: they "
        f"show what the devices can take; next: --steps {round(ready / MAX_READY_FRACTION)} for the workers"
    )
    return (("queued_input", text),)


def build_loader(
    batches: Dataset[Batch], task: Task, sampler: BatchKeySampler
) -> DataLoader[Batch]:
    """A DataLoader over ``stream``: persistent workers, batches made ahead, pinned for GPUs.

    It seeds its workers from a generator of its own: how often it does depends on where a
    resumed run began, and dropout draws from the default one.
    """
    workers = task.plan.workers or 0
    return DataLoader(
        batches,
        batch_size=None,
        sampler=sampler,
        collate_fn=_identity,
        num_workers=workers,
        pin_memory=task.plan.device == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=PREFETCH_BATCHES if workers else None,
        worker_init_fn=_init_worker,
        generator=torch.Generator(),
    )


def _identity(batch: Any) -> Any:
    return batch


def _init_worker(_: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
