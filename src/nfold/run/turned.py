"""From one run in which experiments took turns to a measurement of each. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nfold.ablation import Variant
from nfold.measurement import Measurement, RankSamples, Status, cell_id
from nfold.plan import Plan
from nfold.run import checks
from nfold.turns import MAX_CYCLES


def split_by_variant(measurement: Measurement, variants: Sequence[Variant]) -> list[Measurement]:
    """One for each of the turns, in their order, with its own windows; all have one folder.

    Where the run failed, those that had a turn on all ranks before are ok, with the cause that
    ended it; the others have failed.
    """
    ranks = [rank.split_windows(rank.slots, len(variants)) for rank in measurement.ranks]
    return [
        _measurement_of_variant(measurement, left_out, tuple(parts[turn] for parts in ranks))
        for turn, left_out in enumerate(variants)
    ]


def _measurement_of_variant(
    whole: Measurement, variant: Variant, ranks: tuple[RankSamples, ...]
) -> Measurement:
    cell = cell_id(whole.workload, whole.plan, variant or None, whole.machine)
    status: Status = "ok" if _has_enough_steps(whole.plan, ranks) else whole.status
    found = checks.rank_caveats(ranks, variant or None) if status == "ok" else []
    return dataclasses.replace(
        whole,
        id=f"{cell}-{whole.repeat}-{whole.id.rpartition('-')[2]}",
        status=status,
        variant=variant or None,
        ranks=ranks,
        energy_joules=None,
        warnings=(*found, *whole.warnings),
    )


def _has_enough_steps(plan: Plan, ranks: Sequence[RankSamples]) -> bool:
    """Whether every rank has a part of the steps, 1 in CYCLES or more."""
    count = 1 if plan.strategy == "dp" else plan.devices or 1
    steps = [sum(window.steps for window in rank.windows) for rank in ranks]
    return len(ranks) == count and MAX_CYCLES * min(steps) >= (plan.steps or 1)
