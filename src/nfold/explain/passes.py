"""Where passes over the data end: ranks that have begun the next one wait for one that has not.

They do so in a step. It is no longer than others for that: what lies between two passes is as long
for all. Pure functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nfold.measurement import Measurement, RankSamples, Window
from nfold.stats import median

WindowSteps = tuple[Window, tuple[float, ...]]
"""A window with the milliseconds of its steps."""


def equalize_epoch_gaps(measurement: Measurement) -> Measurement:
    """What ranks wait in the first step of a pass for another that is still between the two lies
    between them, in no step; of ranks that wait for each other.
    """
    ranks, left_out = measurement.ranks, measurement.variant
    wait = len(ranks) > 1 and (left_out is None or left_out.ranks_synchronize)
    if not wait or measurement.status != "ok" or not all(rank.step_ms for rank in ranks):
        return measurement
    usual = [median(rank.step_ms) for rank in ranks]
    timed = [list(rank.windows_with_step_times()) for rank in ranks]
    moved = [_equalized_windows(windows, usual) for windows in zip(*timed, strict=False)]
    made = [
        _with_windows(rank, [*(windows[k] for windows in moved), *timed[k][len(moved) :]])
        for k, rank in enumerate(ranks)
    ]
    return dataclasses.replace(measurement, ranks=tuple(made))


def _equalized_windows(
    windows: Sequence[WindowSteps], usual: Sequence[float]
) -> Sequence[WindowSteps]:
    """Windows of all ranks over the same steps, where each was timed and a pass may begin."""
    pauses = [window.epoch_gap for window, _ in windows if window.epoch_gap is not None]
    same = len({window.first_step for window, _ in windows}) == 1
    if not same or len(pauses) < len(windows) or not all(step_ms for _, step_ms in windows):
        return windows
    last_s = max(one.seconds for one in pauses)
    ready_s = max(one.seconds - one.waited_s for one in pauses)
    pairs = zip(windows, usual, strict=True)
    return [_equalized_window(one, usual_ms, last_s, ready_s) for one, usual_ms in pairs]


def _equalized_window(
    one: WindowSteps, usual_ms: float, last_s: float, ready_s: float
) -> WindowSteps:
    """Of one rank its first step without waiting for the last one, which began so late.

    Had nobody waited for a first batch, all would have begun when the last one was ready for it:
    what is longer than that is a wait for batches, its own or another rank's.
    """
    window, (first_ms, *rest) = one
    assert window.epoch_gap is not None
    own_s = window.epoch_gap.seconds
    late_s = min(last_s - own_s, max(0.0, first_ms - usual_ms) / 1e3)
    waited_s = max(0.0, own_s + late_s - ready_s)
    between = dataclasses.replace(window.epoch_gap, seconds=own_s + late_s, waited_s=waited_s)
    made = dataclasses.replace(window, seconds=window.seconds - late_s, epoch_gap=between)
    return made, (first_ms - 1e3 * late_s, *rest)


def _with_windows(rank: RankSamples, windows: Sequence[WindowSteps]) -> RankSamples:
    step_ms = tuple(ms for _, own in windows for ms in own)
    return dataclasses.replace(rank, windows=tuple(one for one, _ in windows), step_ms=step_ms)
