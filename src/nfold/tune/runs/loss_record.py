"""The losses and samples of the runs of one tuning, by what ran."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nfold.core.measurement import Measurement
from nfold.tune.remedies import Remedy, largest_change
from nfold.tune.runs.losses import Losses, LossReference, first_losses, sample_hash


@dataclass
class LossRecord:
    """``draws_random_numbers``: whether the model draws some, as for dropout."""

    draws_random_numbers: bool = False
    _losses: dict[object, list[Losses]] = field(default_factory=dict)
    _samples: dict[object, int | None] = field(default_factory=dict)

    def note(self, key: object, found: Measurement) -> None:
        """Keep the losses and samples of a run."""
        if losses := first_losses(found):
            self._losses.setdefault(key, []).append(losses)
        self._samples[key] = sample_hash(found)

    def objection(self, base: object, key: object, remedies: Collection[Remedy]) -> str | None:
        """Return how the last run of ``key`` differs from ``base`` more than ``remedies`` allow, or None."""
        losses = self._losses.get(key)
        if not losses:
            return None
        return self._reference(base).objection(
            losses[-1],
            largest_change(remedies),
            has_other_draws=self._has_other_draws(base, key, remedies),
        )

    def summary(self, original: object, final: object, kept: Collection[Remedy]) -> str:
        """Return how the losses of the original were compared with those of ``final``."""
        reference = self._reference(original)
        if not reference.runs:
            return "losses were not compared: the script calls no backward on a loss"
        if not reference.is_repeatable:
            return "losses of two runs of the original differ: only their means were compared"
        losses = self._losses.get(final, [()])[-1]
        differs = reference.objection(losses, largest_change(kept)) is not None
        if differs and self._has_other_draws(original, final, kept):
            return (
                "other random numbers are drawn, as for dropout or augmentation: samples and mean "
                "losses compared"
            )
        return f"first {len(reference.runs[0])} losses compared"

    def _reference(self, base: object) -> LossReference:
        return LossReference(tuple(self._losses.get(base, ())))

    def _has_other_draws(self, base: object, key: object, remedies: Collection[Remedy]) -> bool:
        """Return whether a run has the samples of ``base``, but other random numbers.

        A data set that augments its samples draws them in the loader's workers. A model draws them
        for dropout: compiled, or in another memory layout, it draws others.
        """
        samples = self._samples.get(key)
        if samples is None or samples != self._samples.get(base):
            return False
        computes_otherwise = largest_change(remedies) == "rounding"
        in_model = self.draws_random_numbers and computes_otherwise
        return in_model or any(one.has_other_draws for one in remedies)
