"""From one run in which experiments took turns to a measurement of each. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nfold.ablation import Ablation
from nfold.measurement import Measurement, RankSamples, cell_id
from nfold.run import checks


def apart(whole: Measurement, turns: Sequence[Ablation]) -> list[Measurement]:
    """One for each of the turns, in their order, with its own windows; all have one folder.

    Where the run failed, each has failed.
    """
    ranks = [rank.divided(rank.turns, len(turns)) for rank in whole.ranks]
    return [
        _of_turn(whole, left_out, tuple(parts[turn] for parts in ranks))
        for turn, left_out in enumerate(turns)
    ]


def _of_turn(whole: Measurement, left_out: Ablation, ranks: tuple[RankSamples, ...]) -> Measurement:
    cell = cell_id(whole.workload, whole.plan, left_out or None, whole.machine)
    found = checks.doubts(ranks, left_out or None) if whole.status == "ok" else []
    return dataclasses.replace(
        whole,
        id=f"{cell}-{whole.repeat}-{whole.id.rpartition('-')[2]}",
        ablation=left_out or None,
        ranks=ranks,
        energy_joules=None,
        warnings=(*found, *whole.warnings),
    )
