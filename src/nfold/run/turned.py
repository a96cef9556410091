"""From one run in which experiments took turns to a measurement of each. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nfold.ablation import Ablation
from nfold.measurement import Measurement, RankSamples, Status, cell_id
from nfold.plan import Plan
from nfold.run import checks
from nfold.turns import CYCLES


def apart(whole: Measurement, turns: Sequence[Ablation]) -> list[Measurement]:
    """One for each of the turns, in their order, with its own windows; all have one folder.

    Where the run failed, those that had a turn on all ranks before are ok, with the cause that
    ended it; the others have failed.
    """
    ranks = [rank.divided(rank.turns, len(turns)) for rank in whole.ranks]
    return [
        _of_turn(whole, left_out, tuple(parts[turn] for parts in ranks))
        for turn, left_out in enumerate(turns)
    ]


def _of_turn(whole: Measurement, left_out: Ablation, ranks: tuple[RankSamples, ...]) -> Measurement:
    cell = cell_id(whole.workload, whole.plan, left_out or None, whole.machine)
    status: Status = "ok" if _had_one(whole.plan, ranks) else whole.status
    found = checks.doubts(ranks, left_out or None) if status == "ok" else []
    return dataclasses.replace(
        whole,
        id=f"{cell}-{whole.repeat}-{whole.id.rpartition('-')[2]}",
        status=status,
        ablation=left_out or None,
        ranks=ranks,
        energy_joules=None,
        warnings=(*found, *whole.warnings),
    )


def _had_one(plan: Plan, ranks: Sequence[RankSamples]) -> bool:
    """Whether every rank has a part of the steps, 1 in CYCLES or more."""
    count = 1 if plan.strategy == "dp" else plan.devices or 1
    steps = [sum(window.steps for window in rank.windows) for rank in ranks]
    return len(ranks) == count and CYCLES * min(steps) >= (plan.steps or 1)
