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
from nfold.engines.base import Task
from nfold.engines.keras.backend import (
    CallGroup,
    DeviceValue,
    HostBatch,
    KerasBackend,
    KerasDefinition,
    Loss,
)
from nfold.engines.keras.model import build_model
from nfold.engines.keras.preprocessing import build_preparation
from nfold.engines.keras.tensorflow_devices import Tensor, TensorFlowReplicas, open_replicas
from nfold.engines.sampling import SampleIds
from nfold.workloads.keras_networks import head_logits

Samples = tuple[Tensor, Tensor, Tensor]  # images, labels and ids of one replica's part of a step


def create_backend(task: Task, definition: KerasDefinition) -> KerasBackend:
    """TensorFlow on the plan's devices; raises Unsupported where it does not see them."""
    return TensorFlowBackend(task, definition, open_replicas(task.plan))


class TensorFlowBackend(KerasBackend):
    """One model, mirrored on every replica, and the functions that step it."""

    def __init__(self, task: Task, definition: KerasDefinition, over: TensorFlowReplicas) -> None:
        self._replicas = over
        self._cuda = task.plan.device == "cuda"
        self._step_kind = str(task.plan.step)
        with over.strategy.scope():
            self._one = TensorFlowStep(task, definition, over)
        self._follow, self._step = (
            self._graph(self._one.resident_steps),
            self._graph(self._one.steps),
        )
        self._count_correct = self._graph(
            self._one.count_correct, jit_compile=self._step_kind == "compiled"
        )
        self._data: tuple[DeviceValue, ...] = ()

    def _graph(self, function: Callable[..., Tensor], **how: bool) -> Any:
        if self._step_kind == "eager":
            return function
        return tf.function(function, autograph=False, **how)

    def describe(self) -> str:
        return self._replicas.describe()

    def store_training_set(self, images: Images, labels: Labels) -> None:
        whole = (np.asarray(images), labels.astype(np.int32))
        self._data = tuple(self._replicas.replicate(values) for values in whole)

    def put_ids(self, group: CallGroup) -> DeviceValue:
        cuts = self._replicas.slices(group.batch_size)
        return self._replicas.split(group.ids, cuts, axis=2), self._replicas.loss_weights(cuts)

    def put_batch(self, host: HostBatch) -> DeviceValue:
        cuts = self._replicas.slices(host.ids.shape[1])
        values = (host.images, host.labels, host.ids)
        return tuple(
            self._replicas.split(v, cuts, axis=1) for v in values
        ), self._replicas.loss_weights(cuts)

    def compile_resident_step(self, route: DeviceValue) -> None:
        if self._step_kind != "eager":
            ids, counts = route
            inputs = (self._data, ids, tf.constant(0), epoch_tensor(0), counts)
            self._follow.get_concrete_function(*inputs)

    def compile_step(self, batch: DeviceValue) -> None:
        if self._step_kind != "eager":
            samples, counts = batch
            self._step.get_concrete_function(samples, epoch_tensor(0), counts)

    def step_resident(self, route: DeviceValue, call: int, epoch: int) -> Loss:
        ids, counts = route
        return self._follow(self._data, ids, tf.constant(call), epoch_tensor(epoch), counts)

    def step(self, batch: DeviceValue, epoch: int) -> Loss:
        samples, counts = batch
        return self._step(samples, epoch_tensor(epoch), counts)

    def synchronize(self) -> None:
        tf.test.experimental.sync_devices()

    def wait_for(self, loss: Loss) -> None:
        loss.numpy()

    @property
    def is_asynchronous(self) -> bool:
        return self._cuda

    def read_losses(self, losses: Sequence[Loss]) -> list[float]:
        found: list[float] = tf.concat(list(losses), axis=0).numpy().tolist()
        return found

    def count_correct(
        self, chunks: Iterable[tuple[Images, Labels]], beat: Callable[[], None]
    ) -> int:
        count = tf.constant(0)
        for images, labels in chunks:
            count += self._count_correct(tf.constant(images), tf.constant(labels.astype(np.int32)))
            beat()
        return int(count.numpy())

    def weights(self) -> list[npt.NDArray[Any]]:
        return [np.asarray(v) for v in self._one.model.trainable_variables]

    def memory(self) -> dict[str, int | None]:
        return self._replicas.memory()

    def tf_dataset(
        self, groups: Sequence[CallGroup], make: Callable[[SampleIds], HostBatch]
    ) -> Iterator[DeviceValue]:
        kinds = (tf.uint8, tf.int32, tf.uint32)

        def gathered(ids: Tensor) -> tuple[Tensor, ...]:
            host = make(ids)
            return host.images, host.labels, host.ids

        for group in groups:
            found = tf.data.Dataset.from_tensor_slices(group.ids)
            found = found.map(lambda ids: tf.numpy_function(gathered, [ids], kinds)).prefetch(1)
            for images, labels, ids in found.as_numpy_iterator():
                yield self.put_batch(HostBatch(images=images, labels=labels, ids=ids))


def epoch_tensor(epoch: int) -> Tensor:
    """uint32 []."""
    return tf.constant(epoch, tf.uint32)


def compile_xla(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, compiled by XLA."""
    compiled: Callable[..., Tensor] = tf.function(function, jit_compile=True, autograph=False)
    return compiled


class TensorFlowStep:
    """The functions of a step; made in the strategy's scope."""

    def __init__(self, task: Task, definition: KerasDefinition, over: TensorFlowReplicas) -> None:
        self._replicas = over
        self._keras_model = build_model(task, definition)
        self.model, self._optimizer = self._keras_model.model, self._keras_model.optimizer
        self._prepare = build_preparation(definition.arrays, task, definition.augmentations)
        self._compile_all_shapes = (
            task.plan.layout == "channels_first" and task.plan.device == "cpu"
        )
        self._full_batch = min(int(task.plan.batch or 0), len(definition.arrays.train_labels))
        self._compiled = task.plan.step == "compiled"

    def resident_steps(
        self,
        data: tuple[DeviceValue, ...],
        route: DeviceValue,
        call: Tensor,
        epoch: Tensor,
        counts: DeviceValue,
    ) -> Tensor:
        """The steps of call number ``call`` of a route [calls, steps, n] on every replica."""
        first = self._replicas.local_tensors(route)[0]
        update = self._update(first.shape[2])

        def one(number: Tensor) -> Tensor:
            def selected(data: Any, route: Tensor, counts: DeviceValue) -> Tensor:
                ids = route[call, number]
                samples = (tf.gather(data[0], ids), tf.gather(data[1], ids))
                return update((*samples, tf.cast(ids, tf.uint32)), epoch, counts)

            return self._replicas.run_and_sum(selected, (data, route, counts))

        return loop_steps(one, first.shape[1])

    def steps(self, samples: tuple[DeviceValue, ...], epoch: Tensor, counts: DeviceValue) -> Tensor:
        """The steps on images, labels and ids [steps, n, ...] on every replica."""
        first = self._replicas.local_tensors(samples[1])[0]
        update = self._update(first.shape[1])

        def one(number: Tensor) -> Tensor:
            def chosen(samples: tuple[Tensor, ...], counts: DeviceValue) -> Tensor:
                return update(tuple(values[number] for values in samples), epoch, counts)

            return self._replicas.run_and_sum(chosen, (samples, counts))

        return loop_steps(one, first.shape[0])

    def _update(self, rows: int) -> Callable[..., Tensor]:
        """One replica's step, compiled by XLA where the plan says so.

        The last batch of an epoch is not: that would take longer than it saves, unless only XLA
        can compute in the layout. With several replicas the exchange stays outside of XLA.
        """
        largest = self._replicas.slices(self._full_batch)[0][1]
        if not self._compiled or (rows < largest - 1 and not self._compile_all_shapes):
            return partial(self._replica_step, self._gradients)
        whole = partial(self._replica_step, self._gradients)
        if self._replicas.count == 1:
            return compile_xla(whole)
        return partial(self._replica_step, compile_xla(self._gradients))

    def _replica_step(
        self, gradients: Any, samples: Samples, epoch: Tensor, counts: Tensor
    ) -> Tensor:
        loss, found = gradients(samples, epoch, counts)
        self._optimizer.apply(found, self.model.trainable_variables)
        return loss

    def _gradients(self, samples: Samples, epoch: Tensor, counts: Tensor) -> Any:
        images, labels, ids = samples
        with tf.GradientTape() as tape:
            outputs = self.model(self._prepare(images, ids, epoch), training=True)
            loss = self._keras_model.loss(outputs, labels) * counts
            scaled = self._optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self.model.trainable_variables)

    def count_correct(self, images: Tensor, labels: Tensor) -> Tensor:
        """How many of the samples are classified right: int32 []."""
        logits = head_logits(self.model(self._keras_model.normalize(images), training=False))[0]
        hit = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), labels)
        return tf.reduce_sum(tf.cast(hit, tf.int32))


def loop_steps(one: Callable[[Tensor], Tensor], steps: int) -> Tensor:
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
