"""A script that fails with batches of another size is explained with those that it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nfold.explain.ladder import Ladder
from nfold.explain.measured import Measured
from nfold.explain.rung import Rung

CRASHED = "crashed: "


def telling(ladder: Ladder) -> tuple[Rung, ...]:
    """The run that tells whether a script can have smaller batches, where that is not known.

    One device alone: copies may fail for other reasons.
    """
    if ladder.seen is None or ladder.asked or ladder.scaling == "weak" or not ladder.one_process:
        return ()
    return (ladder.alone("real"),)


def of_its_own(ladder: Ladder, measured: Measured, together: Mapping[Rung, str]) -> Ladder | None:
    """The ladder on which each device has a batch of the script's own; None where it is not needed.

    Many scripts write the size of a batch down once more where they reshape one, or make a state.
    The work of one process is divided by smaller batches, unless a person has asked for that.
    ``together`` is why others failed that were the first to have a turn in a run.
    """
    if not telling(ladder) or any(_smaller(ladder, rung) for rung in measured.runs):
        return None
    assert ladder.seen is not None
    reasons = {**together, **measured.reasons}.items()
    failed = (one for rung, one in reasons if rung.plan.devices == 1 and _smaller(ladder, rung))
    why = next((one.removeprefix(CRASHED) for one in failed if one.startswith(CRASHED)), None)
    if why is None:
        return None
    return dataclasses.replace(
        ladder,
        plan=ladder.plan.edit(batch=(ladder.plan.batch or 1) * ladder.devices),
        scaling="weak",
        seen=dataclasses.replace(ladder.seen, fixed_batch=why),
        made={},
    )


def _smaller(ladder: Ladder, rung: Rung) -> bool:
    """Whether a process of it gets fewer samples than the script's own does."""
    processes = rung.plan.devices or 1 if rung.plan.strategy == "ddp" else 1
    return (rung.plan.batch or 0) // processes < (ladder.plan.batch or 1)
