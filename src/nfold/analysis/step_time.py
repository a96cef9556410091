"""The time of a step: one number from the windows of all ranks. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nfold.core.measurement import Measurement, RankSamples, Window
from nfold.core.stats import median, weighted_median

WHOLE_BATCH_FRACTION = 0.5  # of the typical batch

WeightedStepMs = tuple[float, int]  # milliseconds of a step, and the number of steps


def step_time(measurement: Measurement) -> float | None:
    """Return the typical milliseconds of a step of all ranks together; None if none was timed."""
    timed = window_step_times(measurement)
    return typical_step_ms(timed) if timed else None


def window_step_times(measurement: Measurement) -> list[WeightedStepMs]:
    """Return milliseconds per step and number of steps of every window of all ranks together.

    The slowest rank of a window counts. A step counts by its samples, in whole batches, because the
    last batch of an epoch is smaller.
    """
    ranks = [rank for rank in measurement.ranks if rank.windows]
    windows = list(zip(*(rank.windows for rank in ranks), strict=False))
    return whole_batch_step_ms(windows, global_batch(measurement, ranks)) if windows else []


def global_batch(measurement: Measurement, ranks: Sequence[RankSamples]) -> int:
    """Return the samples of a whole step of all ranks: of the plan, or as they were counted."""
    counted = (round(median([w.samples / w.steps for w in r.windows])) for r in ranks)
    return measurement.plan.batch or max(1, sum(counted))


def typical_step_ms(timed: Sequence[WeightedStepMs]) -> float:
    return weighted_median([ms for ms, _ in timed], [steps for _, steps in timed])


def whole_batch_step_ms(windows: Sequence[Sequence[Window]], batch: float) -> list[WeightedStepMs]:
    """Return the times of windows, each of one or more ranks, for ``batch`` samples per step."""
    batches = [_samples(same) / same[0].steps for same in windows]
    typical = weighted_median(batches, [same[0].steps for same in windows])
    if 0 < typical < WHOLE_BATCH_FRACTION * batch:
        # A batch feeds several steps, and windows have parts of it: steps count, not samples.
        factor = 1e3 * batch / typical
        return [
            (factor * max(window.seconds for window in same) / same[0].steps, same[0].steps)
            for same in _with_short_windows(windows)
        ]
    # A last batch of a few samples tells nothing about a whole one.
    whole = [
        same
        for same, batch_ in zip(windows, batches, strict=True)
        if batch_ >= WHOLE_BATCH_FRACTION * typical
    ]
    return [
        (
            1e3 * max(window.seconds for window in same) * batch / max(1, _samples(same)),
            same[0].steps,
        )
        for same in _with_short_windows(whole)
    ]


def _with_short_windows(windows: Sequence[Sequence[Window]]) -> list[Sequence[Window]]:
    """Join a shorter window that ends an epoch or a slot to the window before it.

    A loader has prefetched batches at the end of an epoch and none at its beginning: after a
    window of 20 steps, the last 4 are not typical.
    """
    found: list[Sequence[Window]] = []
    longest = max(same[0].steps for same in windows)
    for same in windows:
        window = same[0]
        last = found[-1][0] if found else window
        follows = window.epoch_gap is None and window.first_step == last.first_step + last.steps
        if follows and window.steps < longest:
            found[-1] = [
                dataclasses.replace(
                    one,
                    seconds=one.seconds + other.seconds,
                    steps=one.steps + other.steps,
                    samples=one.samples + other.samples,
                )
                for one, other in zip(found[-1], same, strict=True)
            ]
        else:
            found.append(same)
    return found


def _samples(same: Sequence[Window]) -> int:
    return sum(window.samples for window in same)
