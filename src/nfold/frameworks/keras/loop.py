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
from nfold.frameworks.keras.clock import clock
from nfold.frameworks.keras.engine import Definition, Engine, definition
from nfold.frameworks.keras.feed import feed
from nfold.frameworks.keras.opened import opened, translated
from nfold.frameworks.length import steps_of
from nfold.frameworks.recording import Recorder
from nfold.measurement import Epoch, RankSamples

AT_ONCE = 500
"""Test samples in one forward pass."""


def train(task: Task, observer: Observer) -> RankSamples:
    """Run the plan to its end; raises OutOfMemory, Diverged or Unsupported."""
    with translated(task.plan.framework):
        made = definition(task)
        return Trainer(task, made, opened(task, made)).run(observer)


class Trainer:
    """A model, its data and its step on all of the plan's devices."""

    def __init__(self, task: Task, made: Definition, engine: Engine) -> None:
        self.task = task
        self.made = made
        self.engine = engine
        self.feed = feed(made, task, engine)
        self.clock = clock(engine)

    def run(self, observer: Observer) -> RankSamples:
        """All steps of the plan, observed."""
        plan = self.task.plan
        epochs = plan.epochs or 1
        length = steps_of(plan, epochs * len(self.feed))
        engine = self.engine
        recorder = Recorder(0, engine.describe(), self.clock, observer, length, engine.read)
        for epoch in range(epochs):
            self._epoch(epoch, recorder)
        weights = engine.parameters()
        return engine.finished(
            recorder.samples(
                notes=self.made.notes,
                data_bytes=self.feed.data_bytes,
                parameter_checksum=checksum(weight.tobytes() for weight in weights),
                parameter_count=sum(weight.size for weight in weights),
                **engine.memory(),
            )
        )

    def _epoch(self, epoch: int, recorder: Recorder[Any]) -> None:
        self.feed.stream.epoch = epoch
        started = time.monotonic()
        recorder.begin()
        for call in self.feed:
            loss = call.run()
            self.clock.watch(loss)
            recorder.made(call.steps, call.count, call.sample_hash, loss)
        loss, count = recorder.end()
        seconds = time.monotonic() - started
        if self.task.plan.epochs is not None:
            accuracy = self._accuracy(recorder)
            recorder.epoch(
                Epoch(seconds=seconds, samples=count, train_loss=loss / count, accuracy=accuracy)
            )
            recorder.tell()

    def _accuracy(self, recorder: Recorder[Any]) -> float | None:
        """The share of the whole test set that the model classifies right."""
        n = len(self.made.arrays.test_labels)
        return self.engine.right(self._chunks(n), recorder.evaluating) / n if n else None

    def _chunks(self, n: int) -> Iterator[tuple[Images, Labels]]:
        arrays = self.made.arrays
        for start in range(0, n, AT_ONCE):
            chosen = slice(start, start + AT_ONCE)
            yield arrays.test_images[chosen], arrays.test_labels[chosen]
