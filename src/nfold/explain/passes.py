"""Where passes over the data end: ranks that have begun the next one wait for one that has not.

They do so in a step. It is no longer than others for that: what lies between two passes is as long
for all. Pure functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nfold.measurement import Measurement, RankSamples, Window
from nfold.stats import median

Timed = tuple[Window, tuple[float, ...]]
"""A window with the milliseconds of its steps."""


def as_long_for_all(measurement: Measurement) -> Measurement:
    """What ranks wait in the first step of a pass for another that is still between the two lies
    between them, in no step; of ranks that wait for each other.
    """
    ranks, left_out = measurement.ranks, measurement.ablation
    wait = len(ranks) > 1 and (left_out is None or left_out.coupled)
    if not wait or measurement.status != "ok" or not all(rank.step_ms for rank in ranks):
        return measurement
    usual = [median(rank.step_ms) for rank in ranks]
    timed = [list(rank.timed()) for rank in ranks]
    moved = [_moved(windows, usual) for windows in zip(*timed, strict=False)]
    made = [
        _with(rank, [*(windows[k] for windows in moved), *timed[k][len(moved) :]])
        for k, rank in enumerate(ranks)
    ]
    return dataclasses.replace(measurement, ranks=tuple(made))


def _moved(windows: Sequence[Timed], usual: Sequence[float]) -> Sequence[Timed]:
    """Windows of all ranks over the same steps, where each was timed and a pass may begin."""
    pauses = [window.between.seconds for window, _ in windows if window.between is not None]
    same = len({window.first for window, _ in windows}) == 1
    if not same or len(pauses) < len(windows) or not all(step_ms for _, step_ms in windows):
        return windows
    pairs = zip(windows, pauses, usual, strict=True)
    return [_later(one, max(pauses) - own_s, usual_ms) for one, own_s, usual_ms in pairs]


def _later(one: Timed, earlier_s: float, usual_ms: float) -> Timed:
    """Of a rank that has begun so much earlier than the last one: its first step without that."""
    window, (first_ms, *rest) = one
    late_s = min(earlier_s, max(0.0, first_ms - usual_ms) / 1e3)
    assert window.between is not None
    between = dataclasses.replace(window.between, seconds=window.between.seconds + late_s)
    made = dataclasses.replace(window, seconds=window.seconds - late_s, between=between)
    return made, (first_ms - 1e3 * late_s, *rest)


def _with(rank: RankSamples, windows: Sequence[Timed]) -> RankSamples:
    step_ms = tuple(ms for _, own in windows for ms in own)
    return dataclasses.replace(rank, windows=tuple(one for one, _ in windows), step_ms=step_ms)
