"""Keras on TensorFlow: a step per replica under ``tf.distribute.MirroredStrategy``.

One device uses TensorFlow's default strategy. Batches are split as for PyTorch's ranks: replicas
differ by at most one sample and are weighted by their samples, so that the update is that of the
whole batch.
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
from nfold.engines.keras.tensorflow_devices import Tensor, TensorFlowReplicas, open_devices
from nfold.engines.sampling import SampleIds
from nfold.workloads.keras_networks import head_logits

Samples = tuple[Tensor, Tensor, Tensor]  # images, labels and ids of one replica's part of a step


def create_backend(task: Task, definition: KerasDefinition) -> KerasBackend:
    """Create the back end on the plan's devices; raises Unsupported if TensorFlow lacks them."""
    return TensorFlowBackend(task, definition, open_devices(task.plan))


class TensorFlowBackend(KerasBackend):
    """One model, mirrored on every replica, and its training step."""

    notes = ()

    def __init__(
        self, task: Task, definition: KerasDefinition, replicas: TensorFlowReplicas
    ) -> None:
        self._replicas = replicas
        self.is_asynchronous = task.plan.device == "cuda"
        self._step_kind = str(task.plan.step)
        with replicas.strategy.scope():
            self._model_step = TensorFlowStep(task, definition, replicas)
        self._resident_steps = self._graph(self._model_step.resident_steps)
        self._steps = self._graph(self._model_step.steps)
        self._count_correct = self._graph(
            self._model_step.count_correct, jit_compile=self._step_kind == "compiled"
        )
        self._data: tuple[DeviceValue, ...] = ()

    def _graph(self, function: Callable[..., Tensor], **options: bool) -> Any:
        if self._step_kind == "eager":
            return function
        return tf.function(function, autograph=False, **options)

    @property
    def devices(self) -> TensorFlowReplicas:
        return self._replicas

    def store_training_set(self, images: Images, labels: Labels) -> None:
        whole = (np.asarray(images), labels.astype(np.int32))
        self._data = tuple(self._replicas.replicate(values) for values in whole)

    def put(self, samples: CallGroup | HostBatch) -> DeviceValue:
        if isinstance(samples, CallGroup):
            cuts = self._replicas.slices(samples.batch_size)
            values = self._replicas.split(samples.ids, cuts, axis=2)
        else:
            cuts = self._replicas.slices(samples.ids.shape[1])
            arrays = (samples.images, samples.labels, samples.ids)
            values = tuple(self._replicas.split(value, cuts, axis=1) for value in arrays)
        return values, self._replicas.loss_weights(cuts)

    def _program(self, placed: DeviceValue, call: int, epoch: int) -> tuple[Any, tuple[Any, ...]]:
        values, weights = placed
        now = tf.constant(epoch, tf.uint32)
        if isinstance(values, tuple):
            return self._steps, (values, now, weights)
        return self._resident_steps, (self._data, values, tf.constant(call), now, weights)

    def compile(self, placed: DeviceValue) -> None:
        if self._step_kind != "eager":
            program, inputs = self._program(placed, 0, 0)
            program.get_concrete_function(*inputs)

    def run(self, placed: DeviceValue, call: int, epoch: int) -> Loss:
        program, inputs = self._program(placed, call, epoch)
        return program(*inputs)

    def synchronize(self) -> None:
        tf.test.experimental.sync_devices()

    def wait_for(self, loss: Loss) -> None:
        loss.numpy()

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
        return [np.asarray(v) for v in self._model_step.model.trainable_variables]

    def tf_dataset(
        self, groups: Sequence[CallGroup], gather: Callable[[SampleIds], HostBatch]
    ) -> Iterator[DeviceValue]:
        """Load the batches of ``groups`` by a ``tf.data.Dataset`` that calls ``gather``."""
        dtypes = (tf.uint8, tf.int32, tf.uint32)

        def gather_tensors(ids: Tensor) -> tuple[Tensor, ...]:
            host = gather(ids)
            return host.images, host.labels, host.ids

        for group in groups:
            dataset = tf.data.Dataset.from_tensor_slices(group.ids)
            dataset = dataset.map(lambda ids: tf.numpy_function(gather_tensors, [ids], dtypes))
            for images, labels, ids in dataset.prefetch(1).as_numpy_iterator():
                yield self.put(HostBatch(images=images, labels=labels, ids=ids))


def compile_xla(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = tf.function(function, jit_compile=True, autograph=False)
    return compiled


class TensorFlowStep:
    """The functions of a step; create it in the strategy's scope."""

    def __init__(
        self, task: Task, definition: KerasDefinition, replicas: TensorFlowReplicas
    ) -> None:
        self._replicas = replicas
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
        ids: DeviceValue,
        call: Tensor,
        epoch: Tensor,
        weights: DeviceValue,
    ) -> Tensor:
        """Make the steps of call number ``call`` of ids [calls, steps, n] on every replica."""
        first = self._replicas.local_tensors(ids)[0]
        update = self._update(first.shape[2])

        def step(number: Tensor) -> Tensor:
            def select_and_update(data: Any, ids: Tensor, weights: DeviceValue) -> Tensor:
                ids = ids[call, number]
                samples = (tf.gather(data[0], ids), tf.gather(data[1], ids))
                return update((*samples, tf.cast(ids, tf.uint32)), epoch, weights)

            return self._replicas.run_and_sum(select_and_update, (data, ids, weights))

        return loop_steps(step, first.shape[1])

    def steps(
        self, samples: tuple[DeviceValue, ...], epoch: Tensor, weights: DeviceValue
    ) -> Tensor:
        first = self._replicas.local_tensors(samples[1])[0]
        update = self._update(first.shape[1])

        def step(number: Tensor) -> Tensor:
            def select_and_update(samples: tuple[Tensor, ...], weights: DeviceValue) -> Tensor:
                return update(tuple(values[number] for values in samples), epoch, weights)

            return self._replicas.run_and_sum(select_and_update, (samples, weights))

        return loop_steps(step, first.shape[0])

    def _update(self, samples: int) -> Callable[..., Tensor]:
        # Compiling an epoch's partial last batch takes longer than it saves, unless only XLA
        # supports the layout.
        full = self._replicas.slices(self._full_batch)[0][1]
        update = partial(self._replica_step, self._gradients)
        if not self._compiled or (samples < full - 1 and not self._compile_all_shapes):
            return update
        if self._replicas.count == 1:
            return compile_xla(update)
        # The gradient exchange between replicas is not compiled.
        return partial(self._replica_step, compile_xla(self._gradients))

    def _replica_step(
        self, gradients: Any, samples: Samples, epoch: Tensor, weights: Tensor
    ) -> Tensor:
        loss, values = gradients(samples, epoch, weights)
        self._optimizer.apply(values, self.model.trainable_variables)
        return loss

    def _gradients(self, samples: Samples, epoch: Tensor, weights: Tensor) -> Any:
        images, labels, ids = samples
        with tf.GradientTape() as tape:
            outputs = self.model(self._prepare(images, ids, epoch), training=True)
            loss = self._keras_model.loss(outputs, labels) * weights
            scaled = self._optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self.model.trainable_variables)

    def count_correct(self, images: Tensor, labels: Tensor) -> Tensor:
        logits = head_logits(self.model(self._keras_model.normalize(images), training=False))[0]
        hit = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), labels)
        return tf.reduce_sum(tf.cast(hit, tf.int32))


def loop_steps(step: Callable[[Tensor], Tensor], steps: int) -> Tensor:
    """Run the steps in a loop of the graph; returns the losses [steps]."""
    if steps == 1:
        return step(tf.constant(0))[None]
    losses = tf.TensorArray(tf.float32, steps)
    _, losses = tf.while_loop(
        lambda number, _: number < steps,
        lambda number, losses: (number + 1, losses.write(number, step(number))),
        (tf.constant(0), losses),
        parallel_iterations=1,
    )
    return losses.stack()
