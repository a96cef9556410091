"""Training with Keras: TensorFlow and JAX by a loop of nfold, PyTorch by nfold's PyTorch trainer.

The loop replaces ``fit``: it synchronizes around windows, reads losses after a window, times the
first step separately, and does not wait for the devices within a window.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nfold import workloads
from nfold.core.errors import OutOfMemory, RunFailure
from nfold.core.measurement import Epoch, RankSamples
from nfold.core.plan import Plan
from nfold.engines import rank_process
from nfold.engines.base import Observer, Task
from nfold.engines.keras.backend import KerasBackend, KerasDefinition, load_definition
from nfold.engines.keras.input import open_input
from nfold.engines.recorder import Recorder, checksum, plan_length
from nfold.engines.step_clock import HostClock

EVALUATION_BATCH = 500


def train(task: Task, observer: Observer) -> RankSamples:
    """Run the plan; raises OutOfMemory, Diverged or Unsupported."""
    with translate_errors(task.plan.framework):
        definition = load_definition(task)
        return KerasTrainer(task, definition, open_backend(task, definition)).run(observer)


class KerasTrainer:
    """Trains a model on all of the plan's devices."""

    def __init__(self, task: Task, definition: KerasDefinition, backend: KerasBackend) -> None:
        self.task = task
        self.definition = definition
        self.backend = backend
        self.input = open_input(definition, task, backend)
        self.clock = AsyncStepClock(backend) if backend.is_asynchronous else HostClock()

    def run(self, observer: Observer) -> RankSamples:
        plan, backend = self.task.plan, self.backend
        epochs = plan.epochs or 1
        length = plan_length(plan, epochs * len(self.input))
        recorder = Recorder(
            0, backend.devices.describe(), self.clock, observer, length, backend.read_losses
        )
        for epoch in range(epochs):
            self._epoch(epoch, recorder)
        weights = backend.weights()
        return recorder.samples(
            caveats=(*self.definition.notes, *backend.notes),
            data_bytes=self.input.resident_bytes,
            parameter_checksum=checksum(weight.tobytes() for weight in weights),
            parameter_count=sum(weight.size for weight in weights),
            **backend.devices.memory(),
        )

    def _epoch(self, epoch: int, recorder: Recorder[Any]) -> None:
        self.input.stream.epoch = epoch
        started = time.monotonic()
        recorder.begin_epoch()
        for call in self.input:
            loss = call.run()
            if isinstance(self.clock, AsyncStepClock):
                self.clock.record_loss(loss)
            recorder.record_steps(call.steps, call.batch_size, call.sample_hash, loss)
        loss, count = recorder.end_epoch()
        seconds = time.monotonic() - started
        if self.task.plan.epochs is not None:
            arrays = self.definition.arrays
            n = len(arrays.test_labels)
            slices = (slice(i, i + EVALUATION_BATCH) for i in range(0, n, EVALUATION_BATCH))
            batches = ((arrays.test_images[rows], arrays.test_labels[rows]) for rows in slices)
            report = recorder.report_evaluation
            accuracy = self.backend.count_correct(batches, report) / n if n else None
            recorder.add_epoch(
                Epoch(seconds=seconds, samples=count, train_loss=loss / count, accuracy=accuracy)
            )
            recorder.publish_epoch()


class AsyncStepClock(HostClock):
    """Step times of a back end that queues its steps: a thread waits for the loss of each call."""

    def __init__(self, backend: KerasBackend) -> None:
        super().__init__()
        self._backend = backend
        self._started = 0.0
        self._done_s: list[float] = []
        self._losses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._record_times, daemon=True).start()

    def record_loss(self, loss: Any) -> None:
        """Record the time at which this loss is computed."""
        self._losses.put(loss)

    def _record_times(self) -> None:
        while True:
            loss = self._losses.get()
            if isinstance(loss, threading.Event):
                loss.set()
                continue
            self._backend.wait_for(loss)
            self._done_s.append(time.monotonic())

    def start(self) -> float:
        self._backend.synchronize()
        self._done_s.clear()
        self._started = time.monotonic()
        return self._started

    def mark(self) -> None:
        """Do nothing: the thread records the times."""

    def stop(self) -> tuple[float, list[float]]:
        self._backend.synchronize()
        seconds = time.monotonic() - self._started
        all_recorded = threading.Event()
        self._losses.put(all_recorded)
        all_recorded.wait()
        pairs = itertools.pairwise([self._started, *self._done_s])
        return seconds, [1e3 * (after - before) for before, after in pairs]


KERAS_BACKEND_NAMES = {"tensorflow": "tensorflow", "jax": "jax", "keras-torch": "torch"}

OUT_OF_MEMORY_SIGNS = (
    "RESOURCE_EXHAUSTED",
    "ResourceExhausted",
    "OOM when allocating",
    "Out of memory",
)


def backend_environment(plan: Plan, current: dict[str, str]) -> dict[str, str]:
    """Return the environment variables to set before the import of Keras.

    Only the plan's GPUs are visible, because JAX and TensorFlow reserve memory on all visible GPUs.
    """
    variables = {"KERAS_BACKEND": KERAS_BACKEND_NAMES[plan.framework]}
    if plan.device == "cpu":
        return variables | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    visible = current.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(plan.devices or 1)))
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: plan.devices])
    if plan.allocation == "growth":
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        variables["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    return variables


def open_backend(task: Task, definition: KerasDefinition) -> KerasBackend:
    os.environ.update(backend_environment(task.plan, dict(os.environ)))
    module = importlib.import_module(f"nfold.engines.keras.{task.plan.framework}_backend")
    backend: KerasBackend = module.create_backend(task, definition)
    return backend


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Convert a back end's out-of-memory exceptions to OutOfMemory."""
    try:
        yield
    except RunFailure:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError) or any(sign in text for sign in OUT_OF_MEMORY_SIGNS):
            line = text.strip().split("\n")[0][:200]
            raise OutOfMemory(f"out of memory in {name}: {line}") from error
        raise


# Keras on PyTorch, on one device: layers, initial weights and mixed precision are Keras's; input,
# augmentation, optimizer and timing are those of ``engines/torch``.


def train_on_torch(task: Task, observer: Observer) -> RankSamples:
    os.environ.update(backend_environment(task.plan, dict(os.environ)))
    from nfold.engines.torch import trainer

    return trainer.train(task, observer, torch_definition)


def torch_definition(task: Task) -> Any:
    import keras

    from nfold.engines.keras.model import DTYPE_POLICIES
    from nfold.engines.torch.torch_workload import load_workload

    definition = load_workload(task)
    keras.config.set_dtype_policy(DTYPE_POLICIES.get(str(task.plan.precision), "float32"))
    keras.utils.set_random_seed(task.plan.seed)
    layout, parameters = str(task.plan.layout), workloads.parameters(task.workload)
    network = workloads.network(task.workload.name, "keras")
    model = network.model(parameters, definition.arrays.classes, layout)
    return dataclasses.replace(definition, model=wrap_as_torch_module(model, layout))


def wrap_as_torch_module(model: Any, layout: str) -> Any:
    """Wrap a Keras model as a module that takes images [n, c, h, w].

    Its parameters are only the trainable weights; Keras's include batch norm statistics.
    """
    import torch

    from nfold.workloads.keras_networks import head_logits

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            trained = [variable.value for variable in model.trainable_variables]
            self.trained = torch.nn.ParameterList(trained)

        def forward(self, images: torch.Tensor) -> Any:
            inputs = images.permute(0, 2, 3, 1) if layout == "channels_last" else images
            logits = head_logits(model(inputs, training=self.training))
            return tuple(logits) if self.training and len(logits) > 1 else logits[0]

    return Wrapped()


def run_operation(task: Task, observer: Observer) -> RankSamples:
    """Run an operation without Keras; raises OutOfMemory, Mismatch or Unsupported."""
    os.environ.update(backend_environment(task.plan, dict(os.environ)))
    library = task.plan.framework
    with translate_errors(library):
        module = importlib.import_module(f"nfold.engines.keras.{library}_devices")
        devices = module.open_devices(task.plan)
        return rank_process.run_operation(
            task, observer, library, devices.devices, devices.describe, memory=devices.memory
        )
