"""Median polish: every reading's logarithm is its rung's part, its round's, and a rest.

Both parts are fitted by medians in turn (J. W. Tukey, Exploratory Data Analysis, 1977, chapter 11),
so that one disturbed run moves neither. A round's part is then kept as far as its process trees
agree on it (method of moments of a random effect: S. R. Searle and others, Variance Components,
1992, chapter 3): one tree that was slow is no round that was.
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
Run = tuple[Rung, int]
"""A rung in a round."""


def logs(rounds: Rounds) -> dict[int, float]:
    """The logarithm of a reading in every round."""
    return {number: math.log(max(value, 1e-9)) for number, value in rounds.items()}


def polished(
    logs: Mapping[Key, Rounds], shared: Mapping[Run, str] | None = None
) -> tuple[dict[Key, float], dict[Key, dict[int, float]]]:
    """Every rung's part, and what is left when the round's is taken away too.

    ``shared`` names the process trees of runs that had one with others; without it rounds are taken
    as they are fitted.
    """
    fitted = {key: rounds for key, rounds in logs.items() if key[1] == "step"}
    trees = {} if shared is None else shared
    of_round = _fitted(fitted, trees)
    if shared is not None:
        kept = _kept(fitted, trees, of_round)
        of_round = {number: kept * value for number, value in of_round.items()}
    of_key = {k: median(v - of_round[n] for n, v in r.items()) for k, r in logs.items()}
    left = {k: {n: v - of_key[k] - of_round[n] for n, v in r.items()} for k, r in logs.items()}
    return of_key, left


def _fitted(logs: Mapping[Key, Rounds], trees: Mapping[Run, str]) -> dict[int, float]:
    """What each round does to all of its runs, 0 on average."""
    numbers = sorted({number for rounds in logs.values() for number in rounds})
    of_round = dict.fromkeys(numbers, 0.0)
    for _ in range(SWEEPS if len(numbers) > 1 else 0):
        votes = _votes(logs, trees, of_round)
        moved = {number: median(votes.get(number) or [0.0]) for number in numbers}
        centre = fmean(moved.values())
        of_round = {number: value - centre for number, value in moved.items()}
    return of_round


def _votes(
    logs: Mapping[Key, Rounds], trees: Mapping[Run, str], of_round: Rounds
) -> dict[int, list[float]]:
    """By round, by how much each of its process trees is above its rungs' parts.

    A rung that was run in one round only cannot tell.
    """
    found: dict[tuple[int, object], list[float]] = {}
    for (rung, _), rounds in logs.items():
        if len(rounds) > 1:
            own = median(value - of_round[number] for number, value in rounds.items())
            for number, value in rounds.items():
                tree = trees.get((rung, number), rung)
                found.setdefault((number, tree), []).append(value - own)
    votes: dict[int, list[float]] = {}
    for (number, _), members in found.items():
        votes.setdefault(number, []).append(median(members))
    return votes


def _kept(logs: Mapping[Key, Rounds], trees: Mapping[Run, str], of_round: Rounds) -> float:
    """The part of the rounds' variance that is not what single trees scatter by, 0 to 1."""
    votes = _votes(logs, trees, of_round)
    count = sum(map(len, votes.values()))
    sizes = max(map(len, votes.values()), default=0)
    free = count - sizes - len(votes) + 1
    between = sum(of_round[number] ** 2 for number in votes) / max(1, len(votes) - 1)
    if free < 1 or between == 0:
        return 0.0
    inside = sum((v - of_round[n]) ** 2 for n, each in votes.items() for v in each) / free
    of_mean = inside * fmean(1 / len(each) for each in votes.values())
    return max(0.0, 1 - of_mean / between)
