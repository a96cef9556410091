"""The fitted values of all rungs, as causes ask for them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from nfold.core.stats import CONFIDENCE_LEVEL, Interval, quantile
from nfold.core.variant import Variant
from nfold.explain.design import Trial, over_short_epochs, over_whole_epochs
from nfold.explain.estimate import uncertainty
from nfold.explain.estimate.median_polish import (
    MEDIAN_ERROR_RATIO,
    Member,
    MetricKey,
    TrialRun,
    ValuesByRound,
    log_values,
    polish_rounds,
)
from nfold.explain.metrics import ADDITIVE_METRICS
from nfold.explain.result.budget import MIN_STEP_FRACTION, exceeds_noise


@dataclass(frozen=True)
class MetricView:
    """One value for every reading of every rung: the fitted ones, or one resample of them.

    ``reference`` are the ranks that stand for one device where ranks do not wait. ``final`` where
    nothing more will be measured. ``failed`` are rungs that could not be run.
    """

    values: Mapping[MetricKey, float]
    reference: tuple[int, ...] = ()
    final: bool = True
    failed_trials: frozenset[Trial] = frozenset()
    epoch_metric_keys: dict[MetricKey, MetricKey | None] = field(
        default_factory=dict, compare=False, repr=False
    )
    cache: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def step(self, trial: Trial) -> float:
        """Milliseconds of a step."""
        return self.values[trial, "step"]

    def reference_step(self, trial: Trial) -> float:
        """Of the reference ranks by themselves."""
        found = [self.values.get((trial, f"rank {k}")) for k in self.reference]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known else self.step(trial)

    def step_by_rank(self, trial: Trial) -> dict[int, float]:
        """A step of every rank by itself, where ranks do not wait."""
        return {
            int(name.removeprefix("rank ")): value
            for (one, name), value in self.values.items()
            if one == trial and name.startswith("rank ")
        }

    def slowest_rank_step(self, trial: Trial) -> float:
        """What a step would take if ranks waited for each other."""
        return self.values[trial, "slowest"]

    def epoch_gap(self, trial: Trial) -> float:
        """Milliseconds a step between epochs."""
        place = self._epoch_metric_key(trial, "gap")
        assert place is not None
        return self.values[place]

    def first_batch_wait(self, trial: Trial) -> float:
        """Of the time between epochs, what is waited for an epoch's first batch."""
        place = self._epoch_metric_key(trial, "first")
        return 0.0 if place is None else self.values[place]

    def host_ahead(self, trial: Trial) -> float | None:
        """Milliseconds by which the host is ahead of its devices; None where nobody can tell."""
        return self.values.get((trial, "ahead"))

    def host_gap(self, trial: Trial) -> float | None:
        """Milliseconds between two steps in which a host usually does something else, of the rank
        where that is least; None where nobody can tell.
        """
        return self.values.get((trial, "pause"))

    def periodic_ms(self, trial: Trial) -> float:
        """Milliseconds a step of what is done after some steps only."""
        return self.values[trial, "recurring"]

    def period(self, trial: Trial) -> float | None:
        """The steps from one time to the next of what costs most of it."""
        return self.values.get((trial, "every"))

    def has_periodic(self, trial: Trial) -> bool:
        """Whether it is known, because there was enough of it, or none in long enough a time."""
        return (trial, "recurring") in self.values

    def has_epoch_gap(self, trial: Trial) -> bool:
        """Whether an epoch ended while the rung was measured, in steps or in whole epochs."""
        return self._epoch_metric_key(trial, "gap") is not None

    def loading_and_waiting(self, trial: Trial) -> tuple[float, float]:
        """Milliseconds a step in which batches are made, and those of them spent waiting."""
        return self.values.get((trial, "loading"), 0.0), self.values.get((trial, "waiting"), 0.0)

    def has(self, *rungs: Trial) -> bool:
        """Whether all of these were measured."""
        return all((rung, "step") in self.values for rung in rungs)

    def all_or_none(self, trials: tuple[Trial, ...]) -> tuple[Trial, ...]:
        """These, or none where one was not measured."""
        return trials if self.has(*trials) else ()

    def _epoch_metric_key(self, trial: Trial, metric: str) -> MetricKey | None:
        asked = (trial, metric)
        if asked not in self.epoch_metric_keys:
            every = (
                (one, metric) for one in (trial, over_whole_epochs(trial), over_short_epochs(trial))
            )
            self.epoch_metric_keys[asked] = next((key for key in every if key in self.values), None)
        return self.epoch_metric_keys[asked]


# From readings to values with intervals: rungs and rounds told apart, residuals resampled.
#
# The logarithm of a reading is taken as a sum: its rung's, its round's (the machine drifts, and a
# round is short) as far as process trees agree on it, and a rest (``polish``). Rungs that shared a
# process tree share a part of their rests, which does not count where they are compared with each
# other, and have one of their own. Intervals come from a bootstrap of the rests of process trees,
# pooled because no rung has many runs (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
# chapter 9), and of normal errors as large as the own rests (``noise``), both widened by Student's t
# for the few there are.

RESAMPLES = 500
HOST_AHEAD = (False, True)
"""Ahead of their devices or not."""
WINDOW_METRICS = ("step", "loading", "waiting")
"""Readings of the same windows: a loader that is slower makes the steps slower, too."""
EPOCH_METRICS = ("gap", "first")
"""Readings of the same ends of epochs: most of one may be waiting for a first batch."""
Statistic = Callable[["MetricView"], float]
StepResiduals = dict[object, dict[int, dict[Trial, float]]]
"""Of rungs and of process trees, by round: what is left of every rung's step."""


class BootstrapFit:
    """The fitted values of all readings, and resamples of them."""

    def __init__(
        self,
        table: Mapping[MetricKey, ValuesByRound],
        standard_errors: Sequence[tuple[Trial, float]],
        resamples: int = RESAMPLES,
        process_trees: Mapping[TrialRun, str] | None = None,
        within_errors: Mapping[TrialRun, float] | None = None,
        *,
        final: bool = True,
        host_ahead: Collection[Trial] = (),
        failed_trials: Collection[Trial] = (),
    ) -> None:
        """``shared`` names the process tree of every run that had one with others. ``failed`` are
        rungs that could not be run.

        Relative errors for where there are too few repeats: ``scatters`` of runs, and those of
        turns that were seen ``inside`` process trees; both are told apart by whether hosts are
        ``ahead`` of their devices, and then smaller.
        """
        self._rounds = {key: tuple(rounds) for key, rounds in table.items()}
        self._process_trees = process_trees or {}
        values = {
            key: log_values(rounds)
            for key, rounds in table.items()
            if key[1] not in ADDITIVE_METRICS
        }
        self._effects, rests = polish_rounds(values, self._process_trees)
        self._additive = {
            key: [*r.values()] for key, r in table.items() if key[1] in ADDITIVE_METRICS
        }
        self._resamples = resamples
        steps = {key: own for key, own in rests.items() if key[1] == "step"}
        of_runs, of_turns, free = _split_residuals(steps, self._process_trees)
        self.degrees_of_freedom = _degrees_of_freedom(of_runs)
        self._host_ahead = frozenset(host_ahead)
        self._run_errors = [
            self._run_error_model(of_runs, standard_errors, ahead=host) for host in HOST_AHEAD
        ]
        self._interleaving_errors: dict[TrialRun, float] = {}
        for host in HOST_AHEAD:
            self._interleaving_errors |= self._interleaving_error_model(
                of_turns, free, within_errors or {}, ahead=host
            )
        fitted = self._values(None)
        self.view = MetricView(
            fitted, _reference_ranks(fitted, self._relative_error), final, frozenset(failed_trials)
        )
        self._resampled: list[MetricView] | None = None

    def interval(self, statistic: Statistic) -> Interval:
        """A number of a view with its 95 % interval."""
        drawn = sorted(statistic(view) for view in self._resampled_views())
        point, tail = statistic(self.view), (1 - CONFIDENCE_LEVEL) / 2
        low, high = quantile(drawn, tail), quantile(drawn, 1 - tail)
        return Interval(point, min(low, point), max(high, point))

    def is_significant(self, loss: Interval, statistic: Statistic, step: Statistic) -> bool:
        """Whether what is lost, the interval of a number, is beyond the noise.

        Or as a part of the step: where steps scatter as wholes, most of one is most of each.
        """
        step_ms = step(self.view)
        return loss.value > MIN_STEP_FRACTION * step_ms and (
            exceeds_noise(loss, step_ms)
            or exceeds_noise(self.interval(lambda view: statistic(view) / step(view)), 1.0)
        )

    def _resampled_views(self) -> list[MetricView]:
        if self._resampled is None:
            draws = random.Random(0)
            self._resampled = [
                dataclasses.replace(self.view, values=self._values(draws))
                for _ in range(self._resamples)
            ]
        return self._resampled

    def _values(self, draws: random.Random | None) -> dict[MetricKey, float]:
        shared: dict[object, float] = {}
        return {key: self._value(key, draws, shared) for key in self._rounds}

    def _value(
        self, key: MetricKey, draws: random.Random | None, shared: dict[object, float]
    ) -> float:
        rounds, error = self._rounds[key], 0.0
        if draws is not None:
            errors = [self._error((key[0], number), draws, shared) for number in rounds]
            error = fmean(errors) * _median_factor(len(rounds))
            same = _shared_error_key(key)
            error = error if same is None else shared.setdefault(same, error)
        if key in self._additive:
            return fmean(self._resampled_additive(key, draws, shared)) * math.exp(error)
        return math.exp(self._effects[key] + error)

    def _resampled_additive(
        self, key: MetricKey, draws: random.Random | None, shared: dict[object, float]
    ) -> Sequence[float]:
        sums, same = self._additive[key], _shared_error_key(key)
        if draws is None:
            return sums
        if same is None:
            return draws.choices(sums, k=len(sums))
        places = (shared.setdefault((same, n), draws.random()) for n in range(len(sums)))
        return [sums[int(place * len(sums))] for place in places]

    def _error(self, run: TrialRun, draws: random.Random, shared: dict[object, float]) -> float:
        tree, ahead = self._process_trees.get(run), run[0] in self._host_ahead
        if tree is None:
            return self._run_errors[ahead].error(draws.random())
        if tree not in shared:
            shared[tree] = draws.random()
        own = self._interleaving_errors[run] * draws.gauss(0, 1)
        return self._run_errors[ahead].error(shared[tree]) + own

    def _relative_error(self, trial: Trial) -> float:
        return self._run_errors[trial in self._host_ahead].root_mean_square

    def _run_error_model(
        self, left: StepResiduals, scatters: Sequence[tuple[Trial, float]], *, ahead: bool
    ) -> uncertainty.ErrorModel:
        """Of process trees, as far as it meets those rungs whose hosts are ``ahead``, or not.

        What ranks that wait for their hosts differ by from run to run makes no others uncertain.
        """
        repeated = [each.values() for each in left.values() if len(each) > 1]
        kept = [self._with_host_ahead(members, ahead) for each in repeated for members in each]
        own = [fmean(members.values()) for members in kept if members]
        seen = [scatter for rung, scatter in scatters if (rung in self._host_ahead) == ahead]
        return uncertainty.run_error_model(
            own,
            _degrees_of_freedom_share(self.degrees_of_freedom, len(own), len(kept)),
            seen,
            host_ahead=ahead,
        )

    def _interleaving_error_model(
        self,
        left: Mapping[Trial, ValuesByRound],
        free: int,
        inside: Mapping[TrialRun, float],
        *,
        ahead: bool,
    ) -> dict[TrialRun, float]:
        repeated = {rung: [*each.values()] for rung, each in left.items() if len(each) > 1}
        own = self._with_host_ahead(repeated, ahead)
        part = _degrees_of_freedom_share(
            free, *(sum(map(len, each.values())) for each in (own, repeated))
        )
        trees = {
            r: tree
            for r, tree in self._process_trees.items()
            if (r[0] in self._host_ahead) == ahead
        }
        return uncertainty.interleaving_errors(own, part, inside, trees, host_ahead=ahead)

    def _with_host_ahead(self, members: Mapping[Trial, Member], ahead: bool) -> dict[Trial, Member]:
        return {r: value for r, value in members.items() if (r in self._host_ahead) == ahead}


def _shared_error_key(key: MetricKey) -> object:
    rung, name = key
    if name in WINDOW_METRICS:
        return rung
    return (rung, EPOCH_METRICS) if name in EPOCH_METRICS else None


def _split_residuals(
    residuals: Mapping[MetricKey, ValuesByRound], shared: Mapping[TrialRun, str]
) -> tuple[StepResiduals, Mapping[Trial, ValuesByRound], int]:
    """What is left, by round: of runs and of process trees, and inside trees, with the degrees of
    freedom of the latter: those of all rungs of a tree but one.

    Trees of different rounds that the same rungs shared belong together.
    """
    trees: dict[tuple[str, int], dict[Trial, float]] = {}
    of_runs: StepResiduals = {}
    inside: dict[Trial, dict[int, float]] = {}
    free: dict[Trial, dict[int, float]] = {}
    for (rung, _), rounds in residuals.items():
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
    return of_runs, inside, _degrees_of_freedom(free)


def _median_factor(count: int) -> float:
    return MEDIAN_ERROR_RATIO if count > 2 else 1.0


def _degrees_of_freedom_share(free: int, own: int, every: int) -> float:
    return free * own / every if every else 0.0


def _degrees_of_freedom(residuals: Mapping[Any, Mapping[int, object]]) -> int:
    repeated = [rounds for rounds in residuals.values() if len(rounds) > 1]
    rounds = {number for one in repeated for number in one}
    return sum(map(len, repeated)) - len(repeated) - max(0, len(rounds) - 1)


def _has_no_all_reduce(variant: Variant) -> bool:
    return variant.exchange == "none"


def _is_replica(variant: Variant) -> bool:
    return variant.independent and not variant.exchange_after_backward


def _steps_by_rank(
    values: Mapping[MetricKey, float], alone: Callable[[Variant], bool]
) -> dict[int, float]:
    return {
        int(name.removeprefix("rank ")): value
        for (rung, name), value in values.items()
        if name.startswith("rank") and alone(rung.variant) and not rung.variant.devices
    }


def _reference_ranks(
    values: Mapping[MetricKey, float], scale: Callable[[Trial], float]
) -> tuple[int, ...]:
    """All ranks; where ranks without an exchange differ by more than noise, the fastest, or the
    first where one device alone is as slow as that: it is the same device, and does its work.

    Copies tell it where no rank can be without one, but not where one process drives all devices.
    """
    if any(rung.plan.strategy == "dp" for rung, _ in values):
        return ()
    own = _steps_by_rank(values, _has_no_all_reduce) or _steps_by_rank(values, _is_replica)
    if not own:
        return ()
    fastest = min(own, key=lambda rank: own[rank])
    apart = max(own.values()) / own[fastest] - 1
    error = max(scale(rung) for rung, name in values if name.startswith("rank"))
    if apart <= max(0.02, 3 * error):
        return tuple(sorted(own))
    alone = _one_device_step(values)
    if alone is None or 0 not in own:
        return (fastest,)
    return (min((0, fastest), key=lambda rank: abs(own[rank] - alone)),)


def _one_device_step(values: Mapping[MetricKey, float]) -> float | None:
    """A step of one device alone with its share of the batch, as ranks without an exchange have it;
    None before that is measured.
    """
    asked = {
        (rung.variant.input, -(-(rung.plan.batch or 1) // (rung.plan.devices or 1)))
        for rung, name in values
        if name.startswith("rank")
        and (_has_no_all_reduce(rung.variant) or _is_replica(rung.variant))
    }
    found = [
        value
        for (rung, name), value in values.items()
        if name == "step"
        and rung.plan.devices == 1
        and rung.variant == Variant(input=rung.variant.input)
        and (rung.variant.input, rung.plan.batch) in asked
    ]
    return median(found) if found else None
