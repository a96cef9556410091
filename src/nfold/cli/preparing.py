"""Data found, verified and decoded before anything runs: missing data is one error then.

And plans completed: what is measured of the machine for that is measured of these data.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from nfold import data, workloads
from nfold.inert import terminal_safe
from nfold.machine import Machine
from nfold.plan import Plan
from nfold.run.rated import PlanCompleter
from nfold.workload import Workload


def prepare_data(workload: Workload, plan: Plan, folder: Path | None) -> None:
    """Prepare what a workload reads under a plan; ``folder`` is looked into first."""
    known = workloads.info(workload.name)
    if known.defaults.encoded:
        chosen = workloads.parameters(workload)
        data.prepare_photographs(
            folder,
            samples=chosen["samples"],
            classes=chosen["classes"],
            skip_bad=plan.bad_images == "skip",
            decode=plan.cache == "decoded" or plan.input == "resident",
        )
    elif known.dataset is not None:
        data.prepare(known.dataset, folder)


def epoch_samples(workload: Workload) -> int | None:
    """The training samples of an epoch, those of photographs as they were prepared.

    None where nobody knows before it was run.
    """
    if workload.script:
        return None
    known, chosen = workloads.info(workload.name), workloads.parameters(workload)
    there = data.photograph_count() if known.defaults.encoded else known.training_samples
    limits = filter(None, (there, chosen.get("samples", 0)))
    return min(limits, default=0) * chosen.get("repeat", 1) or None


def build_plan_completer(
    machine: Machine, folder: Path | None, *, measures: bool = True
) -> PlanCompleter:
    """What completes plans; not ``measures``: by what was measured before, if anything was."""
    return PlanCompleter(
        machine=machine,
        prepare=partial(prepare_data, folder=folder),
        notify=_tell,
        may_measure=measures,
        data_folder=folder,
    )


def _tell(text: str) -> None:
    sys.stderr.write(f"nfold: {terminal_safe(text)}\n")
