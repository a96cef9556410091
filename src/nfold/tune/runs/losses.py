"""Compares two runs of a training by the samples and losses of their first steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from nfold.core.measurement import Measurement
from nfold.interventions.intervention import Numerics

Losses = tuple[float, ...]
"""The mean loss over the ranks, of each of the first steps."""
# Largest difference of a loss, relative to the largest loss, by what a remedy may change
TOLERANCES: dict[Numerics, float] = {"same": 1e-4, "rounding": 2e-2, "training": math.inf}
REPEAT_FACTOR = 3.0  # of the difference between two runs of the original
UNREPEATABLE = 0.02  # two runs of the original that differ by more are compared by their means
STANDARD_ERRORS = 4.0
MEAN_TOLERANCE = 0.1  # relative, of the mean of losses that random draws make unequal
HASH_SIZE = 2**64


def first_losses(measurement: Measurement) -> Losses:
    """Return the losses that all ranks have, in the order of steps; empty if none are known."""
    by_rank = [dict(rank.losses) for rank in measurement.ranks]
    steps = sorted(set.intersection(*map(set, by_rank))) if by_rank else []
    return tuple(fmean(losses[step] for losses in by_rank) for step in steps)


def sample_hash(found: Measurement) -> int | None:
    """Return the hash of the samples of the warm-up over all ranks, None if unknown.

    It does not depend on how the samples are divided over ranks. The counts beside the hashes are of
    whole passes, which have more steps with more workers: see ``alternating_slots``.
    """
    if not all(rank.sample_hashes for rank in found.ranks):
        return None
    entries = [entry for rank in found.ranks for entry in rank.sample_hashes]
    return sum(int(digest, 16) for _, digest in entries) % HASH_SIZE


@dataclass(frozen=True)
class LossReference:
    """The losses of runs of the original, with the same seed."""

    runs: tuple[Losses, ...]

    @property
    def spread(self) -> float:
        """The largest relative difference between two runs of the original."""
        return max((largest_difference(self.runs[0], one) for one in self.runs[1:]), default=0.0)

    @property
    def is_repeatable(self) -> bool:
        return self.spread <= UNREPEATABLE

    def objection(
        self, losses: Losses, numerics: Numerics, *, has_other_draws: bool = False
    ) -> str | None:
        """Return how a run trains another way than its remedies allow, or None.

        With ``has_other_draws``, the run has the same samples, augmented by other random numbers.
        """
        if any(not math.isfinite(loss) for loss in losses) and self._is_finite:
            step = next(i for i, loss in enumerate(losses, 1) if not math.isfinite(loss))
            return f"the loss of step {step} is not a number"
        if numerics == "training" or not losses or not self.runs or not self.runs[0]:
            return None
        if not self.is_repeatable:
            return self.objection_to_mean(losses)
        limit = max(TOLERANCES[numerics], REPEAT_FACTOR * self.spread)
        found = largest_difference(self.runs[0], losses)
        if found <= limit:
            return None
        if has_other_draws:
            return self.objection_to_draws(losses)
        return f"its losses differ by {found:.2g} of their size (allowed: {limit:.2g})"

    def objection_to_draws(self, losses: Losses) -> str | None:
        """Return how a run differs from the first by more than other random numbers, or None."""
        usual = fmean(self.runs[0])
        change = fmean(losses) / usual - 1 if usual else 0.0
        if abs(change) > MEAN_TOLERANCE:
            return f"its mean loss differs by {100 * change:+.0f} %"
        return self.objection_to_mean(losses)

    def objection_to_mean(self, losses: Losses) -> str | None:
        """Return how the mean loss of a run differs by more than chance, or None."""
        pooled = [loss for run in self.runs for loss in run]
        error = stdev(pooled) * math.sqrt(1 / len(losses) + 1 / len(pooled))
        difference = abs(fmean(losses) - fmean(pooled))
        if difference <= STANDARD_ERRORS * error:
            return None
        return (
            f"its mean loss differs by {difference:.3g} from runs of the original, whose losses "
            f"differ from each other (allowed: {STANDARD_ERRORS * error:.3g})"
        )

    @property
    def _is_finite(self) -> bool:
        return all(math.isfinite(loss) for run in self.runs for loss in run)


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference of two series, relative to the largest loss of the first."""
    size = max((abs(loss) for loss in losses), default=0.0) or 1.0
    return max((abs(a - b) / size for a, b in zip(losses, others, strict=False)), default=0.0)
