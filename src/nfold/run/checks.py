"""Doubts about a run that only all ranks together, or its length, can show. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from nfold.ablation import Variant
from nfold.frameworks.length import MIN_WINDOWS
from nfold.measurement import NO_GRADIENT_EXCHANGE, Caveat, RankSamples
from nfold.stats import change_point, median

SLOW_RANK_RATIO = 1.10
DRIFT_FRACTION = 0.05
ROUNDING_TOLERANCE = 1e-5
"""Of parameters: so little is rounding of numbers of 4 bytes, some hundred times one of them."""


def rank_caveats(ranks: Sequence[RankSamples], variant: Variant | None = None) -> list[Caveat]:
    """Every doubt that the ranks' own samples raise about their numbers.

    Under an ablation nobody minds what is trained: only the times are doubted.
    """
    trained = variant is None or variant.preserves_training
    noted = [Caveat(kind=kind, text=text) for rank in ranks for kind, text in rank.caveats]
    found = [
        check_same_samples(ranks) if trained else None,
        check_parameters(ranks) if trained else None,
        check_window_count(ranks),
        check_drift(ranks),
        check_slow_rank(ranks),
    ]
    return [*dict.fromkeys(noted), *(doubt for doubt in found if doubt is not None)]


def check_same_samples(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Two ranks that were fed the same samples: the work was not divided."""
    hashes = Counter(entry for rank in ranks for entry in rank.sample_hashes[:1] if entry[0])
    if not any(times > 1 for times in hashes.values()):
        return None
    text = "ranks were fed the same samples: the work was not divided, images/s counts copies"
    return Caveat(kind="same_samples", text=text)


def check_parameters(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Ranks that end with different parameters: gradients were not exchanged, or were and each
    changes its own in another way; by rounding only, nothing else is wrong.
    """
    sums = {rank.parameter_checksum for rank in ranks if rank.parameter_checksum}
    if len(sums) < 2:
        return None
    apart = _parameter_difference([rank.parameter_sample for rank in ranks])
    if apart is None:
        text = f"parameters differ between ranks at the end: {NO_GRADIENT_EXCHANGE}"
        return Caveat(kind="parameters_differ", text=text)
    if apart <= ROUNDING_TOLERANCE:
        text = (
            f"parameters of ranks differ by rounding ({apart:.0e} of them), though gradients are "
            "exchanged: each rank adds something of its own and takes it away again, or adds in "
            "another order; next: broadcast them now and then in long training"
        )
        return Caveat(kind="rounded_apart", text=text)
    text = (
        f"parameters differ between ranks at the end by {apart:.0e} of them, though gradients are "
        "exchanged: each rank changes them in its own way (noise, another learning rate)"
    )
    return Caveat(kind="parameters_differ", text=text)


def _parameter_difference(samples: Sequence[Sequence[float]]) -> float | None:
    """The largest difference over the root mean square of all; None where nothing tells it."""
    if not all(samples) or len({len(one) for one in samples}) > 1:
        return None
    size = math.sqrt(fmean(number**2 for one in samples for number in one))
    widest = max(max(numbers) - min(numbers) for numbers in zip(*samples, strict=True))
    return widest / size if size > 0 and math.isfinite(widest / size) else None


def check_window_count(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Too few timed windows for an interval to mean much."""
    if not ranks or any(rank.parts for rank in ranks):
        return None
    count = min(len(rank.windows) for rank in ranks)
    if count >= MIN_WINDOWS:
        return None
    text = f"only {count} timed windows: give more --steps or --epochs for a firm interval"
    return Caveat(kind="few_windows", text=text)


def check_drift(ranks: Sequence[RankSamples]) -> Caveat | None:
    """A jump of more than 5 % in the windows' speed that chance does not explain."""
    for rank in ranks:
        found = change_point([w.seconds / w.steps for w in rank.windows])
        if found and abs(found.after / found.before - 1) > DRIFT_FRACTION:
            change = 100 * (found.after / found.before - 1)
            text = f"step time changed by {change:+.0f} % from window {found.index + 1} on"
            return Caveat(kind="drift", text=f"rank {rank.rank}: {text}")
    return None


def check_slow_rank(ranks: Sequence[RankSamples]) -> Caveat | None:
    """A rank whose own step time is more than 10 % above the others' median."""
    times = {r.rank: median(r.step_ms) for r in ranks if r.step_ms}
    if len(times) < 2:
        return None
    slowest = max(times, key=lambda rank: times[rank])
    others = median([ms for rank, ms in times.items() if rank != slowest])
    if times[slowest] <= SLOW_RANK_RATIO * others:
        return None
    text = f"rank {slowest} takes {times[slowest]:.2f} ms a step, the others {others:.2f} ms"
    return Caveat(kind="slow_rank", text=text)
