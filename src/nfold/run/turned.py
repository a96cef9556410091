"""From one run in which experiments took turns to a measurement of each. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nfold.ablation import Ablation
from nfold.measurement import Measurement, RankSamples, Window, cell_id
from nfold.run import checks


def apart(whole: Measurement, turns: Sequence[Ablation]) -> list[Measurement]:
    """One for each of the turns, in their order, with its own windows; all have one folder.

    Where the run failed, each has failed.
    """
    return [_of_turn(whole, turn, left_out) for turn, left_out in enumerate(turns)]


def _of_turn(whole: Measurement, turn: int, left_out: Ablation) -> Measurement:
    cell = cell_id(whole.workload, whole.plan, left_out or None, whole.machine)
    ranks = tuple(_windows_of(rank, turn) for rank in whole.ranks)
    found = checks.doubts(ranks, left_out or None) if whole.status == "ok" else []
    return dataclasses.replace(
        whole,
        id=f"{cell}-{whole.repeat}-{whole.id.rpartition('-')[2]}",
        ablation=left_out or None,
        ranks=ranks,
        energy_joules=None,
        warnings=(*found, *whole.warnings),
    )


def _windows_of(rank: RankSamples, turn: int) -> RankSamples:
    windows: list[Window] = []
    times: list[float] = []
    first = 0
    for window, whose in zip(rank.windows, rank.turns, strict=True):
        if whose == turn:
            windows.append(window)
            times += rank.step_ms[first : first + window.steps]
        first += window.steps
    return dataclasses.replace(rank, windows=tuple(windows), step_ms=tuple(times), turns=())
