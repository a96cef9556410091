"""Median polish: the logarithm of a metric is a trial effect plus a round effect plus a residual.

Effects are fitted by alternating medians (J. W. Tukey, Exploratory Data Analysis, 1977, chapter
11), so that one disturbed run moves none. Trials that share process trees are fitted together
first: the effect of a tree cancels between them, even if one ran in more rounds than another. The
common effect of the trees of a round is the round effect, shrunk by how much they disagree (method
of moments of a random effect: S. R. Searle and others, Variance Components, 1992, chapter 3): one
slow tree does not make a slow round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, median
from typing import TypeVar

from nfold.explain.design import Trial

MAX_SWEEPS = 30
# Of the longest step. Shorter steps say nothing about a round: 10 of 50 µs are a fifth, which would
# be 160 of 800 µs.
SHORT_STEP_RATIO = 0.25
MEDIAN_ERROR_RATIO = 1.2  # standard error of the median of a few normal values over their mean's

MetricKey = tuple[Trial, str]
ValuesByRound = Mapping[int, float]
TrialRun = tuple[Trial, int]  # a trial in a round
# The effect of every metric, and its residuals by round.
Decomposition = tuple[dict[MetricKey, float], dict[MetricKey, dict[int, float]]]
Member = TypeVar("Member")


def log_values(rounds: ValuesByRound) -> dict[int, float]:
    return {number: math.log(max(value, 1e-9)) for number, value in rounds.items()}


def polish_cycles(logs: Mapping[MetricKey, ValuesByRound]) -> Decomposition:
    """Fit interleaved trials, which are in every cycle of one process tree."""
    cycle_effects = _round_effects(_only_steps(logs), fmean)
    effects = {k: median(v - cycle_effects[n] for n, v in r.items()) for k, r in logs.items()}
    return effects, _residuals(logs, effects, cycle_effects)


def polish_rounds(
    logs: Mapping[MetricKey, ValuesByRound], process_trees: Mapping[TrialRun, str]
) -> Decomposition:
    """Fit all runs; ``process_trees`` names the tree of every run that shared one."""
    steps = _only_steps(logs)
    groups = _interleaving_groups((trial for trial, _ in steps), process_trees)
    members: dict[int, dict[MetricKey, ValuesByRound]] = {}
    for key, rounds in steps.items():
        members.setdefault(groups[key[0]], {})[key] = rounds
    tree_effects = {group: _round_effects(own, median) for group, own in members.items()}
    numbers = {number: 0.0 for rounds in steps.values() for number in rounds}
    long_steps = {group: tree_effects[group] for group in _groups_with_long_steps(members)}
    round_effects = {**numbers, **_shrunk_round_effects(long_steps)}
    group_effects = {
        group: median(tree - round_effects[n] for n, tree in rounds.items())
        for group, rounds in tree_effects.items()
    }
    effects = {}
    for key, rounds in logs.items():
        group = groups[key[0]]
        own = median(v - tree_effects[group][n] for n, v in rounds.items())
        effects[key] = group_effects[group] + own
    return effects, _residuals(logs, effects, round_effects)


def _groups_with_long_steps(members: Mapping[int, Mapping[MetricKey, ValuesByRound]]) -> list[int]:
    longest = {
        group: max(median(rounds.values()) for rounds in own.values())
        for group, own in members.items()
    }
    least = max(longest.values(), default=0.0) + math.log(SHORT_STEP_RATIO)
    return [group for group, value in longest.items() if value >= least]


def _only_steps(logs: Mapping[MetricKey, ValuesByRound]) -> dict[MetricKey, ValuesByRound]:
    return {key: rounds for key, rounds in logs.items() if key[1] == "step"}


def _residuals(
    logs: Mapping[MetricKey, ValuesByRound],
    effects: Mapping[MetricKey, float],
    round_effects: ValuesByRound,
) -> dict[MetricKey, dict[int, float]]:
    return {
        k: {n: v - effects[k] - round_effects[n] for n, v in r.items()} for k, r in logs.items()
    }


def _interleaving_groups(
    trials: Iterable[Trial], process_trees: Mapping[TrialRun, str]
) -> dict[Trial, int]:
    groups = {trial: number for number, trial in enumerate(trials)}
    trees: dict[str, list[Trial]] = {}
    for (trial, _), tree in process_trees.items():
        if trial in groups:
            trees.setdefault(tree, []).append(trial)
    for members in trees.values():
        joined = {groups[trial] for trial in members}
        groups = {t: min(joined) if group in joined else group for t, group in groups.items()}
    return groups


def _round_effects(
    table: Mapping[Member, ValuesByRound], centre: Callable[[Iterable[float]], float]
) -> dict[int, float]:
    numbers = sorted({number for rounds in table.values() for number in rounds})
    effects = dict.fromkeys(numbers, 0.0)
    for _ in range(MAX_SWEEPS if len(numbers) > 1 else 0):
        deviations = _deviations_by_round(table, effects)
        moved = {number: median(deviations.get(number) or [0.0]) for number in numbers}
        middle = centre(moved.values())
        effects = {number: value - middle for number, value in moved.items()}
    return effects


def _deviations_by_round(
    table: Mapping[Member, ValuesByRound], effects: ValuesByRound
) -> dict[int, list[float]]:
    deviations: dict[int, list[float]] = {}
    for rounds in table.values():
        if len(rounds) > 1:
            own = median(value - effects[number] for number, value in rounds.items())
            for number, value in rounds.items():
                deviations.setdefault(number, []).append(value - own)
    return deviations


def _shrunk_round_effects(tree_effects: Mapping[int, ValuesByRound]) -> dict[int, float]:
    effects = _round_effects(tree_effects, fmean)
    deviations = _deviations_by_round(tree_effects, effects)
    groups = sum(len(rounds) > 1 for rounds in tree_effects.values())
    free = sum(map(len, deviations.values())) - groups - len(deviations) + 1
    between = sum(effects[number] ** 2 for number in deviations) / max(1, len(deviations) - 1)
    if free < 1 or between == 0:
        return dict.fromkeys(effects, 0.0)
    within = sum((v - effects[n]) ** 2 for n, each in deviations.items() for v in each) / free
    of_mean = within * fmean(1 / len(each) for each in deviations.values())
    kept = max(0.0, 1 - of_mean / between)
    return {number: kept * value for number, value in effects.items()}
