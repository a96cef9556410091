"""Keras on TensorFlow: a step per replica under ``tf.distribute.MirroredStrategy``.

One device runs under TensorFlow's default strategy, which is the same calls without an exchange.
A batch that does not divide is cut as for PyTorch's ranks: replicas differ by at most one sample
and each counts by its own, so that the update is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from nfold.data.arrays import Images, Labels
from nfold.frameworks.base import Task
from nfold.frameworks.keras.calls import Group
from nfold.frameworks.keras.engine import Definition, Engine, Host, Loss, Placed
from nfold.frameworks.keras.model import built
from nfold.frameworks.keras.prepare import preparation
from nfold.frameworks.keras.replicas import Replicas, Tensor, replicas
from nfold.frameworks.stream import Ids
from nfold.workloads.keras import heads

Samples = tuple[Tensor, Tensor, Tensor]
"""Images, labels and ids of one replica's part of a step."""


def engine(task: Task, made: Definition) -> Engine:
    """TensorFlow on the plan's devices; raises Unsupported where it does not see them."""
    return TensorFlow(task, made, replicas(task.plan))


class TensorFlow(Engine):
    """One model, mirrored on every replica, and the functions that step it."""

    def __init__(self, task: Task, made: Definition, over: Replicas) -> None:
        self._over = over
        self._cuda = task.plan.device == "cuda"
        self._how = str(task.plan.step)
        with over.strategy.scope():
            self._one = OneStep(task, made, over)
        self._follow, self._step = self._graph(self._one.follow), self._graph(self._one.steps)
        self._score = self._graph(self._one.right, jit_compile=self._how == "compiled")
        self._data: tuple[Placed, ...] = ()

    def _graph(self, function: Callable[..., Tensor], **how: bool) -> Any:
        """A function as TensorFlow runs it usually, or as it is written where that was asked."""
        if self._how == "eager":
            return function
        return tf.function(function, autograph=False, **how)

    def describe(self) -> str:
        """The devices."""
        return self._over.describe()

    def keep(self, images: Images, labels: Labels) -> None:
        """Whole on every device."""
        whole = (np.asarray(images), labels.astype(np.int32))
        self._data = tuple(self._over.everywhere(values) for values in whole)

    def route(self, group: Group) -> Placed:
        """int64 [calls, steps, n] on every replica, and what its samples count."""
        cuts = self._over.cuts(group.count)
        return self._over.split(group.ids, cuts, axis=2), self._over.counts(cuts)

    def place(self, host: Host) -> Placed:
        """Images, labels and ids, [steps, n, ...] each, and what each replica's count."""
        cuts = self._over.cuts(host.ids.shape[1])
        values = (host.images, host.labels, host.ids)
        return tuple(self._over.split(v, cuts, axis=1) for v in values), self._over.counts(cuts)

    def ready_to_follow(self, route: Placed) -> None:
        """Trace for a route of this shape."""
        if self._how != "eager":
            ids, counts = route
            inputs = (self._data, ids, tf.constant(0), now(0), counts)
            self._follow.get_concrete_function(*inputs)

    def ready_to_step(self, placed: Placed) -> None:
        """Trace for samples of these shapes."""
        if self._how != "eager":
            samples, counts = placed
            self._step.get_concrete_function(samples, now(0), counts)

    def follow(self, route: Placed, call: int, epoch: int) -> Loss:
        """Select by the ids of the call, then step."""
        ids, counts = route
        return self._follow(self._data, ids, tf.constant(call), now(epoch), counts)

    def step(self, placed: Placed, epoch: int) -> Loss:
        """Step on what is placed."""
        samples, counts = placed
        return self._step(samples, now(epoch), counts)

    def fence(self) -> None:
        """Wait for all devices."""
        tf.test.experimental.sync_devices()

    def wait(self, loss: Loss) -> None:
        """Wait for a call's losses."""
        loss.numpy()

    @property
    def queues(self) -> bool:
        """On GPUs only."""
        return self._cuda

    def read(self, losses: Sequence[Loss]) -> list[float]:
        """Joined on the device, copied to the host at once."""
        found: list[float] = tf.concat(list(losses), axis=0).numpy().tolist()
        return found

    def right(self, chunks: Iterable[tuple[Images, Labels]], beat: Callable[[], None]) -> int:
        """Counted on the first device, read once."""
        count = tf.constant(0)
        for images, labels in chunks:
            count += self._score(tf.constant(images), tf.constant(labels.astype(np.int32)))
            beat()
        return int(count.numpy())

    def parameters(self) -> list[npt.NDArray[Any]]:
        """From the first replica."""
        return [np.asarray(v) for v in self._one.model.trainable_variables]

    def memory(self) -> dict[str, int | None]:
        """Of the fullest device."""
        return self._over.memory()

    def dataset(self, groups: Sequence[Group], make: Callable[[Ids], Host]) -> Iterator[Placed]:
        """Ids from slices, samples gathered by ``map``, one call prefetched."""
        kinds = (tf.uint8, tf.int32, tf.uint32)

        def gathered(ids: Tensor) -> tuple[Tensor, ...]:
            host = make(ids)
            return host.images, host.labels, host.ids

        for group in groups:
            found = tf.data.Dataset.from_tensor_slices(group.ids)
            found = found.map(lambda ids: tf.numpy_function(gathered, [ids], kinds)).prefetch(1)
            for images, labels, ids in found.as_numpy_iterator():
                yield self.place(Host(images=images, labels=labels, ids=ids))


def now(epoch: int) -> Tensor:
    """uint32 []."""
    return tf.constant(epoch, tf.uint32)


def xla(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, compiled by XLA."""
    compiled: Callable[..., Tensor] = tf.function(function, jit_compile=True, autograph=False)
    return compiled


class OneStep:
    """The functions of a step; made in the strategy's scope."""

    def __init__(self, task: Task, made: Definition, over: Replicas) -> None:
        self._over = over
        self._built = built(task, made)
        self.model, self._optimizer = self._built.model, self._built.optimizer
        self._prepare = preparation(made.arrays, task, made.operations)
        self._rare_too = task.plan.layout == "channels_first" and task.plan.device == "cpu"
        self._usual = min(int(task.plan.batch or 0), len(made.arrays.train_labels))
        self._compiled = task.plan.step == "compiled"

    def follow(
        self, data: tuple[Placed, ...], route: Placed, call: Tensor, epoch: Tensor, counts: Placed
    ) -> Tensor:
        """The steps of call number ``call`` of a route [calls, steps, n] on every replica."""
        first = self._over.local(route)[0]
        update = self._update(first.shape[2])

        def one(number: Tensor) -> Tensor:
            def selected(data: Any, route: Tensor, counts: Placed) -> Tensor:
                ids = route[call, number]
                samples = (tf.gather(data[0], ids), tf.gather(data[1], ids))
                return update((*samples, tf.cast(ids, tf.uint32)), epoch, counts)

            return self._over.summed(selected, (data, route, counts))

        return repeated(one, first.shape[1])

    def steps(self, samples: tuple[Placed, ...], epoch: Tensor, counts: Placed) -> Tensor:
        """The steps on images, labels and ids [steps, n, ...] on every replica."""
        first = self._over.local(samples[1])[0]
        update = self._update(first.shape[1])

        def one(number: Tensor) -> Tensor:
            def chosen(samples: tuple[Tensor, ...], counts: Placed) -> Tensor:
                return update(tuple(values[number] for values in samples), epoch, counts)

            return self._over.summed(chosen, (samples, counts))

        return repeated(one, first.shape[0])

    def _update(self, rows: int) -> Callable[..., Tensor]:
        """One replica's step, compiled by XLA where the plan says so.

        The last batch of an epoch is not: that would take longer than it saves, unless only XLA
        can compute in the layout. With several replicas the exchange stays outside of XLA.
        """
        largest = self._over.cuts(self._usual)[0][1]
        if not self._compiled or (rows < largest - 1 and not self._rare_too):
            return partial(self._replica, self._gradients)
        whole = partial(self._replica, self._gradients)
        if self._over.count == 1:
            return xla(whole)
        return partial(self._replica, xla(self._gradients))

    def _replica(self, gradients: Any, samples: Samples, epoch: Tensor, counts: Tensor) -> Tensor:
        loss, found = gradients(samples, epoch, counts)
        self._optimizer.apply(found, self.model.trainable_variables)
        return loss

    def _gradients(self, samples: Samples, epoch: Tensor, counts: Tensor) -> Any:
        """What a replica adds to the batch's mean loss, and the gradients of that."""
        images, labels, ids = samples
        with tf.GradientTape() as tape:
            outputs = self.model(self._prepare(images, ids, epoch), training=True)
            loss = self._built.loss(outputs, labels) * counts
            scaled = self._optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self.model.trainable_variables)

    def right(self, images: Tensor, labels: Tensor) -> Tensor:
        """How many of the samples are classified right: int32 []."""
        logits = heads(self.model(self._built.normalize(images), training=False))[0]
        hit = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), labels)
        return tf.reduce_sum(tf.cast(hit, tf.int32))


def repeated(one: Callable[[Tensor], Tensor], steps: int) -> Tensor:
    """The losses [steps] of as many steps, in a loop of the graph."""
    if steps == 1:
        return one(tf.constant(0))[None]
    losses = tf.TensorArray(tf.float32, steps)
    _, losses = tf.while_loop(
        lambda number, _: number < steps,
        lambda number, losses: (number + 1, losses.write(number, one(number))),
        (tf.constant(0), losses),
        parallel_iterations=1,
    )
    return losses.stack()
