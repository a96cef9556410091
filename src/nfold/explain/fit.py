"""From readings to values with intervals: rungs and rounds told apart, residuals resampled.

The logarithm of a reading is taken as a sum: its rung's, its round's (the machine drifts, and a
round is short) as far as process trees agree on it, and a rest (``polish``). Rungs that shared a
process tree share a part of their rests, which does not count where they are compared with each
other, and have one of their own. Intervals come from a bootstrap of the rests of process trees,
pooled because no rung has many runs (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
chapter 9), and of normal errors as large as the own rests (``noise``), both widened by Student's t
for the few there are.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from nfold.ablation import Ablation
from nfold.explain import noise
from nfold.explain.polish import OF_MEDIAN, Key, Rounds, Run, What, logs, polished
from nfold.explain.readings import SUMS
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.finding import FLOOR, beyond
from nfold.stats import LEVEL, Interval, quantile

RESAMPLES = 500
HOSTS = (False, True)
"""Ahead of their devices or not."""
TOGETHER = ("step", "loading", "waiting")
"""Readings of the same windows: a loader that is slower makes the steps slower, too."""
ENDS = ("gap", "first")
"""Readings of the same ends of epochs: most of one may be waiting for a first batch."""
Number = Callable[["View"], float]
Left = dict[object, dict[int, dict[Rung, float]]]
"""Of rungs and of process trees, by round: what is left of every rung's step."""


class Fit:
    """The fitted values of all readings, and resamples of them."""

    def __init__(
        self,
        table: Mapping[Key, Rounds],
        scatters: Sequence[tuple[Rung, float]],
        resamples: int = RESAMPLES,
        shared: Mapping[Run, str] | None = None,
        inside: Mapping[Run, float] | None = None,
        *,
        final: bool = True,
        ahead: Collection[Rung] = (),
        failed: Collection[Rung] = (),
    ) -> None:
        """``shared`` names the process tree of every run that had one with others. ``failed`` are
        rungs that could not be run.

        Relative errors for where there are too few repeats: ``scatters`` of runs, and those of
        turns that were seen ``inside`` process trees; both are told apart by whether hosts are
        ``ahead`` of their devices, and then smaller.
        """
        self._rounds = {key: tuple(rounds) for key, rounds in table.items()}
        self._shared = shared or {}
        values = {key: logs(rounds) for key, rounds in table.items() if key[1] not in SUMS}
        self._effects, rests = polished(values, self._shared)
        self._sums = {key: [*r.values()] for key, r in table.items() if key[1] in SUMS}
        self._resamples = resamples
        steps = {key: own for key, own in rests.items() if key[1] == "step"}
        of_runs, of_turns, free = _divided(steps, self._shared)
        self.free = _free(of_runs)
        self._ahead = frozenset(ahead)
        self._of_runs = [self._runs(of_runs, scatters, ahead=host) for host in HOSTS]
        self._of_turns: dict[Run, float] = {}
        for host in HOSTS:
            self._of_turns |= self._turns(of_turns, free, inside or {}, ahead=host)
        fitted = self._values(None)
        self.view = View(fitted, _reference(fitted, self._scale), final, frozenset(failed))
        self._drawn: list[View] | None = None

    def interval(self, number: Number) -> Interval:
        """A number of a view with its 95 % interval."""
        drawn = sorted(number(view) for view in self._views())
        point, tail = number(self.view), (1 - LEVEL) / 2
        low, high = quantile(drawn, tail), quantile(drawn, 1 - tail)
        return Interval(point, min(low, point), max(high, point))

    def sure(self, lost: Interval, number: Number, step: Number) -> bool:
        """Whether what is lost, the interval of a number, is beyond the noise.

        Or as a part of the step: where steps scatter as wholes, most of one is most of each.
        """
        step_ms = step(self.view)
        return lost.value > FLOOR * step_ms and (
            beyond(lost, step_ms)
            or beyond(self.interval(lambda view: number(view) / step(view)), 1.0)
        )

    def _views(self) -> list[View]:
        if self._drawn is None:
            draws = random.Random(0)
            self._drawn = [
                dataclasses.replace(self.view, values=self._values(draws))
                for _ in range(self._resamples)
            ]
        return self._drawn

    def _values(self, draws: random.Random | None) -> dict[Key, float]:
        """Every reading's value, or one resample of it."""
        shared: dict[object, float] = {}
        return {key: self._value(key, draws, shared) for key in self._rounds}

    def _value(self, key: Key, draws: random.Random | None, shared: dict[object, float]) -> float:
        """What may be 0 or less has no logarithm: its runs' mean, as uncertain as their steps."""
        rounds, error = self._rounds[key], 0.0
        if draws is not None:
            errors = [self._error((key[0], number), draws, shared) for number in rounds]
            error = fmean(errors) * _wider(len(rounds))
            same = _same(key)
            error = error if same is None else shared.setdefault(same, error)
        if key in self._sums:
            return fmean(self._drawn_sums(key, draws, shared)) * math.exp(error)
        return math.exp(self._effects[key] + error)

    def _drawn_sums(
        self, key: Key, draws: random.Random | None, shared: dict[object, float]
    ) -> Sequence[float]:
        """Of what ends of epochs take and what of that is waited for, the same runs."""
        sums, same = self._sums[key], _same(key)
        if draws is None:
            return sums
        if same is None:
            return draws.choices(sums, k=len(sums))
        places = (shared.setdefault((same, n), draws.random()) for n in range(len(sums)))
        return [sums[int(place * len(sums))] for place in places]

    def _error(self, run: Run, draws: random.Random, shared: dict[object, float]) -> float:
        """One run's: its process tree's, and its own where others had their turns in that."""
        tree, ahead = self._shared.get(run), run[0] in self._ahead
        if tree is None:
            return self._of_runs[ahead].error(draws.random())
        if tree not in shared:
            shared[tree] = draws.random()
        own = self._of_turns[run] * draws.gauss(0, 1)
        return self._of_runs[ahead].error(shared[tree]) + own

    def _scale(self, rung: Rung) -> float:
        """The relative scatter of one run."""
        return self._of_runs[rung in self._ahead].scale

    def _runs(
        self, left: Left, scatters: Sequence[tuple[Rung, float]], *, ahead: bool
    ) -> noise.Noise:
        """Of process trees, as far as it meets those rungs whose hosts are ``ahead``, or not.

        What ranks that wait for their hosts differ by from run to run makes no others uncertain.
        """
        repeated = [each.values() for each in left.values() if len(each) > 1]
        kept = [self._of_host(members, ahead) for each in repeated for members in each]
        own = [fmean(members.values()) for members in kept if members]
        seen = [scatter for rung, scatter in scatters if (rung in self._ahead) == ahead]
        return noise.of_runs(own, _part(self.free, len(own), len(kept)), seen, ahead=ahead)

    def _turns(
        self, left: Mapping[Rung, Rounds], free: int, inside: Mapping[Run, float], *, ahead: bool
    ) -> dict[Run, float]:
        """The same of turns."""
        repeated = {rung: [*each.values()] for rung, each in left.items() if len(each) > 1}
        own = self._of_host(repeated, ahead)
        part = _part(free, *(sum(map(len, each.values())) for each in (own, repeated)))
        trees = {r: tree for r, tree in self._shared.items() if (r[0] in self._ahead) == ahead}
        return noise.of_turns(own, part, inside, trees, ahead=ahead)

    def _of_host(self, members: Mapping[Rung, What], ahead: bool) -> dict[Rung, What]:
        """Those whose hosts are ahead of their devices, or the others."""
        return {r: value for r, value in members.items() if (r in self._ahead) == ahead}


def _same(key: Key) -> object:
    """Readings of a rung of which one is a part of the other have the same error; None: its own."""
    rung, name = key
    if name in TOGETHER:
        return rung
    return (rung, ENDS) if name in ENDS else None


def _divided(
    rests: Mapping[Key, Rounds], shared: Mapping[Run, str]
) -> tuple[Left, Mapping[Rung, Rounds], int]:
    """What is left, by round: of runs and of process trees, and inside trees, with the degrees of
    freedom of the latter: those of all rungs of a tree but one.

    Trees of different rounds that the same rungs shared belong together.
    """
    trees: dict[tuple[str, int], dict[Rung, float]] = {}
    of_runs: Left = {}
    inside: dict[Rung, dict[int, float]] = {}
    free: dict[Rung, dict[int, float]] = {}
    for (rung, _), rounds in rests.items():
        for number, rest in rounds.items():
            tree = shared.get((rung, number))
            if tree is None:
                of_runs.setdefault(rung, {})[number] = {rung: rest}
            else:
                trees.setdefault((tree, number), {})[rung] = rest
    for (_, number), members in trees.items():
        middle = median(members.values())
        of_runs.setdefault(frozenset(members), {})[number] = members
        for rung, rest in members.items():
            inside.setdefault(rung, {})[number] = rest - middle
        for rung in list(members)[1:]:
            free.setdefault(rung, {})[number] = inside[rung][number]
    return of_runs, inside, _free(free)


def _wider(count: int) -> float:
    return OF_MEDIAN if count > 2 else 1.0


def _part(free: int, own: int, every: int) -> float:
    """Of degrees of freedom, as many as so many of all rests have."""
    return free * own / every if every else 0.0


def _free(rests: Mapping[Any, Mapping[int, object]]) -> int:
    """Degrees of freedom of the rests: runs, less rungs, less rounds but one."""
    repeated = [rounds for rounds in rests.values() if len(rounds) > 1]
    rounds = {number for one in repeated for number in one}
    return sum(map(len, repeated)) - len(repeated) - max(0, len(rounds) - 1)


def _unexchanged(left_out: Ablation) -> bool:
    return left_out.exchange == "none"


def _copied(left_out: Ablation) -> bool:
    return left_out.independent and not left_out.late_exchange


def _by_rank(values: Mapping[Key, float], alone: Callable[[Ablation], bool]) -> dict[int, float]:
    """Steps of ranks that are alone in this way, each on its own device."""
    return {
        int(name.removeprefix("rank ")): value
        for (rung, name), value in values.items()
        if name.startswith("rank") and alone(rung.ablation) and not rung.ablation.devices
    }


def _reference(values: Mapping[Key, float], scale: Callable[[Rung], float]) -> tuple[int, ...]:
    """All ranks; where ranks without an exchange differ by more than noise, the fastest, or the
    first where one device alone is as slow as that: it is the same device, and does its work.

    Copies tell it where no rank can be without one, but not where one process drives all devices.
    """
    if any(rung.plan.strategy == "dp" for rung, _ in values):
        return ()
    own = _by_rank(values, _unexchanged) or _by_rank(values, _copied)
    if not own:
        return ()
    fastest = min(own, key=lambda rank: own[rank])
    apart = max(own.values()) / own[fastest] - 1
    error = max(scale(rung) for rung, name in values if name.startswith("rank"))
    if apart <= max(0.02, 3 * error):
        return tuple(sorted(own))
    alone = _alone(values)
    if alone is None or 0 not in own:
        return (fastest,)
    return (min((0, fastest), key=lambda rank: abs(own[rank] - alone)),)


def _alone(values: Mapping[Key, float]) -> float | None:
    """A step of one device alone with its share of the batch, as ranks without an exchange have it;
    None before that is measured.
    """
    asked = {
        (rung.ablation.input, -(-(rung.plan.batch or 1) // (rung.plan.devices or 1)))
        for rung, name in values
        if name.startswith("rank") and (_unexchanged(rung.ablation) or _copied(rung.ablation))
    }
    found = [
        value
        for (rung, name), value in values.items()
        if name == "step"
        and rung.plan.devices == 1
        and rung.ablation == Ablation(input=rung.ablation.input)
        and (rung.ablation.input, rung.plan.batch) in asked
    ]
    return median(found) if found else None
