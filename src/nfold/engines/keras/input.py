"""Input pipelines by the plan's ``input``; all give the same samples in the same order.

- ``resident``: the training set is on the devices, and a call selects from it
- ``loader``: a thread gathers and copies NumPy batches one call ahead
- ``generator``: NumPy batches from a Python generator
- ``tf.data``: a ``tf.data.Dataset``, prefetched by TensorFlow
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from nfold.data.arrays import Images
from nfold.engines.base import Task
from nfold.engines.builtin_workloads import (
    CanvasDecoder,
    ImageDistorter,
    build_augmentation,
    canvas_side,
)
from nfold.engines.keras.backend import (
    CallGroup,
    DeviceValue,
    HostBatch,
    KerasBackend,
    KerasDefinition,
    Loss,
    group_calls,
)
from nfold.engines.sampling import EpochSampler, RankSlice, SampleIds, step_limit

Item = TypeVar("Item")


@dataclass(frozen=True)
class BackendCall:
    """A call; ``run`` queues its steps of ``batch_size`` samples each."""

    run: Callable[[], Loss]
    steps: int
    batch_size: int
    sample_hash: int


class InputPipeline(ABC):
    """The calls of an epoch, or of a whole run in steps. Set ``stream.epoch``, then iterate."""

    def __init__(self, definition: KerasDefinition, task: Task, backend: KerasBackend) -> None:
        self.backend = backend
        self.stream = EpochSampler(
            len(definition.arrays.train_labels),
            task.plan,
            rank=0,
            ranks=1,
            limit=step_limit(task.plan),
        )
        self._steps_per_call = task.plan.steps_per_execution

    @property
    def resident_bytes(self) -> int:
        return 0

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[BackendCall]:
        for epoch, cuts in self.stream.epochs():
            yield from self.calls(epoch, cuts)

    def groups(self, epoch: int, cuts: list[RankSlice]) -> list[CallGroup]:
        return list(group_calls(self.stream.epoch_order(epoch), cuts, self._steps_per_call))

    @abstractmethod
    def calls(self, epoch: int, cuts: list[RankSlice]) -> Iterator[BackendCall]:
        """Yield the calls for the batches ``cuts`` of an epoch."""


# a group, its ids on the devices, the hashes of its calls
PlacedGroups = list[tuple[CallGroup, DeviceValue, list[int]]]


class ResidentInput(InputPipeline):
    """Copies the ids of an epoch to the devices during the previous epoch."""

    def __init__(self, definition: KerasDefinition, task: Task, backend: KerasBackend) -> None:
        super().__init__(definition, task, backend)
        self._bytes = definition.arrays.train_images.nbytes + 4 * len(
            definition.arrays.train_labels
        )
        backend.store_training_set(definition.arrays.train_images, definition.arrays.train_labels)
        self._thread = ThreadPoolExecutor(1)
        self._pending: dict[tuple[int, int], Future[PlacedGroups]] = {}

    @property
    def resident_bytes(self) -> int:
        return self._bytes

    def calls(self, epoch: int, cuts: list[RankSlice]) -> Iterator[BackendCall]:
        self._submit(epoch, cuts)
        placed_groups = self._pending.pop((epoch, len(cuts))).result()
        self._submit(epoch + 1, self.stream.slices)
        for _, ids, _ in placed_groups:
            self.backend.compile(ids)
        for group, ids, hashes in placed_groups:
            for number, hashed in enumerate(hashes):
                run = partial(self.backend.run, ids, number, epoch)
                yield BackendCall(run, group.steps_per_call, group.batch_size, hashed)

    def _submit(self, epoch: int, cuts: list[RankSlice]) -> None:
        if (epoch, len(cuts)) not in self._pending:
            future = self._thread.submit(self._put_groups, epoch, cuts)
            self._pending = {(epoch, len(cuts)): future}

    def _put_groups(self, epoch: int, cuts: list[RankSlice]) -> PlacedGroups:
        return [
            (group, self.backend.put(group), group.sample_hashes())
            for group in self.groups(epoch, cuts)
        ]


@dataclass(frozen=True)
class HostPreprocessing:
    """Maps an epoch and ids [n] to images [n, h, w, c] and keys: ids [n], or [n, 3] as HostBatch.

    ``image_shape`` and ``key_shape`` are of one sample.
    """

    process: Callable[[int, SampleIds], tuple[Images, npt.NDArray[Any]]]
    image_shape: tuple[int, ...]
    key_shape: tuple[int, ...] = ()


class HostInput(InputPipeline):
    """NumPy batches, augmented on the host with ``augment='cpu'``."""

    def __init__(self, definition: KerasDefinition, task: Task, backend: KerasBackend) -> None:
        super().__init__(definition, task, backend)
        self._arrays = definition.arrays
        self._preprocessing = host_preprocessing(definition, task)
        self._compiled_shapes: set[tuple[int, ...]] = set()
        self._kind = task.plan.input
        self._thread = ThreadPoolExecutor(1)

    def host_batch(self, epoch: int, ids: SampleIds) -> HostBatch:
        """Gather and augment the samples ``ids`` [steps, n]."""
        images, keys = self._preprocessing.process(epoch, ids.reshape(-1))
        return HostBatch(
            images=images.reshape(*ids.shape, *images.shape[1:]),
            labels=self._arrays.train_labels[ids].astype(np.int32),
            ids=keys.astype(np.uint32).reshape(*ids.shape, *keys.shape[1:]),
        )

    def calls(self, epoch: int, cuts: list[RankSlice]) -> Iterator[BackendCall]:
        groups = self.groups(epoch, cuts)
        hashed_calls = [(group, hashed) for group in groups for hashed in group.sample_hashes()]
        self._compile_new_shapes(groups)
        batches = self.device_batches(epoch, groups)
        for (group, hashed), batch in zip(hashed_calls, batches, strict=True):
            run = partial(self.backend.run, batch, 0, epoch)
            yield BackendCall(run, group.steps_per_call, group.batch_size, hashed)

    def _compile_new_shapes(self, groups: list[CallGroup]) -> None:
        for shape in {group.ids.shape[1:] for group in groups} - self._compiled_shapes:
            self._compiled_shapes.add(shape)
            host = HostBatch(
                images=np.zeros((*shape, *self._preprocessing.image_shape), np.uint8),
                labels=np.zeros(shape, np.int32),
                ids=np.zeros((*shape, *self._preprocessing.key_shape), np.uint32),
            )
            self.backend.compile(self.backend.put(host))

    def device_batches(self, epoch: int, groups: list[CallGroup]) -> Iterator[DeviceValue]:
        """Load the batch of every call on the devices; as ``loader`` in a thread, one call ahead."""
        if self._kind == "tf.data":
            backend: Any = self.backend  # of TensorFlow
            yield from backend.tf_dataset(groups, partial(self.host_batch, epoch))
            return
        jobs = (partial(self._put_batch, epoch, ids) for group in groups for ids in group.ids)
        if self._kind == "loader":
            yield from prefetch_one(jobs, self._thread)
        else:
            yield from (job() for job in jobs)

    def _put_batch(self, epoch: int, ids: SampleIds) -> DeviceValue:
        return self.backend.put(self.host_batch(epoch, ids))


def host_preprocessing(definition: KerasDefinition, task: Task) -> HostPreprocessing:
    """Return the host's part of decoding and augmentation under the plan."""
    arrays, plan = definition.arrays, task.plan
    shape, on_host = arrays.train_images.shape[1:], plan.augment == "cpu"
    if definition.photographs is not None:
        photos = (definition.photographs.train, plan.seed, shape[0], plan.workers or 0)
        if not on_host:
            side = canvas_side(shape[0])
            return HostPreprocessing(CanvasDecoder(*photos), (side, side, 3), (3,))
        distort = ImageDistorter(*photos)
        return HostPreprocessing(lambda epoch, ids: (distort(epoch, ids), ids), shape)
    augment = build_augmentation(definition.augmentations if on_host else (), arrays, plan.seed)
    images = arrays.train_images
    return HostPreprocessing(lambda epoch, ids: (augment(images[ids], ids, epoch), ids), shape)


def prefetch_one(jobs: Iterable[Callable[[], Item]], thread: ThreadPoolExecutor) -> Iterator[Item]:
    """Yield the results of ``jobs``; starts each job before it yields the previous result."""
    pending: list[Future[Item]] = []
    for job in jobs:
        pending.append(thread.submit(job))
        if len(pending) > 1:
            yield pending.pop(0).result()
    for last in pending:
        yield last.result()


def open_input(definition: KerasDefinition, task: Task, backend: KerasBackend) -> InputPipeline:
    kind = ResidentInput if task.plan.input == "resident" else HostInput
    return kind(definition, task, backend)
