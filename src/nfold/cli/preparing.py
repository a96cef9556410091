"""Data found, verified and decoded before anything runs: missing data is one error then."""

from __future__ import annotations

from pathlib import Path

from nfold import data, workloads
from nfold.plan import Plan
from nfold.workload import Workload


def prepare(workload: Workload, plan: Plan, folder: Path | None) -> None:
    """Prepare what a workload reads under a plan; ``folder`` is looked into first."""
    known = workloads.info(workload.name)
    if known.defaults.encoded:
        chosen = workloads.parameters(workload)
        data.prepare_photographs(
            folder,
            samples=chosen["samples"],
            classes=chosen["classes"],
            skip_bad=plan.bad_images == "skip",
            decoded=plan.cache == "decoded",
        )
    elif known.dataset is not None:
        data.prepare(known.dataset, folder)
