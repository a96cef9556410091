"""Runs two process trees of a script that alternate: one trains while the other one waits.

What the machine does over seconds then changes both alike, and only the ratio of their times counts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, pairwise
from math import log
from pathlib import Path
from statistics import fmean

from nfold.core.interleave import SLICES
from nfold.core.measurement import Measurement
from nfold.explain.design import Trial
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import StartCallback

POLL_S = 0.002
StartRun = Callable[[StartCallback], Measurement]
"""Runs a script that alternates, and calls the argument with the folder of the run first."""


def run_alternating(first: StartRun, second: StartRun) -> tuple[Measurement, Measurement]:
    """Return the measurements of two runs, of which one trains while the other one waits.

    After their warm-ups, ``first`` begins. A run continues without waiting when the other one has ended.
    Raises what one of the runs raises.
    """
    with ThreadPoolExecutor(2) as threads:
        runs = [_Run(threads, first), _Run(threads, second)]
        while not all(one.measurement.done() for one in runs):
            _let_next_train(runs)
            time.sleep(POLL_S)
    return runs[0].measurement.result(), runs[1].measurement.result()


class _Run:
    """One of the two runs, in a thread."""

    def __init__(self, threads: ThreadPoolExecutor, start: StartRun) -> None:
        self._folder: HandoffFolder | None = None
        self._allowed = 0
        self.measurement: Future[Measurement] = threads.submit(start, self._note_folder)

    @property
    def slices(self) -> int | None:
        """After how many slices it waits or has waited last, None before its warm-up ended."""
        return self._folder.slices.read_done() if self._folder is not None else None

    def allow(self, count: int) -> None:
        if self._folder is not None and count > self._allowed and not self.measurement.done():
            self._folder.slices.allow(count)
            self._allowed = count

    def _note_folder(self, folder: Path) -> None:
        self._folder = HandoffFolder(folder)


def _let_next_train(runs: Sequence[_Run]) -> None:
    """Allow the slice that is due; ``SLICES`` + 1 lets a run end."""
    for one, other in (runs, runs[::-1]):
        if other.measurement.done():
            one.allow(SLICES + 1)
    first, second = (one.slices for one in runs)
    if first is None or second is None:
        return
    if second == first:
        runs[0].allow(first + 1)
    if first == second + 1 or first == SLICES:
        runs[1].allow(second + 1)


def log_ratio(trial: Trial, first: Measurement, second: Measurement) -> float:
    """Return the logarithm of the time per step of ``second`` over that of ``first``.

    It is the mean over all neighbouring slices, so that a steady drift cancels. ``trial`` has the
    number of devices of both. Raises ValueError if one has no steps in a slice.
    """
    slices = zip(_log_times(trial, first), _log_times(trial, second), strict=True)
    changes = [after - before for before, after in pairwise(chain.from_iterable(slices))]
    return fmean(-change if number % 2 else change for number, change in enumerate(changes))


def _log_times(trial: Trial, measurement: Measurement) -> list[float]:
    """Return the logarithm of the time per step of each slice."""
    ranks = [rank.split_windows(rank.slots, SLICES) for rank in measurement.ranks]
    parts = [dataclasses.replace(measurement, ranks=one) for one in zip(*ranks, strict=True)]
    found = [ms for ms in map(trial.step_and_gap_ms, parts) if ms is not None]
    if len(found) < SLICES:
        raise ValueError(f"{len(found)} of {SLICES} slices have steps")
    return [log(ms) for ms in found]
