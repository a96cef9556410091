"""Which lines a script is at while it makes no step, by looking at its thread."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, model, script_task
from nfold.core.measurement import STARTS_WORKERS, HostGapKind, HostGapLocation
from nfold.instrument.profilers import (
    COLLECTIVE_MODULE,
    SAMPLER_THREAD_NAME,
    StackSampler,
    sampled_line,
)
from repeated import repeated

HERE = Path(__file__).name
TRIES = 2000


def line_of(function: Callable[..., Any], text: str) -> str:
    """``file.py:42`` of the only line of the function that has this text."""
    lines, first = inspect.getsourcelines(function)
    (place,) = [number for number, line in enumerate(lines) if text in line]
    return f"{HERE}:{first + place}"


def longest(found: tuple[HostGapLocation, ...], when: HostGapKind) -> tuple[str, str | None]:
    """File, line and what is called there."""
    spot = next((spot for spot in found if spot.kind == when), None)
    assert spot is not None
    return spot.location.rpartition("/")[2], spot.callee


def evaluate() -> None:
    """Something that takes a while."""
    time.sleep(0.05)


def train_with_pauses() -> None:
    """16 steps a pass; a log after each, something longer after every eighth, and between two."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(dataset(128), batch_size=8)
    for _ in range(100):
        for step, (images, _) in enumerate(loader):
            module(images).sum().backward()
            optimizer.step()
            time.sleep(0.01)  # A log.
            if step % 8 == 4:
                time.sleep(0.1)  # A checkpoint.
        evaluate()  # Between passes.


@repeated
def test_host_gaps_have_their_lines() -> None:
    """Each of three kinds is long enough to be seen in any of its 40 to 3 turns."""
    found = instrumented(train_with_pauses, script_task(steps=36)).samples
    assert found is not None
    of = train_with_pauses
    assert longest(found.host_gap_locations, "after a step") == (line_of(of, "# A log"), None)
    assert longest(found.host_gap_locations, "after some steps") == (
        line_of(of, "# A checkpoint"),
        None,
    )
    between = longest(found.host_gap_locations, "between passes")
    assert between == (line_of(of, "# Between passes"), "evaluate()")


@repeated
def test_evaluation_between_steps_has_its_line() -> None:
    """A batch for the training is there already: that was the end of the usual pause."""
    other = DataLoader(dataset(40), batch_size=8)

    def looked_through() -> None:
        with torch.no_grad():
            for _ in other:
                time.sleep(0.004)

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for images, _ in DataLoader(dataset(800), batch_size=8):
            looked_through()  # Before a step.
            module(images).sum().backward()
            optimizer.step()

    found = instrumented(training, script_task()).samples
    assert found is not None
    place = line_of(training, "# Before a step"), "looked_through()"
    assert place in {
        longest(found.host_gap_locations, spot.kind) for spot in found.host_gap_locations
    }


@repeated
def test_training_without_gaps_has_short_gaps() -> None:
    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for images, _ in DataLoader(dataset(800), batch_size=8):
            module(images).sum().backward()
            time.sleep(0.01)
            optimizer.step()

    found = instrumented(training, script_task(steps=40)).samples
    assert found is not None
    gaps_s = sum(spot.seconds for spot in found.host_gap_locations)
    assert gaps_s < sum(window.seconds for window in found.windows) / 2


def test_sampler_stops() -> None:
    looking = StackSampler(lambda: False)
    looking.start()
    for _ in range(TRIES):
        looking.begin_gap()
        evaluate()
        looking.end_gap(at_epoch_boundary=True)
        if looking.sampled_lines:
            break
    (spot,) = looking.sampled_lines
    assert spot.callee == "evaluate()"
    looking.begin_gap()
    looking.stop()
    looking.end_gap(at_epoch_boundary=True)
    looking.begin_gap()
    looking.end_gap(at_epoch_boundary=False)
    assert looking.sampled_lines == (spot,)
    for thread in threading.enumerate():
        if thread.name == SAMPLER_THREAD_NAME:
            thread.join(timeout=60)
            assert not thread.is_alive()


def look(frame: FrameType, *loop: Callable[..., Any]) -> tuple[str, str | None] | None:
    """The line without its folder, and what it calls."""
    found = sampled_line(frame, {id(of.__code__): of.__code__ for of in loop})
    return found and (found[0].rpartition("/")[2], found[1])


def called(source: str, file: str, name: str, **more: str) -> Any:
    """A function of a module that is not the user's."""
    names: dict[str, Any] = {"look": look, "sys": sys, **more}
    exec(compile(source, file, "exec"), names)
    return names[name]


SAVE = "def save(*loop):\n    return look(sys._getframe(), *loop)\n"
FIT = "def fit(callback):\n    return callback()\n"


def test_package_line_is_the_callee(tmp_path: Path) -> None:
    save = called(SAVE, str(tmp_path / "site-packages" / "storing" / "saving.py"), "save")
    here = test_package_line_is_the_callee
    assert save() == (line_of(here, "assert save() =="), "storing/saving.py:2")


def test_user_function_has_the_line_of_the_loop(tmp_path: Path) -> None:
    """Through PyTorch as well: a model's forward, a function under no_grad()."""
    save = called(SAVE, str(tmp_path / "site-packages" / "storing" / "saving.py"), "save")

    @torch.no_grad()
    def evaluation() -> Any:
        return stored()

    def stored() -> Any:
        return save(loop)

    def loop() -> Any:
        return evaluation()  # Here.

    assert loop() == (line_of(loop, "# Here"), "evaluation()")


def test_callback_of_a_trainer_has_its_line(tmp_path: Path) -> None:
    fit = called(FIT, str(tmp_path / "site-packages" / "trainer" / "loops.py"), "fit")

    def loop() -> Any:
        return fit(on_batch_end)

    def on_batch_end() -> Any:
        return logged()  # Here.

    def logged() -> Any:
        return look(sys._getframe(), loop)

    assert loop() == (line_of(on_batch_end, "# Here"), "logged()")


def test_waiting_in_a_collective_is_not_sampled() -> None:
    assert called(SAVE, "<torch>", "save", __name__=COLLECTIVE_MODULE)() is None
    assert sampled_line(None, {}) is None


@repeated
def test_an_evaluation_that_starts_workers_is_seen_to_do_that() -> None:
    other = DataLoader(dataset(16), batch_size=8, num_workers=4)

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(100):
            for images, _ in DataLoader(dataset(64), batch_size=8):
                module(images).sum().backward()
                optimizer.step()
            with torch.no_grad():
                for _ in other:  # Workers.
                    pass

    found = instrumented(training, script_task(steps=36)).samples
    assert found is not None
    spot = longest(found.host_gap_locations, "between passes")
    assert spot == (line_of(training, "# Workers"), STARTS_WORKERS)
