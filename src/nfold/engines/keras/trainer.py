"""Training with Keras on TensorFlow or JAX: the one process of a plan, from opening its devices.

A loop of its own rather than ``fit``: windows are fenced, losses are read after their window,
the first step is apart, and nothing in a window waits for the devices.
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
from nfold.data.arrays import Images, Labels
from nfold.engines.base import Observer, Phase, Task
from nfold.engines.keras.backend import KerasBackend, KerasDefinition, load_definition
from nfold.engines.keras.input import open_input
from nfold.engines.recorder import Recorder, checksum, plan_length
from nfold.engines.step_clock import HostClock

EVALUATION_BATCH = 500  # test samples in one forward pass


def train(task: Task, observer: Observer) -> RankSamples:
    """Run the plan to its end; raises OutOfMemory, Diverged or Unsupported."""
    with translate_errors(task.plan.framework):
        made = load_definition(task)
        return KerasTrainer(task, made, open_backend(task, made)).run(observer)


class KerasTrainer:
    """A model, its data and its step on all of the plan's devices."""

    def __init__(self, task: Task, definition: KerasDefinition, backend: KerasBackend) -> None:
        self.task = task
        self.definition = definition
        self.backend = backend
        self.input = open_input(definition, task, backend)
        self.clock = open_clock(backend)

    def run(self, observer: Observer) -> RankSamples:
        """All steps of the plan, observed."""
        plan = self.task.plan
        epochs = plan.epochs or 1
        length = plan_length(plan, epochs * len(self.input))
        engine = self.backend
        recorder = Recorder(0, engine.describe(), self.clock, observer, length, engine.read_losses)
        for epoch in range(epochs):
            self._epoch(epoch, recorder)
        weights = engine.weights()
        return engine.add_notes(
            recorder.samples(
                caveats=self.definition.notes,
                data_bytes=self.input.resident_bytes,
                parameter_checksum=checksum(weight.tobytes() for weight in weights),
                parameter_count=sum(weight.size for weight in weights),
                **engine.memory(),
            )
        )

    def _epoch(self, epoch: int, recorder: Recorder[Any]) -> None:
        self.input.stream.epoch = epoch
        started = time.monotonic()
        recorder.begin_epoch()
        for call in self.input:
            loss = call.run()
            self.clock.record_loss(loss)
            recorder.record_steps(call.steps, call.batch_size, call.sample_hash, loss)
        loss, count = recorder.end_epoch()
        seconds = time.monotonic() - started
        if self.task.plan.epochs is not None:
            accuracy = self._accuracy(recorder)
            recorder.add_epoch(
                Epoch(seconds=seconds, samples=count, train_loss=loss / count, accuracy=accuracy)
            )
            recorder.publish_epoch()

    def _accuracy(self, recorder: Recorder[Any]) -> float | None:
        n = len(self.definition.arrays.test_labels)
        return (
            self.backend.count_correct(self._test_batches(n), recorder.report_evaluation) / n
            if n
            else None
        )

    def _test_batches(self, n: int) -> Iterator[tuple[Images, Labels]]:
        arrays = self.definition.arrays
        for start in range(0, n, EVALUATION_BATCH):
            chosen = slice(start, start + EVALUATION_BATCH)
            yield arrays.test_images[chosen], arrays.test_labels[chosen]


# Step times of a back end that queues its steps: a thread notes when each of them is done.
#
# The thread waits for a step's loss, which is all that it touches; the thread that queues steps
# never waits inside a window.


class AsyncStepClock(HostClock):
    """``watch`` each call's loss; the window's marks are the times at which they were there."""

    def __init__(self, engine: KerasBackend) -> None:
        super().__init__()
        self._backend = engine
        self._started = 0.0
        self._done_s: list[float] = []
        self._losses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._record_times, daemon=True).start()

    def record_loss(self, loss: Any) -> None:
        """Note when this loss is there."""
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
        """The thread does it."""

    def stop(self) -> tuple[float, list[float]]:
        self._backend.synchronize()
        seconds = time.monotonic() - self._started
        everything = threading.Event()
        self._losses.put(everything)
        everything.wait()
        pairs = itertools.pairwise([self._started, *self._done_s])
        return seconds, [1e3 * (after - before) for before, after in pairs]


class SyncStepClock(HostClock):
    """For a back end whose calls return when they are done."""

    def record_loss(self, _loss: Any) -> None:
        """The call is done."""


def open_clock(engine: KerasBackend) -> AsyncStepClock | SyncStepClock:
    """The clock that suits the back end."""
    return AsyncStepClock(engine) if engine.is_asynchronous else SyncStepClock()


# What Keras calls the back end of a framework
KERAS_BACKEND_NAMES: dict[str, str] = {
    "tensorflow": "tensorflow",
    "jax": "jax",
    "keras-torch": "torch",
}

OUT_OF_MEMORY_SIGNS = (
    "RESOURCE_EXHAUSTED",
    "ResourceExhausted",
    "OOM when allocating",
    "Out of memory",
)


def backend_environment(plan: Plan, current: dict[str, str]) -> dict[str, str]:
    """What a rank sets before it imports anything of Keras.

    JAX and TensorFlow take the memory of every GPU that they see, so they see the plan's only.
    """
    found = {"KERAS_BACKEND": KERAS_BACKEND_NAMES[plan.framework]}
    if plan.device == "cpu":
        return found | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    seen = current.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(plan.devices or 1)))
    found["CUDA_VISIBLE_DEVICES"] = ",".join(seen.split(",")[: plan.devices])
    if plan.allocation == "growth":
        found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        found["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    return found


def open_backend(task: Task, definition: KerasDefinition) -> KerasBackend:
    """The back end of the task's framework, with its model on its devices."""
    os.environ.update(backend_environment(task.plan, dict(os.environ)))
    module = importlib.import_module(f"nfold.engines.keras.{task.plan.framework}_backend")
    engine: KerasBackend = module.create_backend(task, definition)
    return engine


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Raise OutOfMemory for what a back end raises in its stead; pass the rest."""
    try:
        yield
    except RunFailure:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError) or any(sign in text for sign in OUT_OF_MEMORY_SIGNS):
            first = text.strip().split("\n")[0][:200]
            raise OutOfMemory(f"out of memory in {name}: {first}") from error
        raise


# Keras on PyTorch: a Keras model is a PyTorch module, trained by PyTorch's own loop.
#
# The layers, their first weights and their mixed precision are Keras's; input, augmentation,
# optimizer and timing are those of ``frameworks/torch``, on one device.


def train_on_torch(task: Task, observer: Observer) -> RankSamples:
    """Choose the back end, then run PyTorch's loop on Keras's model."""
    os.environ.update(backend_environment(task.plan, dict(os.environ)))
    from nfold.engines.torch import trainer

    return trainer.train(task, observer, torch_definition)


def torch_definition(task: Task) -> Any:
    """PyTorch's definition of the workload, with the model that Keras builds."""
    import keras

    from nfold import workloads
    from nfold.engines.keras.model import DTYPE_POLICIES
    from nfold.engines.torch.torch_workload import load_workload

    made = load_workload(task)
    keras.config.set_dtype_policy(DTYPE_POLICIES.get(str(task.plan.precision), "float32"))
    keras.utils.set_random_seed(task.plan.seed)
    module = workloads.network(task.workload.name, "keras")
    layout, chosen = str(task.plan.layout), workloads.parameters(task.workload)
    model = module.model(chosen, made.arrays.classes, layout)
    return dataclasses.replace(made, model=wrap_as_torch_module(model, layout))


def wrap_as_torch_module(model: Any, layout: str) -> Any:
    """A module that takes images [n, c, h, w] in the layout's memory, as PyTorch's loop has them.

    Its parameters are the trained weights alone: Keras counts its statistics among them.
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
    """Run an operation to its end; raises OutOfMemory, Mismatch or Unsupported.

    It is written in the framework itself: of Keras nothing is imported.
    """
    plan = task.plan
    os.environ.update(backend_environment(plan, dict(os.environ)))

    def beat(done: int, planned: int) -> None:
        observer.beat(Phase.STEPPING if done else Phase.FIRST_STEP, done, planned)

    with translate_errors(plan.framework):
        devices = _open_devices(plan)
        name = f"nfold.workloads.{task.workload.name}.{plan.framework}"
        definition = importlib.import_module(name)
        result = definition.run_parts(
            definition.Task(
                parameters=workloads.parameters(task.workload),
                plan=plan,
                rank=0,
                world_size=1,
                devices=devices.devices,
                barrier=_no_barrier,
                beat=beat,
            ),
            lambda: devices.memory()["peak_memory_bytes"],
        )
    return RankSamples(
        rank=0,
        device=devices.describe(),
        first_step_ms=result.first_step_ms,
        warmup_steps=plan.warmup_steps or 0,
        windows=result.windows,
        parts=result.parts,
        peak_memory_bytes=result.peak_memory_bytes,
        reserved_memory_bytes=devices.memory()["reserved_memory_bytes"],
    )


def _no_barrier() -> None:
    """No other rank to wait for."""


def _open_devices(plan: Plan) -> Any:
    if plan.framework == "jax":
        from nfold.engines.keras.jax_devices import open_jax_devices

        return open_jax_devices(plan)
    from nfold.engines.keras.tensorflow_devices import open_replicas

    return open_replicas(plan)
