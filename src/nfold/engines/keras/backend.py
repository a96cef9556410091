"""The interface of a Keras back end, and the definition and calls of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nfold import workloads
from nfold.core.workload import Workload
from nfold.data.arrays import DataSetArrays, Images, Labels
from nfold.data.photographs import PhotographSet
from nfold.engines.base import Task
from nfold.engines.builtin_workloads import Operations, load_builtin_samples
from nfold.engines.sampling import RankSlice, SampleIds, hash_ids

DeviceValue = Any  # a back end's values on its devices
Loss = Any  # the losses of a call's steps on the devices


@dataclass(frozen=True, kw_only=True)
class HostBatch:
    """A call's samples on the host: images [steps, n, h, w, c], labels and ids [steps, n].

    If the device distorts photographs, ids are [steps, n, 3]: id, height, width.
    """

    images: Images
    labels: npt.NDArray[np.int32]
    ids: npt.NDArray[np.uint32]


# The steps of an epoch are grouped into calls of one or several steps. Calls of the same shape are
# a group: their ids are one array, and their program is compiled once. The steps that do not fill a
# call are single steps.


@dataclass(frozen=True)
class CallGroup:
    """Consecutive calls of one shape: ``ids`` are int64 [calls, steps per call, batch]."""

    ids: SampleIds

    @property
    def steps_per_call(self) -> int:
        return int(self.ids.shape[1])

    @property
    def batch_size(self) -> int:
        return int(self.ids.shape[2])

    def sample_hashes(self) -> list[int]:
        rows = hash_ids(self.ids).reshape(len(self.ids), -1)
        hashes: list[int] = rows.sum(axis=1, dtype=np.uint64).tolist()
        return hashes


def group_calls(
    order: SampleIds, cuts: Sequence[RankSlice], steps_per_call: int
) -> Iterator[CallGroup]:
    """Group the batches ``cuts`` of an epoch: full calls, single steps, the partial last batch."""
    if not cuts:
        return
    batch = cuts[0].share.global_count
    full_batches = sum(cut.share.global_count == batch for cut in cuts)
    grouped = full_batches // steps_per_call * steps_per_call
    for first, last, steps in ((0, grouped, steps_per_call), (grouped, full_batches, 1)):
        if last > first:
            ids = order[first * batch : last * batch]
            yield CallGroup(ids.reshape(-1, steps, batch))
    if full_batches < len(cuts):
        yield CallGroup(order[cuts[-1].positions].reshape(1, 1, -1))


class KerasDevices(Protocol):
    """The devices of a plan."""

    def describe(self) -> str:
        """Return the names of the devices, for example ``cpu:0, cpu:1``."""

    def memory(self) -> dict[str, int | None]:
        """Return the ``RankSamples`` fields of the memory of the device that used most."""


class KerasBackend(Protocol):
    """One model and its training step on the devices of a plan."""

    is_asynchronous: bool  # whether calls return before they are computed

    @property
    def devices(self) -> KerasDevices: ...

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """Caveats of the back end, as (kind, text)."""

    def store_training_set(self, images: Images, labels: Labels) -> None:
        """Copy the training set to every device, for resident input."""

    def put(self, samples: CallGroup | HostBatch) -> DeviceValue:
        """Copy a group's ids, for resident input, or a call's samples to the devices.

        May be called from another thread.
        """

    def compile(self, placed: DeviceValue) -> None:
        """Compile the program for samples of these shapes before a timed window."""

    def run(self, placed: DeviceValue, call: int, epoch: int) -> Loss:
        """Queue the steps of call number ``call`` of a group, or of a call's samples."""

    def synchronize(self) -> None: ...

    def wait_for(self, loss: Loss) -> None:
        """Wait for one call, in another thread."""

    def read_losses(self, losses: Sequence[Loss]) -> list[float]: ...

    def count_correct(
        self, chunks: Iterable[tuple[Images, Labels]], beat: Callable[[], None]
    ) -> int:
        """Count correctly classified samples; calls ``beat`` after every chunk."""

    def weights(self) -> list[npt.NDArray[Any]]: ...


@dataclass(frozen=True, kw_only=True)
class KerasDefinition:
    """A training in Keras: data, augmentations, network.

    With ``photographs``, ``arrays`` has no training images.
    """

    workload: Workload
    parameters: dict[str, int]
    arrays: DataSetArrays
    augmentations: Operations
    photographs: PhotographSet | None = None

    @property
    def peak_rate(self) -> float:
        """The peak of the one-cycle learning rate; 0: fixed learning rate."""
        return self.parameters.get("peak", 0) / 1000

    def model(self, layout: str) -> Any:
        """Create a model with weights from Keras's global generator."""
        return self._network.model(self.parameters, self.arrays.classes, layout)

    def optimizer(self, schedule: Any) -> Any:
        """Create the optimizer; ``schedule`` None: fixed learning rate."""
        return self._network.optimizer(self.parameters, schedule)

    @property
    def loss(self) -> Callable[[Any, Any], Any]:
        """The mean loss of a model's outputs and labels [n]."""
        return self._network.loss

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        return self.photographs.notes if self.photographs else ()

    @property
    def _network(self) -> workloads.Network:
        return workloads.network(self.workload.name, "keras")


def load_definition(task: Task) -> KerasDefinition:
    workload_info = workloads.info(task.workload.name)
    parameters = workloads.parameters(task.workload)
    arrays, photographs = load_builtin_samples(workload_info, parameters, task.plan)
    return KerasDefinition(
        workload=task.workload,
        parameters=parameters,
        arrays=arrays,
        augmentations=workload_info.augmentation_for(parameters),
        photographs=photographs,
    )
