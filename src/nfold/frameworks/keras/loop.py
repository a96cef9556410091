"""Training with Keras on TensorFlow or JAX: the one process of a plan, from opening its devices.

A loop of its own rather than ``fit``: windows are fenced, losses are read after their window,
the first step is apart, and nothing in a window waits for the devices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from nfold.data.arrays import Images, Labels
from nfold.frameworks.base import Observer, Task
from nfold.frameworks.checksum import checksum
from nfold.frameworks.keras.clock import open_clock
from nfold.frameworks.keras.engine import KerasBackend, KerasDefinition, load_definition
from nfold.frameworks.keras.feed import open_input
from nfold.frameworks.keras.opened import open_backend, translate_errors
from nfold.frameworks.length import plan_length
from nfold.frameworks.recording import Recorder
from nfold.measurement import Epoch, RankSamples

EVALUATION_BATCH = 500
"""Test samples in one forward pass."""


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
        """The share of the whole test set that the model classifies right."""
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
