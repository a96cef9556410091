"""Median polish: every reading's logarithm is its rung's part, its process tree's, and a rest.

Parts are fitted by medians in turn (J. W. Tukey, Exploratory Data Analysis, 1977, chapter 11), so
that one disturbed run moves none. Rungs that share process trees are fitted with each other first:
what a tree does to all of them cancels between them, also where one was in more rounds than
another. What trees of a round have in common is the round's part, as far as they agree on it
(method of moments of a random effect: S. R. Searle and others, Variance Components, 1992,
chapter 3): one tree that was slow is no round that was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, median
from typing import TypeVar

from nfold.explain.design import Trial

MAX_SWEEPS = 30
SHORT_STEP_RATIO = 0.25
"""Of the longest step: shorter ones tell nothing about a round. A fifth of 50 µs is 10 µs, which
are no fifth of 800."""
MEDIAN_ERROR_RATIO = 1.2
"""A median of a few normal values scatters by so much more than their mean."""

MetricKey = tuple[Trial, str]
ValuesByRound = Mapping[int, float]
TrialRun = tuple[Trial, int]
"""A rung in a round."""
Decomposition = tuple[dict[MetricKey, float], dict[MetricKey, dict[int, float]]]
"""Every reading's part, and what is left of its runs when the round's part is taken away too."""
Member = TypeVar("Member")


def log_values(rounds: ValuesByRound) -> dict[int, float]:
    """The logarithm of a reading in every round."""
    return {number: math.log(max(value, 1e-9)) for number, value in rounds.items()}


def polish_cycles(logs: Mapping[MetricKey, ValuesByRound]) -> Decomposition:
    """Of rungs that all had their turn in every cycle of one process tree."""
    of_cycle = _round_effects(_only_steps(logs), fmean)
    of_key = {k: median(v - of_cycle[n] for n, v in r.items()) for k, r in logs.items()}
    return of_key, _residuals(logs, of_key, of_cycle)


def polish_rounds(
    logs: Mapping[MetricKey, ValuesByRound], shared: Mapping[TrialRun, str]
) -> Decomposition:
    """Of runs; ``shared`` names the process trees of those that had one with others."""
    steps = _only_steps(logs)
    kinds = _interleaving_groups((rung for rung, _ in steps), shared)
    members: dict[int, dict[MetricKey, ValuesByRound]] = {}
    for key, rounds in steps.items():
        members.setdefault(kinds[key[0]], {})[key] = rounds
    of_tree = {kind: _round_effects(of_kind, median) for kind, of_kind in members.items()}
    numbers = {number: 0.0 for rounds in steps.values() for number in rounds}
    of_round = {
        **numbers,
        **_shrunk_round_effects({kind: of_tree[kind] for kind in _groups_with_long_steps(members)}),
    }
    of_kind = {k: median(t - of_round[n] for n, t in r.items()) for k, r in of_tree.items()}
    of_key = {}
    for key, rounds in logs.items():
        kind = kinds[key[0]]
        tree = of_tree[kind]
        of_key[key] = of_kind[kind] + median(v - tree[n] for n, v in rounds.items())
    return of_key, _residuals(logs, of_key, of_round)


def _groups_with_long_steps(members: Mapping[int, Mapping[MetricKey, ValuesByRound]]) -> list[int]:
    longest = {
        kind: max(median(rounds.values()) for rounds in of_kind.values())
        for kind, of_kind in members.items()
    }
    least = max(longest.values(), default=0.0) + math.log(SHORT_STEP_RATIO)
    return [kind for kind, value in longest.items() if value >= least]


def _only_steps(logs: Mapping[MetricKey, ValuesByRound]) -> dict[MetricKey, ValuesByRound]:
    return {key: rounds for key, rounds in logs.items() if key[1] == "step"}


def _residuals(
    logs: Mapping[MetricKey, ValuesByRound],
    of_key: Mapping[MetricKey, float],
    of_round: ValuesByRound,
) -> dict[MetricKey, dict[int, float]]:
    return {k: {n: v - of_key[k] - of_round[n] for n, v in r.items()} for k, r in logs.items()}


def _interleaving_groups(
    trials: Iterable[Trial], shared: Mapping[TrialRun, str]
) -> dict[Trial, int]:
    kinds = {rung: number for number, rung in enumerate(trials)}
    trees: dict[str, list[Trial]] = {}
    for (rung, _), tree in shared.items():
        if rung in kinds:
            trees.setdefault(tree, []).append(rung)
    for members in trees.values():
        joined = {kinds[rung] for rung in members}
        kinds = {r: min(joined) if kind in joined else kind for r, kind in kinds.items()}
    return kinds


def _round_effects(
    table: Mapping[Member, ValuesByRound], centre: Callable[[Iterable[float]], float]
) -> dict[int, float]:
    numbers = sorted({number for rounds in table.values() for number in rounds})
    of_round = dict.fromkeys(numbers, 0.0)
    for _ in range(MAX_SWEEPS if len(numbers) > 1 else 0):
        votes = _deviations_by_round(table, of_round)
        moved = {number: median(votes.get(number) or [0.0]) for number in numbers}
        middle = centre(moved.values())
        of_round = {number: value - middle for number, value in moved.items()}
    return of_round


def _deviations_by_round(
    table: Mapping[Member, ValuesByRound], of_round: ValuesByRound
) -> dict[int, list[float]]:
    votes: dict[int, list[float]] = {}
    for rounds in table.values():
        if len(rounds) > 1:
            own = median(value - of_round[number] for number, value in rounds.items())
            for number, value in rounds.items():
                votes.setdefault(number, []).append(value - own)
    return votes


def _shrunk_round_effects(of_tree: Mapping[int, ValuesByRound]) -> dict[int, float]:
    of_round = _round_effects(of_tree, fmean)
    votes = _deviations_by_round(of_tree, of_round)
    kinds = sum(len(rounds) > 1 for rounds in of_tree.values())
    free = sum(map(len, votes.values())) - kinds - len(votes) + 1
    between = sum(of_round[number] ** 2 for number in votes) / max(1, len(votes) - 1)
    if free < 1 or between == 0:
        return dict.fromkeys(of_round, 0.0)
    inside = sum((v - of_round[n]) ** 2 for n, each in votes.items() for v in each) / free
    of_mean = inside * fmean(1 / len(each) for each in votes.values())
    kept = max(0.0, 1 - of_mean / between)
    return {number: kept * value for number, value in of_round.items()}
