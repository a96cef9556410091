"""Fit the metrics of all trials, with intervals from resamples.

The logarithm of a metric is the sum of an effect of its trial, an effect of its round (the machine
drifts, and a round is short) as far as process trees agree on it, and a residual
(``median_polish``). Trials that shared a process tree share a part of their residuals, which
cancels in their contrasts, and have one of their own. Resamples are the fitted effects with normal
errors of trees and runs (a parametric bootstrap: Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 6), as large as the residuals of all trees and of the trial are, widened for
the few there are (``uncertainty``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nfold.core.plan import Plan
from nfold.core.stats import CONFIDENCE_LEVEL, Interval
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
from nfold.explain.estimate.replay import Deviations, mean_deviations
from nfold.explain.estimate.samples import Samples
from nfold.explain.metrics import ADDITIVE_METRICS
from nfold.explain.result.budget import MIN_STEP_FRACTION, exceeds_noise

RESAMPLES = 500
WINDOW_METRICS = ("step", "loading", "waiting", "host_gap")  # of the same steps: share one error
EPOCH_METRICS = ("gap", "first")  # of the same epoch boundaries: they share one error

Statistic = Callable[["MetricView"], Samples]
Value = TypeVar("Value")
# Residuals of the steps by trial or process tree, round and trial.
StepResiduals = dict[object, dict[int, dict[Trial, float]]]
BatchDeviations = Mapping[tuple[Plan, str], Deviations]  # by plan and metric


@dataclass(frozen=True)
class MetricView:
    """Every metric of every trial: the fitted values, or arrays of them and their resamples.

    ``reference`` are the ranks that represent one device if ranks do not synchronize. ``final`` is
    whether nothing more will be measured. ``failed_trials`` could not run.
    """

    values: Mapping[MetricKey, Samples]
    reference: tuple[int, ...] = ()
    final: bool = True
    failed_trials: frozenset[Trial] = frozenset()

    def metric(self, trial: Trial, name: str) -> Samples | None:
        """Return a metric of ``nfold.explain.metrics``, None if it is unknown."""
        return self.values.get((trial, name))

    def step(self, trial: Trial) -> Samples:
        """Milliseconds of a step."""
        return self.values[trial, "step"]

    def reference_step(self, trial: Trial) -> Samples:
        """Milliseconds of a step of the reference ranks by themselves."""
        found = [self.values.get((trial, f"rank {k}")) for k in self.reference]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known else self.step(trial)

    def step_by_rank(self, trial: Trial) -> dict[int, Samples]:
        """Milliseconds of a step of every rank, if ranks do not synchronize."""
        return _steps_by_rank(self.values, lambda one: one == trial)

    def slowest_rank_step(self, trial: Trial) -> Samples:
        """Milliseconds of a step if ranks did synchronize."""
        return self.values[trial, "slowest"]

    def epoch_gap(self, trial: Trial) -> Samples:
        """Milliseconds per step between epochs."""
        gap = self._epoch_metric(trial, "gap")
        assert gap is not None
        return gap

    def first_batch_wait(self, trial: Trial) -> Samples:
        """Milliseconds per step of waiting for the first batch of an epoch."""
        first = self._epoch_metric(trial, "first")
        return 0.0 if first is None else first

    def periodic_ms(self, trial: Trial) -> Samples:
        """Milliseconds per step of periodic work."""
        return self.values[trial, "periodic"]

    def has_periodic(self, trial: Trial) -> bool:
        """Return whether periodic work is known: enough of it, or none in long enough a time."""
        return (trial, "periodic") in self.values

    def has_epoch_gap(self, trial: Trial) -> bool:
        """Return whether an epoch ended while the trial was measured, over steps or whole epochs."""
        return self._epoch_metric(trial, "gap") is not None

    def loading_and_waiting(self, trial: Trial) -> tuple[Samples, Samples]:
        """Milliseconds per step of making batches, and the part of them spent waiting."""
        return self.values.get((trial, "loading"), 0.0), self.values.get((trial, "waiting"), 0.0)

    def has(self, *trials: Trial) -> bool:
        """Return whether all trials were measured."""
        return all((trial, "step") in self.values for trial in trials)

    def _epoch_metric(self, trial: Trial, name: str) -> Samples | None:
        found = self.metric(trial, name)
        if found is None:
            found = self.metric(over_whole_epochs(trial), name)
        return self.metric(over_short_epochs(trial), name) if found is None else found


class BootstrapFit:
    """The fitted values of all metrics, and resamples of them."""

    def __init__(
        self,
        table: Mapping[MetricKey, ValuesByRound],
        standard_errors: Sequence[tuple[Trial, float]],
        resamples: int = RESAMPLES,
        process_trees: Mapping[TrialRun, str] | None = None,
        within_errors: Mapping[TrialRun, float] | None = None,
        batch_deviations: BatchDeviations | None = None,
        *,
        final: bool = True,
        host_ahead: Collection[Trial] = (),
        failed_trials: Collection[Trial] = (),
    ) -> None:
        """Fit ``table``, the values of every metric by round.

        ``process_trees`` names the tree of every run that shared one. The relative
        ``standard_errors`` of runs, and ``within_errors`` of interleaved runs, are prior errors.
        ``batch_deviations`` are those of the replayed batches of a plan, in milliseconds, by index
        (``replay.batch_deviations``). Trials in ``host_ahead`` have smaller errors: their hosts are
        ahead of the devices.
        """
        self._rounds = {key: tuple(rounds) for key, rounds in table.items()}
        self._process_trees = process_trees or {}
        self._batch_deviations = batch_deviations or {}
        self._host_ahead = frozenset(host_ahead)
        self._additive = {
            key: [*r.values()] for key, r in table.items() if key[1] in ADDITIVE_METRICS
        }
        logs = {key: log_values(r) for key, r in table.items() if key not in self._additive}
        self._effects, residuals = polish_rounds(logs, self._process_trees)
        steps = {key: own for key, own in residuals.items() if key[1] == "step"}
        of_trees, of_runs, free = _split_residuals(steps, self._process_trees)
        self.degrees_of_freedom = _degrees_of_freedom(of_trees)
        self._batches_vary = _batches_vary(table, self._batch_deviations)
        self._tree_errors: dict[tuple[bool, bool], float] = {}
        self._run_errors: dict[TrialRun, float] = {}
        for ahead in (False, True):
            for varies in (False, True):
                own = [e for one, e in standard_errors if self._kind(one) == (ahead, varies)]
                errors = own or [e for one, e in standard_errors if self._kind(one)[0] == ahead]
                self._tree_errors[ahead, varies] = self._tree_error(of_trees, errors, ahead, varies)
            self._run_errors |= self._interleaved_errors(of_runs, free, within_errors or {}, ahead)
        fitted = {key: self._fitted_value(key) for key in self._rounds}
        reference = _reference_ranks(fitted, self._relative_error)
        self.view = MetricView(fitted, reference, final, frozenset(failed_trials))
        self._resamples = resamples
        self._sampled_view: MetricView | None = None

    def value(self, statistic: Statistic) -> float:
        """Return a statistic of the fitted values."""
        return float(statistic(self.view))

    def interval(self, statistic: Statistic) -> Interval:
        """Return a statistic of a view with its 95 % interval."""
        if self._sampled_view is None:
            self._sampled_view = dataclasses.replace(self.view, values=self._sampled_values())
        tail = (1 - CONFIDENCE_LEVEL) / 2
        drawn = statistic(self._sampled_view)
        low, high = np.quantile(drawn, (tail, 1 - tail), method="nearest")  # may be infinite
        point = self.value(statistic)
        return Interval(point, min(float(low), point), max(float(high), point))

    def is_significant(self, loss: Interval, statistic: Statistic, step: Statistic) -> bool:
        """Return whether ``loss``, the interval of a statistic, exceeds the noise.

        It may also exceed the noise as a share of the step: process trees that differ as a whole
        leave the share of a large loss unchanged.
        """
        step_ms = self.value(step)
        return loss.value > MIN_STEP_FRACTION * step_ms and (
            exceeds_noise(loss, step_ms)
            or exceeds_noise(self.interval(lambda view: statistic(view) / step(view)), 1.0)
        )

    def _fitted_value(self, key: MetricKey) -> float:
        return fmean(self._additive[key]) if key in self._additive else math.exp(self._effects[key])

    def _sampled_values(self) -> dict[MetricKey, Samples]:
        """Return the resamples of all values. Metrics of the same time share their draws."""
        draws = np.random.default_rng(0)
        trees = {
            tree: draws.standard_normal(self._resamples)
            for tree in dict.fromkeys(self._process_trees.values())
        }
        batches = self._sampled_batches(draws)
        errors: dict[Hashable, NDArray[np.float64]] = {}
        choices: dict[Hashable, NDArray[np.int64]] = {}
        found: dict[MetricKey, Samples] = {}
        for key, rounds in self._rounds.items():
            same = _shared_error_key(key)
            if same not in errors:
                drawn = [self._run_error((key[0], number), draws, trees) for number in rounds]
                factor = MEDIAN_ERROR_RATIO if len(rounds) > 2 else 1.0
                errors[same] = factor * np.mean(drawn, axis=0)
            if key in self._additive:
                values = np.array(self._additive[key])
                if (*same, len(values)) not in choices:
                    size = (self._resamples, len(values))
                    choices[*same, len(values)] = draws.integers(len(values), size=size)
                found[key] = values[choices[*same, len(values)]].mean(axis=1) * np.exp(errors[same])
                continue
            found[key] = np.exp(self._effects[key] + errors[same])
            if key[0].variant.input != "real" and key[0].plan in batches:
                found[key] = np.maximum(found[key] + batches[key[0].plan], 0.0)
        return found

    def _sampled_batches(self, draws: np.random.Generator) -> dict[Plan, NDArray[np.float64]]:
        """Return resamples of the mean replayed batch of every plan, less that of the sample.

        Batches with the same index share their draws: plans that replay the same batches have the
        same error, and plans whose batches are not related have independent ones.
        """
        each = {plan: self._deviations_of(plan) for plan, _ in self._batch_deviations}
        shared = draws.standard_normal((self._resamples, max(map(len, each.values()), default=0)))
        return {plan: shared[:, : len(own)] @ own for plan, own in each.items()}

    def _deviations_of(self, plan: Plan) -> Deviations:
        # Those of the ranks that other plans are compared with, if they ran by themselves.
        own = {name: each for (one, name), each in self._batch_deviations.items() if one == plan}
        reference = [own[name] for k in self.view.reference if (name := f"rank {k}") in own]
        found = mean_deviations(reference or [*own.values()])
        return uncertainty.student_factor(len(found) - 1) * found

    def _run_error(
        self,
        run: TrialRun,
        draws: np.random.Generator,
        trees: Mapping[str, NDArray[np.float64]],
    ) -> NDArray[np.float64]:
        tree = self._process_trees.get(run)
        if tree is None:
            return self._relative_error(run[0]) * draws.standard_normal(self._resamples)
        error = self._tree_errors[run[0] in self._host_ahead, False]
        own = self._run_errors[run] * draws.standard_normal(self._resamples)
        return error * trees[tree] + own

    def _relative_error(self, trial: Trial) -> float:
        return self._tree_errors[self._kind(trial)]

    def _kind(self, trial: Trial) -> tuple[bool, bool]:
        """Return whether hosts are ahead, and whether the work differs from run to run."""
        varies = self._batches_vary and trial.variant.input == "real"
        return trial in self._host_ahead, varies

    def _tree_error(
        self, residuals: StepResiduals, standard_errors: Sequence[float], ahead: bool, varies: bool
    ) -> float:
        # By whether hosts are ahead: the noise of hosts that are not affects only their trials.
        # Other batches in every run are no error of a tree. They affect only trials that run
        # alone: in a shared tree they are part of the run's own error.
        repeated = [rounds.values() for rounds in residuals.values() if len(rounds) > 1]
        kind = (ahead, varies)
        trees = [
            [residual for trial, residual in trials.items() if self._kind(trial) == kind]
            for rounds in repeated
            for trials in rounds
            if not varies or len(trials) == 1
        ]
        own = [fmean(each) for each in trees if each]
        freedom = self.degrees_of_freedom * len(own) / len(trees) if trees else 0.0
        return uncertainty.run_error(own, freedom, standard_errors, host_ahead=ahead)

    def _interleaved_errors(
        self,
        residuals: Mapping[Trial, ValuesByRound],
        degrees_of_freedom: int,
        within_errors: Mapping[TrialRun, float],
        ahead: bool,
    ) -> dict[TrialRun, float]:
        repeated = {one: [*rounds.values()] for one, rounds in residuals.items() if len(rounds) > 1}
        own = self._with_host_ahead(repeated, ahead)
        count, total = (sum(map(len, each.values())) for each in (own, repeated))
        freedom = degrees_of_freedom * count / total if total else 0.0
        trees = {
            run: tree
            for run, tree in self._process_trees.items()
            if (run[0] in self._host_ahead) == ahead
        }
        return uncertainty.interleaving_errors(own, freedom, within_errors, trees, host_ahead=ahead)

    def _with_host_ahead(self, members: Mapping[Trial, Member], ahead: bool) -> dict[Trial, Member]:
        return {one: value for one, value in members.items() if (one in self._host_ahead) == ahead}


def _batches_vary(table: Mapping[MetricKey, ValuesByRound], deviations: BatchDeviations) -> bool:
    """Return whether a mean step depends on its batches more than on its process tree."""
    errors = [(plan, float(np.linalg.norm(own))) for (plan, _), own in deviations.items()]
    return any(
        error > uncertainty.INTER_TREE_ERROR_HOST_AHEAD * max(rounds.values())
        for plan, error in errors
        for (trial, name), rounds in table.items()
        if name == "step" and trial.plan == plan
    )


def _shared_error_key(key: MetricKey) -> tuple[Hashable, ...]:
    trial, name = key
    for same in (WINDOW_METRICS, EPOCH_METRICS):
        if name in same:
            return (trial, same)
    return key


def _split_residuals(
    residuals: Mapping[MetricKey, ValuesByRound], process_trees: Mapping[TrialRun, str]
) -> tuple[StepResiduals, Mapping[Trial, ValuesByRound], int]:
    """Split residuals into those of process trees and those of runs within them.

    Trees of different rounds with the same trials belong together. Returns also the degrees of
    freedom within trees: those of all trials of a tree but one.
    """
    trees: dict[tuple[str, int], dict[Trial, float]] = {}
    of_trees: StepResiduals = {}
    within: dict[Trial, dict[int, float]] = {}
    free: dict[Trial, dict[int, float]] = {}
    for (trial, _), rounds in residuals.items():
        for number, residual in rounds.items():
            tree = process_trees.get((trial, number))
            if tree is None:
                of_trees.setdefault(trial, {})[number] = {trial: residual}
            else:
                trees.setdefault((tree, number), {})[trial] = residual
    for (_, number), members in trees.items():
        middle = median(members.values())
        of_trees.setdefault(frozenset(members), {})[number] = members
        for trial, residual in members.items():
            within.setdefault(trial, {})[number] = residual - middle
        for trial in list(members)[1:]:
            free.setdefault(trial, {})[number] = within[trial][number]
    return of_trees, within, _degrees_of_freedom(free)


def _degrees_of_freedom(residuals: Mapping[Any, Mapping[int, object]]) -> int:
    repeated = [rounds for rounds in residuals.values() if len(rounds) > 1]
    rounds = {number for one in repeated for number in one}
    return sum(map(len, repeated)) - len(repeated) - max(0, len(rounds) - 1)


def _steps_by_rank(
    values: Mapping[MetricKey, Value], accepts: Callable[[Trial], bool]
) -> dict[int, Value]:
    return {
        int(name.removeprefix("rank ")): value
        for (trial, name), value in values.items()
        if name.startswith("rank") and accepts(trial)
    }


def _has_no_all_reduce(trial: Trial) -> bool:
    return trial.variant.exchange == "none"


def _is_replica(trial: Trial) -> bool:
    return trial.variant.independent and not trial.variant.exchange_after_backward


def _reference_ranks(
    values: Mapping[MetricKey, float], relative_error: Callable[[Trial], float]
) -> tuple[int, ...]:
    """Return the ranks that represent one device.

    All ranks, unless ranks without communication differ by more than noise: then the fastest, or
    rank 0 if its step is nearer to that of one device alone, which is the same device. Replicas
    replace ranks without all-reduce, but not if one process drives all devices.
    """
    if any(trial.plan.strategy == "dp" for trial, _ in values):
        return ()
    usual = {key: value for key, value in values.items() if not key[0].variant.devices}
    own = _steps_by_rank(usual, _has_no_all_reduce) or _steps_by_rank(usual, _is_replica)
    if not own:
        return ()
    fastest = min(own, key=lambda rank: own[rank])
    spread = max(own.values()) / own[fastest] - 1
    error = max(relative_error(trial) for trial, name in values if name.startswith("rank"))
    if spread <= max(0.02, 3 * error):
        return tuple(sorted(own))
    single = _one_device_step(values)
    if single is None or 0 not in own:
        return (fastest,)
    return (min((0, fastest), key=lambda rank: abs(own[rank] - single)),)


def _one_device_step(values: Mapping[MetricKey, float]) -> float | None:
    """Return the step of one device alone with the input and batch of the ranks, None if unknown."""
    work = {
        (trial.variant.input, -(-(trial.plan.batch or 1) // (trial.plan.devices or 1)))
        for trial, name in values
        if name.startswith("rank") and (_has_no_all_reduce(trial) or _is_replica(trial))
    }
    found = [
        value
        for (trial, name), value in values.items()
        if name == "step"
        and trial.plan.devices == 1
        and trial.variant == Variant(input=trial.variant.input)
        and (trial.variant.input, trial.plan.batch) in work
    ]
    return median(found) if found else None
