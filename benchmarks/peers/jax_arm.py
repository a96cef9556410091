"""JAX on one device: resident bytes, bf16, many steps in one jitted scan with donated state.

One draw of a crop is a whole batch's, each sample is flipped on its own. A call is ``scan`` steps
(a field, 50 by default), so that turns are multiples of it. Peak memory is what was in use, not,
as in the PyTorch arms, what the allocator had reserved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

import jax
import jax.numpy as jnp
import numpy as np
from jax_models import COMPUTE, Array, Layers, forward_of, made
from job import Job, run
from turns import Turns

from nfold.data.arrays import DataSetArrays

RATE = {"cnn10": 0.05, "wide_resnet": 0.1, "mnist": 0.02}
DECAY = {"cnn10": 5e-4, "wide_resnet": 5e-4, "mnist": 0.0}
MOMENTUM = 0.9
State = tuple[list[Array], list[Array], list[Array], Array]
"""Parameters, their momenta, running statistics, and the key of the next draws."""


class Program:
    """The jitted steps of a workload."""

    def __init__(self, job: Job, arrays: DataSetArrays) -> None:
        self._job = job
        self._name = job.workload.name
        self._classes = arrays.classes
        self._shape = arrays.train_images.shape[1:]
        self._operations = dict(job.info.augmentation)
        self._mean = np.float32(arrays.mean)
        self._inverse_std = 1 / np.float32(arrays.std)
        self.run = jax.jit(self._steps, donate_argnums=0)

    def placed(self, arrays: DataSetArrays) -> tuple[Array, Array]:
        """The images, their borders padded, and the labels on the device."""
        by = self._operations.get("crop", 0)
        padded = np.pad(arrays.train_images, ((0, 0), (by, by), (by, by), (0, 0)))
        return jax.device_put(padded), jax.device_put(arrays.train_labels.astype(np.int32))

    def first(self) -> State:
        """The state before the first step."""
        key = jax.random.PRNGKey(0)
        parameters, statistics = made(self._forward(key), self._shape)
        return parameters, [jnp.zeros_like(p) for p in parameters], statistics, key

    def _forward(self, key: Array) -> Any:
        return forward_of(self._name, self._job.parameters, self._classes, key)

    def _steps(self, state: State, data: tuple[Array, Array], ids: Array) -> tuple[State, Array]:
        """As many steps as ``ids`` [steps, n] has rows; the losses [steps]."""
        return jax.lax.scan(partial(self._step, data), state, ids)

    def _step(self, data: tuple[Array, Array], state: State, ids: Array) -> tuple[State, Array]:
        parameters, momenta, statistics, key = state
        key, crop, flip, dropout = jax.random.split(key, 4)
        images = self._augmented(data[0][ids], crop, flip)

        def loss_of(parameters: list[Array]) -> tuple[Array, list[Array]]:
            layers = Layers(parameters, statistics, None)
            logits = self._forward(dropout)(layers, images).astype(jnp.float32)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), data[1][ids][:, None], 1)
            return -chosen.mean(), layers.updated

        (loss, updated), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        parameters, momenta = self._updated(parameters, momenta, gradients)
        return (parameters, momenta, updated, key), loss

    def _augmented(self, padded: Array, crop: Array, flip: Array) -> Array:
        images = padded
        if "crop" in self._operations:
            down, right = jax.random.randint(crop, (2,), 0, 2 * self._operations["crop"] + 1)
            size = (len(padded), *self._shape)
            images = jax.lax.dynamic_slice(padded, (0, down, right, 0), size)
        if "flip" in self._operations:
            mirrored = jax.random.bernoulli(flip, 0.5, (len(padded), 1, 1, 1))
            images = jnp.where(mirrored, images[:, :, ::-1], images)
        return ((images.astype(jnp.float32) - self._mean) * self._inverse_std).astype(COMPUTE)

    def _updated(
        self, parameters: list[Array], momenta: list[Array], gradients: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Nesterov's momentum with weight decay."""
        rate, decay = RATE[self._name], DECAY[self._name]
        pairs = list(zip(parameters, gradients, strict=True))
        full = [g + decay * p for p, g in pairs]
        momenta = [MOMENTUM * v + g for v, g in zip(momenta, full, strict=True)]
        moves = [g + MOMENTUM * v for g, v in zip(full, momenta, strict=True)]
        return [p - rate * m for p, m in zip(parameters, moves, strict=True)], momenta


def orders(samples: int, batch: int) -> Iterator[Any]:
    """The samples int32 [batch] of one step after the other; last ones are left out."""
    draw = np.random.default_rng(0)
    while True:
        order = draw.permutation(samples).astype(np.int32)
        yield from order[: samples // batch * batch].reshape(-1, batch)


def main(job: Job) -> None:
    scan = job.numbers(scan=50)["scan"]
    arrays = job.arrays()
    program = Program(job, arrays)
    data, state = program.placed(arrays), program.first()
    losses = jnp.zeros(1)
    turns = Turns(
        job.channel,
        job.batch,
        fence=lambda: losses.block_until_ready(),
        peak_memory_bytes=peak_memory_bytes,
        warmup=max(job.warmup, 2 * scan),
    )
    steps = orders(len(arrays.train_labels), job.batch)
    while True:
        state, losses = program.run(state, data, np.stack([next(steps) for _ in range(scan)]))
        turns.step(Last(losses), scan)


class Last:
    """The last of a call's losses, read when it is asked for: indexing would be a kernel."""

    def __init__(self, losses: Array) -> None:
        self._losses = losses

    def __float__(self) -> float:
        return float(np.asarray(self._losses)[-1])


def peak_memory_bytes() -> int:
    """The most that was in use on the device; 0 where JAX does not know."""
    return int((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


if __name__ == "__main__":
    run(main)
