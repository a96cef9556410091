"""What a back end of Keras has to do for the loop: place, step, fence, read, evaluate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nfold import workloads
from nfold.core.measurement import RankSamples
from nfold.core.workload import Workload
from nfold.data.arrays import DataSetArrays, Images, Labels
from nfold.data.photographs import PhotographSet
from nfold.engines.base import Task
from nfold.engines.builtin_workloads import Operations, load_builtin_samples
from nfold.engines.sampling import RankSlice, SampleIds, hash_ids

DeviceValue = Any  # what a back end has on its devices
Loss = Any  # the losses of a call's steps, not yet read


@dataclass(frozen=True, kw_only=True)
class HostBatch:
    """One call's samples on the host: images [steps, n, h, w, c], labels and ids [steps, n].

    Of photographs that a device distorts, in place of ids marks [steps, n, 3]: id, height, width.
    """

    images: Images
    labels: npt.NDArray[np.int32]
    ids: npt.NDArray[np.uint32]


class KerasBackend(ABC):
    """One model and its step on the devices of a plan."""

    @abstractmethod
    def describe(self) -> str:
        """The devices, for example ``cpu:0, cpu:1``."""

    @abstractmethod
    def store_training_set(self, images: Images, labels: Labels) -> None:
        """Resident input: copy the training set to every device."""

    @abstractmethod
    def put_ids(self, group: CallGroup) -> DeviceValue:
        """Resident input: a group's ids on the devices."""

    @abstractmethod
    def put_batch(self, host: HostBatch) -> DeviceValue:
        """Loaded input: a call's samples on the devices. May run in another thread."""

    @abstractmethod
    def compile_resident_step(self, route: DeviceValue) -> None:
        """Make the program of a group's calls, so that none is made in a timed window."""

    @abstractmethod
    def compile_step(self, batch: DeviceValue) -> None:
        """The same for calls on samples of these shapes."""

    @abstractmethod
    def step_resident(self, route: DeviceValue, call: int, epoch: int) -> Loss:
        """Make the steps of a group's call number ``call``."""

    @abstractmethod
    def step(self, batch: DeviceValue, epoch: int) -> Loss:
        """Make the steps on what ``place`` placed."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that was queued."""

    @abstractmethod
    def wait_for(self, loss: Loss) -> None:
        """Wait for one call; from a thread of its own."""

    @property
    @abstractmethod
    def is_asynchronous(self) -> bool:
        """Whether a call returns before it is done."""

    @abstractmethod
    def read_losses(self, losses: Sequence[Loss]) -> list[float]:
        """One loss a step."""

    @abstractmethod
    def count_correct(
        self, chunks: Iterable[tuple[Images, Labels]], beat: Callable[[], None]
    ) -> int:
        """How many samples the model classifies right."""

    @abstractmethod
    def weights(self) -> list[npt.NDArray[Any]]:
        """The trained weights on the host."""

    @abstractmethod
    def memory(self) -> dict[str, int | None]:
        """``peak_memory_bytes`` and ``reserved_memory_bytes`` of the fullest device."""

    @abstractmethod
    def tf_dataset(
        self, groups: Sequence[CallGroup], make: Callable[[SampleIds], HostBatch]
    ) -> Iterable[DeviceValue]:
        """The batches of ``groups`` from a ``tf.data.Dataset``; ``make`` gathers a call's."""

    def add_notes(self, samples: RankSamples) -> RankSamples:
        """The samples of a run; a back end may add doubts."""
        return samples


@dataclass(frozen=True, kw_only=True)
class KerasDefinition:
    """What is trained: its data, its operations, and the file that builds it in Keras.

    ``photographs`` are the samples where these are files; ``arrays`` then has no image.
    """

    workload: Workload
    parameters: dict[str, int]
    arrays: DataSetArrays
    augmentations: Operations
    photographs: PhotographSet | None = None

    @property
    def peak_rate(self) -> float:
        """The learning rate's peak in one cycle, 0: fixed."""
        return self.parameters.get("peak", 0) / 1000

    def model(self, layout: str) -> Any:
        """A new model, drawn from Keras's global generator."""
        return self._module().model(self.parameters, self.arrays.classes, layout)

    def optimizer(self, schedule: Any) -> Any:
        """Its optimizer; ``schedule`` None: at a fixed rate."""
        return self._module().optimizer(self.parameters, schedule)

    @property
    def loss(self) -> Callable[[Any, Any], Any]:
        """The mean loss of a model's outputs and labels [n]."""
        found: Callable[[Any, Any], Any] = self._module().loss
        return found

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """What a reader of the measurement has to know about the data, as (kind, text)."""
        return self.photographs.notes if self.photographs else ()

    def _module(self) -> workloads.Network:
        return workloads.network(self.workload.name, "keras")


def load_definition(task: Task) -> KerasDefinition:
    """What the task trains."""
    known = workloads.info(task.workload.name)
    chosen = workloads.parameters(task.workload)
    arrays, photographs = load_builtin_samples(known, chosen, task.plan)
    return KerasDefinition(
        workload=task.workload,
        parameters=chosen,
        arrays=arrays,
        augmentations=known.augmentation_for(chosen),
        photographs=photographs,
    )


# The steps of an epoch as calls: each makes one or several steps on batches of one size.
#
# Calls of one shape make a group, so that a group's ids are one array and its program is compiled
# once. With k steps a call, what does not fill a call is made one step at a time.


@dataclass(frozen=True)
class CallGroup:
    """Consecutive calls of one shape: ``ids`` are int64 [calls, steps per call, batch]."""

    ids: SampleIds

    @property
    def steps_per_call(self) -> int:
        """Steps of one call."""
        return int(self.ids.shape[1])

    @property
    def batch_size(self) -> int:
        """Samples of one step."""
        return int(self.ids.shape[2])

    def sample_hashes(self) -> list[int]:
        """The sample hash of every call, as ``stream.sample_hash`` has it."""
        rows = hash_ids(self.ids).reshape(len(self.ids), -1)
        found: list[int] = rows.sum(axis=1, dtype=np.uint64).tolist()
        return found


def group_calls(
    order: SampleIds, cuts: Sequence[RankSlice], steps_per_call: int
) -> Iterator[CallGroup]:
    """The calls that compute ``cuts`` of an epoch's ``order``: whole ones, singles, the rest."""
    if not cuts:
        return
    batch = cuts[0].global_count
    whole = sum(cut.global_count == batch for cut in cuts)
    together = whole // steps_per_call * steps_per_call
    for first, last, steps in ((0, together, steps_per_call), (together, whole, 1)):
        if last > first:
            ids = order[first * batch : last * batch]
            yield CallGroup(ids.reshape(-1, steps, batch))
    if whole < len(cuts):
        yield CallGroup(order[cuts[-1].positions].reshape(1, 1, -1))
