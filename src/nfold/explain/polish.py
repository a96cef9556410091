"""Median polish: every reading's logarithm is its rung's part, its round's, and a rest.

Both parts are fitted by medians in turn (J. W. Tukey, Exploratory Data Analysis, 1977, chapter 11),
so that one disturbed run moves neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, median

from nfold.explain.ladder import Rung

SWEEPS = 10
OF_MEDIAN = 1.2
"""A median of a few normal values scatters by so much more than their mean."""

Key = tuple[Rung, str]
Rounds = Mapping[int, float]


def logs(rounds: Rounds) -> dict[int, float]:
    """The logarithm of a reading in every round."""
    return {number: math.log(max(value, 1e-9)) for number, value in rounds.items()}


def polished(
    logs: Mapping[Key, Mapping[int, float]],
) -> tuple[dict[Key, float], dict[Key, dict[int, float]]]:
    """Every rung's part, and what is left when the round's is taken away too."""
    numbers = sorted({number for rounds in logs.values() for number in rounds})
    of_round = dict.fromkeys(numbers, 0.0)
    of_key: dict[Key, float] = {}
    fitted = {key: rounds for key, rounds in logs.items() if key[1] == "step"}
    for _ in range(SWEEPS if len(numbers) > 1 else 1):
        of_key = {k: median(v - of_round[n] for n, v in r.items()) for k, r in fitted.items()}
        rests = {k: {n: v - of_key[k] for n, v in r.items()} for k, r in fitted.items()}
        moved = {n: median([r[n] for r in rests.values() if n in r] or [0.0]) for n in numbers}
        centre = fmean(moved.values())
        of_round = {n: value - centre for n, value in moved.items()}
    of_key = {k: median(v - of_round[n] for n, v in r.items()) for k, r in logs.items()}
    left = {k: {n: v - of_key[k] - of_round[n] for n, v in r.items()} for k, r in logs.items()}
    return of_key, left
