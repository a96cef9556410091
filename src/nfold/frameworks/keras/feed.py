"""Where the samples of every call come from: the plan's ``input``, in one of four ways.

``resident``: the training set is on the devices and a call selects from it. ``loader``: NumPy
batches, gathered and copied one call ahead by a thread. ``generator``: NumPy batches from a
Python generator, made when they are asked for. ``tf.data``: a ``tf.data.Dataset``, prefetched by
TensorFlow. All give the same samples in the same order.
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
from nfold.frameworks.augment import augmentation
from nfold.frameworks.base import Task
from nfold.frameworks.boxes import canvas_side
from nfold.frameworks.keras.calls import Group, groups
from nfold.frameworks.keras.engine import Definition, Engine, Host, Loss, Placed
from nfold.frameworks.photographs import Darkroom, Undistorted
from nfold.frameworks.stream import Cut, Ids, Stream, step_limit

Item = TypeVar("Item")


@dataclass(frozen=True)
class Call:
    """The next call: ``run`` makes its steps, of ``count`` samples each."""

    run: Callable[[], Loss]
    steps: int
    count: int
    sample_hash: int


class Feed(ABC):
    """The calls of one epoch, or of a run in steps all of them; set ``epoch``, then iterate."""

    def __init__(self, made: Definition, task: Task, engine: Engine) -> None:
        self.engine = engine
        self.stream = Stream(
            len(made.arrays.train_labels), task.plan, rank=0, ranks=1, limit=step_limit(task.plan)
        )
        self._steps_per_call = task.plan.steps_per_execution

    @property
    def data_bytes(self) -> int:
        """Bytes of the training set that stay on a device."""
        return 0

    def __len__(self) -> int:
        """Steps of one iteration."""
        return len(self.stream)

    def __iter__(self) -> Iterator[Call]:
        for epoch, cuts in self.stream.passes():
            yield from self.calls(epoch, cuts)

    def groups(self, epoch: int, cuts: list[Cut]) -> list[Group]:
        """The calls of an epoch, or of its first ``cuts``."""
        return list(groups(self.stream.order(epoch), cuts, self._steps_per_call))

    @abstractmethod
    def calls(self, epoch: int, cuts: list[Cut]) -> Iterator[Call]:
        """The calls that compute ``cuts`` of an epoch."""


class Resident(Feed):
    """Ids are on the devices from an epoch's start; the next epoch's are made meanwhile."""

    def __init__(self, made: Definition, task: Task, engine: Engine) -> None:
        super().__init__(made, task, engine)
        self._bytes = made.arrays.train_images.nbytes + 4 * len(made.arrays.train_labels)
        engine.keep(made.arrays.train_images, made.arrays.train_labels)
        self._thread = ThreadPoolExecutor(1)
        self._begun: dict[tuple[int, int], Future[list[tuple[Group, Placed, list[int]]]]] = {}

    @property
    def data_bytes(self) -> int:
        """All of it, on every device."""
        return self._bytes

    def calls(self, epoch: int, cuts: list[Cut]) -> Iterator[Call]:
        """Each selects by the next ids of its group."""
        self._begin(epoch, cuts)
        routes = self._begun.pop((epoch, len(cuts))).result()
        self._begin(epoch + 1, self.stream.cuts)
        for _, route, _ in routes:
            self.engine.ready_to_follow(route)
        for group, route, hashes in routes:
            for number, hashed in enumerate(hashes):
                run = partial(self.engine.follow, route, number, epoch)
                yield Call(run, group.steps, group.count, hashed)

    def _begin(self, epoch: int, cuts: list[Cut]) -> None:
        if (epoch, len(cuts)) not in self._begun:
            made = self._thread.submit(self._routes, epoch, cuts)
            self._begun = {(epoch, len(cuts)): made}

    def _routes(self, epoch: int, cuts: list[Cut]) -> list[tuple[Group, Placed, list[int]]]:
        found = self.groups(epoch, cuts)
        return [(group, self.engine.route(group), group.hashes()) for group in found]


@dataclass(frozen=True)
class Finished:
    """Makes images [n, h, w, c] of an epoch and ids [n], and ids [n] or marks [n, 3] beside them.

    ``image`` and ``mark`` are the shapes of one sample's.
    """

    make: Callable[[int, Ids], tuple[Images, npt.NDArray[Any]]]
    image: tuple[int, ...]
    mark: tuple[int, ...] = ()


class FromHost(Feed):
    """NumPy batches, augmented on the host where the plan places it there."""

    def __init__(self, made: Definition, task: Task, engine: Engine) -> None:
        super().__init__(made, task, engine)
        self._arrays = made.arrays
        self._finished = finished(made, task)
        self._ready: set[tuple[int, ...]] = set()

    def host(self, epoch: int, ids: Ids) -> Host:
        """The samples ``ids`` [steps, n]."""
        images, marks = self._finished.make(epoch, ids.reshape(-1))
        return Host(
            images=images.reshape(*ids.shape, *images.shape[1:]),
            labels=self._arrays.train_labels[ids].astype(np.int32),
            ids=marks.astype(np.uint32).reshape(*ids.shape, *marks.shape[1:]),
        )

    def calls(self, epoch: int, cuts: list[Cut]) -> Iterator[Call]:
        """Each gets its batches as the way of this feed places them."""
        found = self.groups(epoch, cuts)
        hashed_calls = [(group, hashed) for group in found for hashed in group.hashes()]
        self._make_ready(found)
        placed = self.placed(epoch, found)
        for (group, hashed), batch in zip(hashed_calls, placed, strict=True):
            run = partial(self.engine.step, batch, epoch)
            yield Call(run, group.steps, group.count, hashed)

    def _make_ready(self, found: list[Group]) -> None:
        """Let the programs of new shapes be made, before the first call of all."""
        for shape in {group.ids.shape[1:] for group in found} - self._ready:
            self._ready.add(shape)
            images = np.zeros((*shape, *self._finished.image), np.uint8)
            labels, ids = np.zeros(shape, np.int32), np.zeros((*shape, *self._finished.mark), "u4")
            place = self.engine.place(Host(images=images, labels=labels, ids=ids))
            self.engine.ready_to_step(place)

    @abstractmethod
    def placed(self, epoch: int, found: list[Group]) -> Iterable[Placed]:
        """The batches of every call, on the devices."""


class Generator(FromHost):
    """A Python generator of NumPy batches."""

    def placed(self, epoch: int, found: list[Group]) -> Iterator[Placed]:
        """Made when it is asked for, while the devices may wait."""
        return map(self.engine.place, self.batches(epoch, found))

    def batches(self, epoch: int, found: list[Group]) -> Iterator[Host]:
        """The generator."""
        return (self.host(epoch, ids) for group in found for ids in group.ids)


class Loader(FromHost):
    """NumPy batches gathered and copied by a thread, one call ahead, also into the next epoch."""

    def __init__(self, made: Definition, task: Task, engine: Engine) -> None:
        super().__init__(made, task, engine)
        self._thread = ThreadPoolExecutor(1)

    def placed(self, epoch: int, found: list[Group]) -> Iterator[Placed]:
        """Each begins before the one in front of it is given out."""
        jobs = (partial(self._place, epoch, ids) for group in found for ids in group.ids)
        return one_ahead(jobs, self._thread)

    def _place(self, epoch: int, ids: Ids) -> Placed:
        return self.engine.place(self.host(epoch, ids))


class Dataset(FromHost):
    """A ``tf.data.Dataset`` whose elements are the calls' batches."""

    def placed(self, epoch: int, found: list[Group]) -> Iterable[Placed]:
        """TensorFlow's own threads make them ahead."""
        return self.engine.dataset(found, partial(self.host, epoch))


def finished(made: Definition, task: Task) -> Finished:
    """What the plan has the host do."""
    arrays, plan = made.arrays, task.plan
    shape, on_host = arrays.train_images.shape[1:], plan.augment == "cpu"
    if made.photographs is not None:
        photos = (made.photographs.train, plan.seed, shape[0], plan.workers or 0)
        if not on_host:
            side = canvas_side(shape[0])
            return Finished(Undistorted(*photos), (side, side, 3), (3,))
        darkroom = Darkroom(*photos)
        return Finished(lambda epoch, ids: (darkroom(epoch, ids), ids), shape)
    augment = augmentation(made.operations if on_host else (), arrays, plan.seed)
    images = arrays.train_images
    return Finished(lambda epoch, ids: (augment(images[ids], ids, epoch), ids), shape)


def one_ahead(jobs: Iterable[Callable[[], Item]], thread: ThreadPoolExecutor) -> Iterator[Item]:
    """The results of ``jobs``; a job begins before the result of the one before is given out."""
    begun: list[Future[Item]] = []
    for job in jobs:
        begun.append(thread.submit(job))
        if len(begun) > 1:
            yield begun.pop(0).result()
    for last in begun:
        yield last.result()


FEEDS: dict[str, type[Feed]] = {
    "resident": Resident,
    "loader": Loader,
    "generator": Generator,
    "tf.data": Dataset,
}


def feed(made: Definition, task: Task, engine: Engine) -> Feed:
    """The feed that the plan's ``input`` names."""
    return FEEDS[str(task.plan.input)](made, task, engine)
