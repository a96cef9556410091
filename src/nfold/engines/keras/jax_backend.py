"""Keras on JAX: a call is one jitted program over all devices, with donated state.

The program selects from resident data, augments and makes the training step. Under
``keras.distribution.DataParallel`` weights are replicated and a batch is split; XLA inserts the
gradient exchange and computes batch norm over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras
import numpy as np
import numpy.typing as npt
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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
from nfold.engines.keras.jax_devices import JaxDevices, open_devices
from nfold.engines.keras.model import KerasModel, build_model
from nfold.engines.keras.preprocessing import build_preparation
from nfold.workloads.keras_networks import head_logits

Array = Any
# Trainable variables, others (statistics, seeds), the optimizer's
State = tuple[list[Array], list[Array], list[Array]]
Samples = tuple[Array, Array, Array]  # images, labels and ids of one step


def create_backend(task: Task, definition: KerasDefinition) -> KerasBackend:
    """Create the back end on the plan's devices; raises Unsupported if JAX does not see them."""
    opened = open_devices(task.plan)
    names = [f"{device.platform}:{device.id}" for device in opened.devices]
    distribution = keras.distribution.DataParallel(devices=names)
    keras.distribution.set_distribution(distribution)
    return JaxBackend(task, definition, opened, distribution.device_mesh.backend_mesh)


class JaxBackend(KerasBackend):
    """The jitted programs of one model, and their state."""

    is_asynchronous = True

    def __init__(
        self, task: Task, definition: KerasDefinition, opened: JaxDevices, mesh: Any
    ) -> None:
        self._devices = opened
        self._mesh = mesh
        self._replicated = NamedSharding(mesh, P())
        self._keras_model = build_model(task, definition)
        self._step = JaxStep(
            self._keras_model, build_preparation(definition.arrays, task, definition.augmentations)
        )
        self._state: State = jax.device_put(self._keras_model.initial_state(), self._replicated)
        self._data: tuple[Array, ...] = ()
        self._programs: dict[tuple[int, ...], Any] = {}
        self._count_correct = jax.jit(self._step.count_correct)
        self._plan = task.plan

    def _split(self, samples: int, axis: int) -> NamedSharding:
        if samples % self._mesh.devices.size:
            return self._replicated
        return NamedSharding(self._mesh, P(*[None] * axis, *self._mesh.axis_names))

    def store_training_set(self, images: Images, labels: Labels) -> None:
        whole = (np.asarray(images), labels.astype(np.int32))
        self._data = jax.device_put(whole, self._replicated)

    def put(self, samples: CallGroup | HostBatch) -> DeviceValue:
        if isinstance(samples, CallGroup):
            return jax.device_put(samples.ids.astype(np.uint32), self._split(samples.batch_size, 2))
        values = (samples.images, samples.labels, samples.ids)
        return jax.device_put(values, self._split(samples.ids.shape[1], 1))

    def compile(self, placed: DeviceValue) -> None:
        shape = _program_key(placed)
        if shape not in self._programs:
            steps = self._step.steps if isinstance(placed, tuple) else self._step.resident_steps
            jitted = jax.jit(steps, donate_argnums=0, out_shardings=self._replicated)
            inputs = self._inputs(placed, 0, 0)
            self._programs[shape] = jitted.lower(self._state, *inputs).compile()

    def _inputs(self, placed: DeviceValue, call: int, epoch: int) -> tuple[Any, ...]:
        if isinstance(placed, tuple):
            return placed, np.uint32(epoch)
        return self._data, placed, np.int32(call), np.uint32(epoch)

    def run(self, placed: DeviceValue, call: int, epoch: int) -> Loss:
        program = self._programs[_program_key(placed)]
        self._state, losses = program(self._state, *self._inputs(placed, call, epoch))
        return losses

    def synchronize(self) -> None:
        jax.block_until_ready(self._state)

    def wait_for(self, loss: Loss) -> None:
        loss.block_until_ready()

    def read_losses(self, losses: Sequence[Loss]) -> list[float]:
        found: list[float] = np.concatenate(jax.device_get(list(losses))).tolist()
        return found

    def count_correct(
        self, chunks: Iterable[tuple[Images, Labels]], beat: Callable[[], None]
    ) -> int:
        counts = []
        for images, labels in chunks:
            place = self._split(len(labels), 0)
            inputs = jax.device_put((np.asarray(images), labels.astype(np.int32)), place)
            counts.append(self._count_correct(self._state, *inputs))
            beat()
        return sum(int(count) for count in jax.device_get(counts))

    def weights(self) -> list[npt.NDArray[Any]]:
        return [np.asarray(value) for value in jax.device_get(self._state[0])]

    @property
    def devices(self) -> JaxDevices:
        return self._devices

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        layers = self._keras_model.model.layers
        norms = [type(one).__name__ == "BatchNormalization" for one in layers]
        if not any(norms) or self._mesh.devices.size == 1 or self._plan.batch_norm != "device":
            return ()
        text = "batch norm on JAX is over the samples of all devices, as --batch-norm synchronised"
        return (("batch_norm", text),)


def _program_key(placed: DeviceValue) -> tuple[int, ...]:
    shape: tuple[int, ...] = (placed[0] if isinstance(placed, tuple) else placed).shape
    return shape


class JaxStep:
    def __init__(self, model: KerasModel, prepare: Callable[[Array, Array, Array], Array]) -> None:
        self._model = model
        self._prepare = prepare

    def resident_steps(
        self, state: State, data: tuple[Array, Array], ids: Array, call: Array, epoch: Array
    ) -> tuple[State, Array]:
        """Make the steps of call number ``call`` of ids [calls, steps, n]."""
        images, labels = data
        call_ids = lax.dynamic_index_in_dim(ids, call, keepdims=False)

        def step(state: State, ids: Array) -> tuple[State, Array]:
            return self._step(state, (images[ids], labels[ids], ids), epoch)

        return scan_steps(step, state, call_ids)

    def steps(self, state: State, samples: Samples, epoch: Array) -> tuple[State, Array]:
        return scan_steps(lambda state, step: self._step(state, step, epoch), state, samples)

    def _step(self, state: State, samples: Samples, epoch: Array) -> tuple[State, Array]:
        trained, others, optimizer = state
        images, labels, ids = samples
        inputs = self._prepare(images, ids, epoch)

        def loss_of(trained: list[Array]) -> tuple[Array, tuple[Array, list[Array]]]:
            model = self._model.model
            outputs, changed = model.stateless_call(trained, others, inputs, training=True)
            loss = self._model.loss(outputs, labels)
            return self._model.scale_loss(loss, optimizer), (loss, changed)

        gradients, (loss, changed) = jax.grad(loss_of, has_aux=True)(trained)
        update = self._model.optimizer.stateless_apply
        trained, optimizer = update(optimizer, gradients, trained)
        return (trained, changed, optimizer), loss

    def count_correct(self, state: State, images: Array, labels: Array) -> Array:
        inputs = self._model.normalize(images)
        outputs, _ = self._model.model.stateless_call(state[0], state[1], inputs, training=False)
        return (jnp.argmax(head_logits(outputs)[0], axis=1) == labels).sum()


def scan_steps(
    step: Callable[[State, Any], tuple[State, Array]], state: State, inputs: Any
) -> tuple[State, Array]:
    """Scan over the steps of a call; returns the state and the losses float32 [steps].

    Unrolls the loop on CPUs, where convolutions in a loop are slow (docs/decisions/keras.md).
    """
    steps = len(jax.tree.leaves(inputs)[0])
    if steps > 1:
        unroll = steps if jax.default_backend() == "cpu" else 1
        state, losses = lax.scan(step, state, inputs, unroll=unroll)
        return state, losses
    state, loss = step(state, jax.tree.map(lambda values: values[0], inputs))
    return state, loss[None]
