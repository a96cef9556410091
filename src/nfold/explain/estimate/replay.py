"""Replayed batches whose work differs: steps are compared batch by batch.

Variants that replay the same batches do the same work in a cycle, but not in every window. The
usual time of each batch replaces the time of a step, as far as it depends on the batch: this removes
the variance between batches from differences (R. A. Fisher, The Design of Experiments, 1935,
chapter 3: blocking). The mean of the few replayed batches differs from that of all batches by a
sampling error, which is the same for all variants that replay them. Two plans may replay the same
batches, others, or partly the same: their deviations, batch by batch, tell. Pure functions.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nfold.core.measurement import Measurement, RankSamples

Deviations: TypeAlias = NDArray[np.float64]
"""Differences of replayed batches from the mean batch, by index."""

MIN_REPEATS = 2  # of every batch: the time of a single step is no usual time


def with_equal_batches(measurement: Measurement, *, ranks_synchronize: bool) -> Measurement:
    """Return a measurement whose windows took as long as if all replayed batches were the mean one.

    Windows of real batches, and of batches that were replayed only once, are unchanged.
    """
    each = _usual_ms_by_rank(measurement.ranks, ranks_synchronize=ranks_synchronize)
    pairs = zip(measurement.ranks, each, strict=True)
    ranks = tuple(_with_mean_batch(rank, usual) for rank, usual in pairs)
    return dataclasses.replace(measurement, ranks=ranks)


def batch_deviations(measurement: Measurement, *, ranks_synchronize: bool) -> dict[str, Deviations]:
    """Return by how much each replayed batch [index] differs from the mean batch, by metric.

    In milliseconds, scaled so that the root of the sum of squares is the standard error of the mean
    step. The metric is ``step``, or ``rank K`` if ranks do not synchronize. Empty if it is unknown.
    """
    found = {}
    each = _usual_ms_by_rank(measurement.ranks, ranks_synchronize=ranks_synchronize)
    for rank, usual in zip(measurement.ranks, each, strict=True):
        count = len(usual)
        if count > 1:
            own = np.zeros(max(usual) + 1)
            own[list(usual)] = np.array([*usual.values()]) - fmean(usual.values())
            name = "step" if ranks_synchronize else f"rank {rank.rank}"
            found[name] = own / math.sqrt(count * (count - 1))
    return found


def mean_deviations(each: Sequence[Deviations]) -> Deviations:
    """Return the mean of deviations, of which some may lack the last batches."""
    count = max(map(len, each))
    mean: Deviations = np.mean([np.pad(own, (0, count - len(own))) for own in each], axis=0)
    return mean


def _with_mean_batch(rank: RankSamples, usual: dict[int, float]) -> RankSamples:
    if not usual:
        return rank
    mean_ms = fmean(usual.values())
    windows = tuple(
        dataclasses.replace(
            window,
            seconds=window.seconds + sum(mean_ms - usual[i] for i in window.batch_indices) / 1e3,
        )
        for window in rank.windows
    )
    return dataclasses.replace(rank, windows=windows)


def _usual_ms_by_rank(
    ranks: Sequence[RankSamples], *, ranks_synchronize: bool
) -> list[dict[int, float]]:
    """Return the median step of every replayed batch; empty for too few repeats.

    A step of ranks that synchronize takes as long as that of the slowest.
    """
    indices = [[i for window in rank.windows for i in window.batch_indices] for rank in ranks]
    if not ranks or any(own != indices[0] for own in indices) or not ranks_synchronize:
        pairs = zip(ranks, indices, strict=True)
        return [_usual_ms(own, rank.step_ms) for rank, own in pairs]
    slowest = [max(same) for same in zip(*(rank.step_ms for rank in ranks), strict=False)]
    return [_usual_ms(indices[0], slowest)] * len(ranks)


def _usual_ms(indices: Sequence[int], step_ms: Sequence[float]) -> dict[int, float]:
    repeats = min(Counter(indices).values(), default=0)
    if len(indices) != len(step_ms) or repeats < MIN_REPEATS:
        return {}
    batches, each = np.array(indices), np.array(step_ms)
    return {int(i): float(np.median(each[batches == i])) for i in np.unique(batches)}
