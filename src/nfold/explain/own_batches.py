"""A script that fails with batches of another size is explained with those that it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nfold.explain.ladder import ExperimentDesign
from nfold.explain.measured import TrialResults
from nfold.explain.rung import Trial

CRASHED_PREFIX = "crashed: "


def batch_size_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """The run that tells whether a script can have smaller batches, where that is not known.

    One device alone: copies may fail for other reasons.
    """
    if (
        design.profile is None
        or design.scaling_requested
        or design.scaling == "weak"
        or not design.uses_one_process
    ):
        return ()
    return (design.one_device("real"),)


def with_original_batch(
    design: ExperimentDesign, results: TrialResults, interleaved_failures: Mapping[Trial, str]
) -> ExperimentDesign | None:
    """The ladder on which each device has a batch of the script's own; None where it is not needed.

    Many scripts write the size of a batch down once more where they reshape one, or make a state.
    The work of one process is divided by smaller batches, unless a person has asked for that.
    ``together`` is why others failed that were the first to have a turn in a run.
    """
    if not batch_size_trials(design) or any(
        _has_smaller_batch(design, rung) for rung in results.runs
    ):
        return None
    assert design.profile is not None
    reasons = {**interleaved_failures, **results.reasons}.items()
    failed = (
        one for rung, one in reasons if rung.plan.devices == 1 and _has_smaller_batch(design, rung)
    )
    why = next(
        (one.removeprefix(CRASHED_PREFIX) for one in failed if one.startswith(CRASHED_PREFIX)), None
    )
    if why is None:
        return None
    return dataclasses.replace(
        design,
        plan=design.plan.edit(batch=(design.plan.batch or 1) * design.devices),
        scaling="weak",
        profile=dataclasses.replace(design.profile, fixed_batch_error=why),
        trial_cache={},
    )


def _has_smaller_batch(design: ExperimentDesign, trial: Trial) -> bool:
    """Whether a process of it gets fewer samples than the script's own does."""
    processes = trial.plan.devices or 1 if trial.plan.strategy == "ddp" else 1
    return (trial.plan.batch or 0) // processes < (design.plan.batch or 1)
