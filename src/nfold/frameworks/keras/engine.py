"""What a back end of Keras has to do for the loop: place, step, fence, read, evaluate."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nfold import workloads
from nfold.data.arrays import Arrays, Images, Labels
from nfold.data.photographs import Photographs
from nfold.frameworks.augment import Operations
from nfold.frameworks.base import Task
from nfold.frameworks.built_in import samples_of
from nfold.frameworks.keras.calls import Group
from nfold.frameworks.stream import Ids
from nfold.measurement import RankSamples
from nfold.workload import Workload

Placed = Any
"""What a back end has on its devices."""
Loss = Any
"""The losses of a call's steps, not yet read."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One call's samples on the host: images [steps, n, h, w, c], labels and ids [steps, n].

    Of photographs that a device distorts, in place of ids marks [steps, n, 3]: id, height, width.
    """

    images: Images
    labels: npt.NDArray[np.int32]
    ids: npt.NDArray[np.uint32]


class Engine(ABC):
    """One model and its step on the devices of a plan."""

    @abstractmethod
    def describe(self) -> str:
        """The devices, for example ``cpu:0, cpu:1``."""

    @abstractmethod
    def keep(self, images: Images, labels: Labels) -> None:
        """Resident input: copy the training set to every device."""

    @abstractmethod
    def route(self, group: Group) -> Placed:
        """Resident input: a group's ids on the devices."""

    @abstractmethod
    def place(self, host: Host) -> Placed:
        """Loaded input: a call's samples on the devices. May run in another thread."""

    @abstractmethod
    def ready_to_follow(self, route: Placed) -> None:
        """Make the program of a group's calls, so that none is made in a timed window."""

    @abstractmethod
    def ready_to_step(self, placed: Placed) -> None:
        """The same for calls on samples of these shapes."""

    @abstractmethod
    def follow(self, route: Placed, call: int, epoch: int) -> Loss:
        """Make the steps of a group's call number ``call``."""

    @abstractmethod
    def step(self, placed: Placed, epoch: int) -> Loss:
        """Make the steps on what ``place`` placed."""

    @abstractmethod
    def fence(self) -> None:
        """Wait for everything that was queued."""

    @abstractmethod
    def wait(self, loss: Loss) -> None:
        """Wait for one call; from a thread of its own."""

    @property
    @abstractmethod
    def queues(self) -> bool:
        """Whether a call returns before it is done."""

    @abstractmethod
    def read(self, losses: Sequence[Loss]) -> list[float]:
        """One loss a step."""

    @abstractmethod
    def right(self, chunks: Iterable[tuple[Images, Labels]], beat: Callable[[], None]) -> int:
        """How many samples the model classifies right."""

    @abstractmethod
    def parameters(self) -> list[npt.NDArray[Any]]:
        """The trained weights on the host."""

    @abstractmethod
    def memory(self) -> dict[str, int | None]:
        """``peak_memory_bytes`` and ``reserved_memory_bytes`` of the fullest device."""

    @abstractmethod
    def dataset(self, groups: Sequence[Group], make: Callable[[Ids], Host]) -> Iterable[Placed]:
        """The batches of ``groups`` from a ``tf.data.Dataset``; ``make`` gathers a call's."""

    def finished(self, samples: RankSamples) -> RankSamples:
        """The samples of a run; a back end may add doubts."""
        return samples


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What is trained: its data, its operations, and the file that builds it in Keras.

    ``photographs`` are the samples where these are files; ``arrays`` then has no image.
    """

    workload: Workload
    parameters: dict[str, int]
    arrays: Arrays
    operations: Operations
    photographs: Photographs | None = None

    @property
    def peak(self) -> float:
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

    def _module(self) -> Any:
        return importlib.import_module(f"nfold.workloads.{self.workload.name}.keras")


def definition(task: Task) -> Definition:
    """What the task trains."""
    known = workloads.info(task.workload.name)
    chosen = workloads.parameters(task.workload)
    arrays, photographs = samples_of(known, chosen, task.plan)
    return Definition(
        workload=task.workload,
        parameters=chosen,
        arrays=arrays,
        operations=known.operations(chosen),
        photographs=photographs,
    )
