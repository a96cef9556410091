"""Compares a converted script with its original: samples of a pass and losses of the first steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nfold.core.measurement import Measurement
from nfold.core.plan import WARMUP_STEPS
from nfold.explain.design import Trial
from nfold.explain.trials import WorkloadRunner
from nfold.tune.result import ConvertedScript
from nfold.tune.runs.losses import (
    TOLERANCES,
    LossReference,
    first_losses,
    largest_difference,
    sample_hash,
)

FreshRun = Callable[[Trial, str, WorkloadRunner], Measurement | str]
"""Runs a trial in fresh processes; returns its measurement, or why it failed."""
COMPARED_STEPS = 20
SAMPLE_TOLERANCE = 0.01  # relative, of the mean samples of a step


@dataclass(frozen=True, kw_only=True)
class ConversionCheck:
    """Runs of the original and of the converted script, without shuffling if ``is_ordered``.

    ``one_device`` and ``all_devices`` are runs of the converted script.
    """

    original: Measurement
    one_device: Measurement
    all_devices: Measurement
    is_ordered: bool

    def objection(self) -> str | None:
        """Return how the converted script trains another way, or None."""
        for found in (self.one_device, self.all_devices):
            where = f"on {len(found.ranks)} device{'s' * (len(found.ranks) > 1)}"
            text = self._objection_to_samples(found) or self._objection_to_losses(found)
            if text is not None:
                return f"{where} {text}"
        return None

    @property
    def summary(self) -> str:
        """``first 20 losses differ by 1e-07 of the largest on 1 device and by 2e-07 on 2``."""
        usual = first_losses(self.original)
        if not usual:
            return "losses were not compared: the script calls no backward on a loss"
        if not self.is_ordered:
            return "means of losses compared: the samples come in another order"
        one, several = (
            largest_difference(usual, first_losses(found))
            for found in (self.one_device, self.all_devices)
        )
        text = (
            f"first {len(usual)} losses differ by {one:.1g} of the largest on 1 device and by "
            f"{several:.1g} on {len(self.all_devices.ranks)}"
        )
        return text if max(one, several) <= TOLERANCES["rounding"] else f"{text}; their means agree"

    def _objection_to_samples(self, found: Measurement) -> str | None:
        lengths, usual = steps_per_pass(found), steps_per_pass(self.original)
        own, other = samples_per_step(self.original), samples_per_step(found)
        # The last batch of a pass may be smaller, which is not always observed.
        if abs(own - other) > own * (SAMPLE_TOLERANCE + 1 / max(usual, default=math.inf)):
            return f"a step has {other:.4g} samples in place of {own:.4g}"
        if lengths and usual and lengths != usual:
            return f"a pass has {max(lengths)} steps in place of {max(usual)}"
        hashes = sample_hash(self.original), sample_hash(found)
        if self.is_ordered and None not in hashes and hashes[0] != hashes[1]:
            return "the first steps have other samples"
        return None

    def _objection_to_losses(self, found: Measurement) -> str | None:
        """Compare single losses; the means if those differ, as by dropout and batch norm."""
        if self._objection_to_each_loss(found) is None:
            return None
        usual, losses = first_losses(self.original), first_losses(found)
        if not losses:
            return "has no losses that are known"
        return LossReference((usual,)).objection_to_draws(losses)

    def _objection_to_each_loss(self, found: Measurement) -> str | None:
        """Return why single losses are not equal, None if they are or there are none to compare."""
        reference = LossReference((first_losses(self.original),))
        if not reference.runs[0]:
            return None
        losses = first_losses(found)
        if not self.is_ordered or not losses:
            return "there are no losses of the same samples"
        return reference.objection(losses, "rounding")


def run_check(
    found: ConvertedScript, runner: WorkloadRunner, original: Trial, trial: Trial, run: FreshRun
) -> ConversionCheck | str:
    """Run the original on one device, and the converted script there and on all devices of ``trial``.

    Returns why a run failed if one did.
    """
    original = original.edit(steps=COMPARED_STEPS, warmup_steps=WARMUP_STEPS)
    trial = trial.edit(steps=COMPARED_STEPS, warmup_steps=WARMUP_STEPS)
    one = original.edit(devices=1, strategy="single")
    own, copy = (
        runner.with_sources(found.ordered_original),
        runner.with_converted(found.ordered_copy),
    )
    usual = run(one, "comparing losses: the original on one device", own)
    if isinstance(usual, str):  # nn.DataParallel may name its devices
        usual = run(original, "comparing losses: the original", own)
    if isinstance(usual, str):
        return f"the original without shuffling: {usual}"
    alone = run(one, "comparing losses: nfold.Run on one device", copy)
    if isinstance(alone, str):
        return f"nfold.Run on one device: {alone}"
    together = run(trial, "comparing losses: nfold.Run on all devices", copy)
    if isinstance(together, str):
        return f"nfold.Run on all devices: {together}"
    is_ordered = bool(found.ordered_original)
    return ConversionCheck(
        original=usual, one_device=alone, all_devices=together, is_ordered=is_ordered
    )


def samples_per_step(found: Measurement) -> float:
    """Return the samples of a timed step over all ranks."""
    windows = [window for rank in found.ranks for window in rank.windows]
    steps = sum(window.steps for window in windows) / max(1, len(found.ranks))
    return sum(window.samples for window in windows) / max(1.0, steps)


def steps_per_pass(found: Measurement) -> set[int]:
    """Return the batches of an epoch of all ranks, as far as they are known."""
    lengths = (rank.batches_per_epoch for rank in found.ranks)
    return {length for length in lengths if length is not None}
