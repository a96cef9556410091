"""Doubts about a run that only all ranks together, or its length, can show. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from nfold.ablation import Ablation
from nfold.frameworks.length import FEW_WINDOWS
from nfold.measurement import UNEXCHANGED, Doubt, RankSamples
from nfold.stats import change_point, median

SLOW_RANK = 1.10
DRIFT = 0.05
ROUNDED = 1e-5
"""Of parameters: so little is rounding of numbers of 4 bytes, some hundred times one of them."""


def doubts(ranks: Sequence[RankSamples], ablation: Ablation | None = None) -> list[Doubt]:
    """Every doubt that the ranks' own samples raise about their numbers.

    Under an ablation nobody minds what is trained: only the times are doubted.
    """
    trained = ablation is None or ablation.trains
    noted = [Doubt(kind=kind, text=text) for rank in ranks for kind, text in rank.notes]
    found = [
        same_samples(ranks) if trained else None,
        parameters_differ(ranks) if trained else None,
        few_windows(ranks),
        drift(ranks),
        slow_rank(ranks),
    ]
    return [*dict.fromkeys(noted), *(doubt for doubt in found if doubt is not None)]


def same_samples(ranks: Sequence[RankSamples]) -> Doubt | None:
    """Two ranks that were fed the same samples: the work was not divided."""
    hashes = Counter(entry for rank in ranks for entry in rank.sample_hashes[:1] if entry[0])
    if not any(times > 1 for times in hashes.values()):
        return None
    text = "ranks were fed the same samples: the work was not divided, images/s counts copies"
    return Doubt(kind="same_samples", text=text)


def parameters_differ(ranks: Sequence[RankSamples]) -> Doubt | None:
    """Ranks that end with different parameters: gradients were not exchanged, or were and each
    changes its own in another way; by rounding only, nothing else is wrong.
    """
    sums = {rank.parameter_checksum for rank in ranks if rank.parameter_checksum}
    if len(sums) < 2:
        return None
    apart = _apart([rank.parameter_sample for rank in ranks])
    if apart is None:
        text = f"parameters differ between ranks at the end: {UNEXCHANGED}"
        return Doubt(kind="parameters_differ", text=text)
    if apart <= ROUNDED:
        text = (
            f"parameters of ranks differ by rounding ({apart:.0e} of them), though gradients are "
            "exchanged: each rank adds something of its own and takes it away again, or adds in "
            "another order; next: broadcast them now and then in long training"
        )
        return Doubt(kind="rounded_apart", text=text)
    text = (
        f"parameters differ between ranks at the end by {apart:.0e} of them, though gradients are "
        "exchanged: each rank changes them in its own way (noise, another learning rate)"
    )
    return Doubt(kind="parameters_differ", text=text)


def _apart(samples: Sequence[Sequence[float]]) -> float | None:
    """The largest difference over the root mean square of all; None where nothing tells it."""
    if not all(samples) or len({len(one) for one in samples}) > 1:
        return None
    size = math.sqrt(fmean(number**2 for one in samples for number in one))
    widest = max(max(numbers) - min(numbers) for numbers in zip(*samples, strict=True))
    return widest / size if size > 0 and math.isfinite(widest / size) else None


def few_windows(ranks: Sequence[RankSamples]) -> Doubt | None:
    """Too few timed windows for an interval to mean much."""
    if not ranks or any(rank.parts for rank in ranks):
        return None
    count = min(len(rank.windows) for rank in ranks)
    if count >= FEW_WINDOWS:
        return None
    text = f"only {count} timed windows: give more --steps or --epochs for a firm interval"
    return Doubt(kind="few_windows", text=text)


def drift(ranks: Sequence[RankSamples]) -> Doubt | None:
    """A jump of more than 5 % in the windows' speed that chance does not explain."""
    for rank in ranks:
        found = change_point([w.seconds / w.steps for w in rank.windows])
        if found and abs(found.after / found.before - 1) > DRIFT:
            change = 100 * (found.after / found.before - 1)
            text = f"step time changed by {change:+.0f} % from window {found.index + 1} on"
            return Doubt(kind="drift", text=f"rank {rank.rank}: {text}")
    return None


def slow_rank(ranks: Sequence[RankSamples]) -> Doubt | None:
    """A rank whose own step time is more than 10 % above the others' median."""
    times = {r.rank: median(r.step_ms) for r in ranks if r.step_ms}
    if len(times) < 2:
        return None
    slowest = max(times, key=lambda rank: times[rank])
    others = median([ms for rank, ms in times.items() if rank != slowest])
    if times[slowest] <= SLOW_RANK * others:
        return None
    text = f"rank {slowest} takes {times[slowest]:.2f} ms a step, the others {others:.2f} ms"
    return Doubt(kind="slow_rank", text=text)
