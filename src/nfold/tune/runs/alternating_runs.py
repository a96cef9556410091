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

from nfold.core.errors import MachineUnfit
from nfold.core.interleave import ALL_SLICES, SLICES
from nfold.core.measurement import Measurement
from nfold.explain.design import Trial
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import StartCallback
from nfold.launch.process_tree import adopt_orphans

POLL_S = 0.002
NO_MEMORY = ("oom", "killed")


class CannotAlternateError(Exception):
    """Two runs cannot alternate, although one of them alone may run."""


StartRun = Callable[[StartCallback], Measurement]
"""Runs a script that alternates, and calls the argument with the folder of the run first."""
MeasuredTrial = tuple[Trial, Measurement]


def run_alternating(first: StartRun, second: StartRun) -> tuple[Measurement, Measurement]:
    """Return the measurements of two runs, of which one trains while the other one waits.

    Both start and make their first steps at once. ``first`` then begins, with its warm-up. A run
    continues without waiting when the other one has ended.

    Raises what one of the runs raises, and CannotAlternateError if both need the same file.
    """
    with adopt_orphans(), ThreadPoolExecutor(2) as threads:
        runs = [_Run(threads, first), _Run(threads, second)]
        while not all(one.measurement.done() for one in runs):
            _let_next_train(runs)
            time.sleep(POLL_S)
    try:
        return runs[0].measurement.result(), runs[1].measurement.result()
    except MachineUnfit as error:
        raise CannotAlternateError(str(error)) from error


def check_alternation(old: Measurement, new: Measurement, *, are_equal: bool) -> None:
    """Raise CannotAlternateError if two runs that alternated may have failed only because of that.

    That is the case if there was too little memory, or if ``old`` failed, which is known to run
    alone. If they ``are_equal``, every failure may be.
    """
    failed = [one for one in (old, new) if one.status != "ok"]
    if any(one.status in NO_MEMORY for one in failed) or failed == [old] or (failed and are_equal):
        raise CannotAlternateError(failed[0].status)


class _Run:
    """One of the two runs, in a thread."""

    def __init__(self, threads: ThreadPoolExecutor, start: StartRun) -> None:
        self._folder: HandoffFolder | None = None
        self._allowed = 0
        self.measurement: Future[Measurement] = threads.submit(start, self._note_folder)

    @property
    def slices(self) -> int | None:
        """After how many slices it waits or has waited last, None before it waits."""
        return self._folder.slices.read_done() if self._folder is not None else None

    def allow(self, count: int) -> None:
        if self._folder is not None and count > self._allowed and not self.measurement.done():
            self._folder.slices.allow(count)
            self._allowed = count

    def _note_folder(self, folder: Path) -> None:
        self._folder = HandoffFolder(folder)


def _let_next_train(runs: Sequence[_Run]) -> None:
    """Allow the slice that is due; one more than all lets a run end."""
    for one, other in (runs, runs[::-1]):
        if other.measurement.done():
            one.allow(ALL_SLICES + 1)
    first, second = (one.slices for one in runs)
    if first is None or second is None:
        return
    if second == first:
        runs[0].allow(first + 1)
    if first == second + 1 or first == ALL_SLICES:
        runs[1].allow(second + 1)


def log_ratio(first: MeasuredTrial, second: MeasuredTrial) -> float:
    """Return the logarithm of the time per step of ``second`` over that of ``first``, which began.

    It is the mean over all neighbouring slices, so that a steady drift cancels. Raises
    CannotAlternateError if one has no steps in a slice: the script has ended before.
    """
    slices = zip(_log_times(*first), _log_times(*second), strict=True)
    changes = [after - before for before, after in pairwise(chain.from_iterable(slices))]
    return fmean(-change if number % 2 else change for number, change in enumerate(changes))


def _log_times(trial: Trial, measurement: Measurement) -> list[float]:
    """Return the logarithm of the time per step of each slice."""
    ranks = [rank.split_windows(rank.slots, SLICES) for rank in measurement.ranks]
    parts = [dataclasses.replace(measurement, ranks=one) for one in zip(*ranks, strict=True)]
    found = [ms for ms in map(trial.step_and_gap_ms, parts) if ms is not None]
    if len(found) < SLICES:
        raise CannotAlternateError(f"{len(found)} of {SLICES} slices have steps")
    return [log(ms) for ms in found]
