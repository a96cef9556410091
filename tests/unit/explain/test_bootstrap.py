"""Values and intervals of trials: rounds cancel, few runs are wide, ranks that differ are told."""

from __future__ import annotations

import random

import numpy as np
import pytest

from explaining import experiment_design
from nfold.core.variant import Variant
from nfold.explain.design import Trial, barrier_only, no_allreduce, over_short_epochs, replicas
from nfold.explain.estimate.bootstrap import BootstrapFit, MetricView, Statistic
from nfold.explain.estimate.median_polish import MetricKey
from nfold.explain.estimate.samples import Samples
from nfold.explain.result.budget import exceeds_noise

DESIGN = experiment_design(batch=200)
FULL, BARRIER, NONE = (
    DESIGN.actual(),
    barrier_only(DESIGN, "resident"),
    no_allreduce(DESIGN, "resident"),
)


def _difference(view: MetricView) -> Samples:
    return view.step(FULL) - view.step(BARRIER)


def test_what_a_round_does_to_all_trials_cancels() -> None:
    slow = {0: 1.0, 1: 1.3, 2: 0.8}
    table = {
        (FULL, "step"): {n: 12 * by for n, by in slow.items()},
        (BARRIER, "step"): {n: 10 * by for n, by in slow.items()},
        (DESIGN.baseline, "step"): {n: 20 * by for n, by in slow.items()},
    }
    found = BootstrapFit(table, []).interval(_difference)
    middle = (1.0 * 1.3 * 0.8) ** (1 / 3)
    assert found.value == pytest.approx(2 * middle)
    assert (found.low, found.high) == pytest.approx((found.value, found.value))


def test_a_trial_of_later_rounds_only_is_compared_fairly() -> None:
    table: dict[MetricKey, dict[int, float]] = {
        (FULL, "step"): {0: 12.0, 1: 24.0},
        (DESIGN.baseline, "step"): {0: 20.0, 1: 40.0},
        (BARRIER, "step"): {1: 20.0},
    }
    assert BootstrapFit(table, []).view.step(FULL) / BootstrapFit(table, []).view.step(
        BARRIER
    ) == pytest.approx(1.2)


def test_what_a_tree_does_to_its_trials_cancels_where_one_was_in_fewer_rounds() -> None:
    slow = {0: 1.0, 1: 1.1, 2: 0.95, 3: 1.2, 4: 1.3}
    table: dict[MetricKey, dict[int, float]] = {
        (FULL, "step"): {n: 12 * by for n, by in slow.items()},
        (BARRIER, "step"): {n: 10 * slow[n] for n in (0, 1)},
        (BARRIER, "slowest"): {n: 9 * slow[n] for n in (0, 1)},
        (DESIGN.baseline, "step"): {0: 20.0, 1: 20.1},
    }
    shared = {(trial, n): f"tree {n}" for trial in (FULL, BARRIER) for n in slow}
    fit = BootstrapFit(table, [], process_trees=shared)
    assert fit.view.step(FULL) / fit.view.step(BARRIER) == pytest.approx(1.2)
    assert fit.view.step(BARRIER) / fit.view.slowest_rank_step(BARRIER) == pytest.approx(10 / 9)


def test_short_steps_that_scatter_say_nothing_about_long_ones() -> None:
    """Calls of 50 µs took 60 and 70 in later rounds; one of 800 was in the first only."""
    copies = Trial(plan=DESIGN.plan, variant=Variant(input="resident", independent=True))
    table: dict[MetricKey, dict[int, float]] = {
        (DESIGN.baseline, "step"): {0: 0.80},
        (FULL, "step"): {0: 0.46},
        (copies, "step"): {0: 0.05, 1: 0.06, 2: 0.07},
        (BARRIER, "step"): {0: 0.04, 1: 0.05, 2: 0.06},
    }
    view = BootstrapFit(table, []).view
    assert (view.step(DESIGN.baseline), view.step(FULL)) == pytest.approx((0.80, 0.46))
    assert view.step(copies) == pytest.approx(0.06)


def test_one_slow_process_tree_is_no_slow_round() -> None:
    table: dict[MetricKey, dict[int, float]] = {
        (FULL, "step"): {0: 16.4},
        (DESIGN.baseline, "step"): {0: 12.5, 1: 16.2},
        (DESIGN.one_device("resident"), "step"): {0: 6.7, 1: 8.3},
        (replicas(DESIGN, "resident"), "step"): {0: 6.68, 1: 6.67},
    }
    alone = [DESIGN.baseline, DESIGN.one_device("resident")]
    shared = {(trial, number): f"tree {number}" for trial in alone for number in (0, 1)}
    assert BootstrapFit(table, [], process_trees=shared).view.step(FULL) == pytest.approx(16.4)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    draws, held, times = random.Random(3), 0, 60
    for _ in range(times):
        steps = {FULL: 12.0, BARRIER: 10.0, DESIGN.baseline: 20.0, NONE: 10.0}
        table: dict[MetricKey, dict[int, float]] = {
            (trial, "step"): {n: ms * draws.lognormvariate(0, 0.02) for n in range(3)}
            for trial, ms in steps.items()
        }
        low, high = _bounds(BootstrapFit(table, [], resamples=150), _difference)
        held += low <= 2 <= high
    assert held >= 0.9 * times


def test_one_run_a_trial_has_the_scatter_inside_runs_or_that_of_processes() -> None:
    table: dict[MetricKey, dict[int, float]] = {
        (FULL, "step"): {0: 12.0},
        (BARRIER, "step"): {0: 10.0},
    }
    least, wide = (
        BootstrapFit(table, [(FULL, scatter)]).interval(_difference) for scatter in (0.0, 0.05)
    )
    assert least.low is not None
    assert wide.low is not None
    assert least.value == pytest.approx(2.0)
    assert 1 < least.low < 2
    assert wide.low < 1


def test_where_hosts_are_ahead_one_run_a_trial_tells_more() -> None:
    table: dict[MetricKey, dict[int, float]] = {
        (FULL, "step"): {0: 12.0},
        (BARRIER, "step"): {0: 10.0},
    }
    both = (FULL, BARRIER)
    found = BootstrapFit(table, [(trial, 0.0) for trial in both], host_ahead=both).interval(
        _difference
    )
    assert found.low is not None
    assert 1.6 < found.low < 2
    wide = BootstrapFit(table, [(trial, 0.05) for trial in both], host_ahead=both).interval(
        _difference
    )
    assert wide.low is not None
    assert wide.low < 1


def test_a_trial_whose_host_is_not_ahead_makes_no_other_less_sure() -> None:
    """What lies between epochs is waited for: passes that are cut short tell nothing of steps."""
    table: dict[MetricKey, dict[int, float]] = {
        (FULL, "step"): {0: 12.0},
        (BARRIER, "step"): {0: 10.0},
    }
    alone = BootstrapFit(table, [(FULL, 0.0), (BARRIER, 0.0)], host_ahead=(FULL, BARRIER))
    passes = over_short_epochs(FULL)
    table[passes, "step"], table[passes, "gap"] = {0: 13.0}, {0: 5.0}
    scatters = [(FULL, 0.0), (BARRIER, 0.0), (passes, 0.2)]
    found = BootstrapFit(table, scatters, host_ahead=(FULL, BARRIER))
    assert _width(found, _difference) == pytest.approx(_width(alone, _difference), rel=0.2)
    assert _width(found, lambda view: view.step(passes)) > 13 * 0.4


@pytest.mark.parametrize("kinds", [4, 7])
def test_what_scatters_from_tree_to_tree_makes_nothing_else_less_sure(kinds: int) -> None:
    """Steps with the real input were 14 % apart, those of the others 0.2 %."""
    quiet = [BARRIER, NONE, *(replicas(DESIGN, kind) for kind in ("resident", "replayed"))]
    quiet += [barrier_only(DESIGN, "replayed"), no_allreduce(DESIGN, "replayed")]
    table: dict[MetricKey, dict[int, float]] = {(FULL, "step"): {0: 28.0, 1: 32.0}}
    table |= {(trial, "step"): {0: 22.0, 1: 22.05} for trial in quiet[: kinds - 1]}
    shared = {(trial, number): f"tree {number}" for trial, _ in table for number in (0, 1)}
    inside = {run: 0.2 if run[0] == FULL else 0.002 for run in shared}
    found = BootstrapFit(table, [], process_trees=shared, within_errors=inside, host_ahead=quiet)
    assert _width(found, _unexchanged) < 1
    assert _width(found, _difference) > 6


@pytest.mark.parametrize(("sampling_error_ms", "is_separate"), [(1.0, True), (0.05, False)])
def test_real_batches_of_unequal_cost_widen_no_interval_of_replayed_ones(
    sampling_error_ms: float, is_separate: bool
) -> None:
    """One device alone has other batches in every run: 10 % apart, where trees are 0.5 % apart."""
    quiet = {0: 1.0, 1: 1.005, 2: 0.995, 3: 1.003}
    replayed = [replicas(DESIGN, "resident"), BARRIER, NONE]
    table: dict[MetricKey, dict[int, float]] = {
        (trial, "step"): {n: 10 * by for n, by in quiet.items()} for trial in replayed
    }
    table[DESIGN.baseline, "step"] = {0: 20.0, 1: 22.0, 2: 18.0, 3: 21.0}
    trials = [trial for trial, _ in table]
    fit = BootstrapFit(
        table,
        [(trial, 0.002) for trial in trials],
        batch_deviations={(DESIGN.plan, "step"): np.full(16, sampling_error_ms / 4)},
        host_ahead=trials,
    )
    width = _width(fit, lambda view: view.step(BARRIER) - view.step(NONE))
    assert (width < 0.4) == is_separate
    assert _width(fit, lambda view: view.step(DESIGN.baseline)) > 1


@pytest.mark.parametrize(("first", "second", "width"), [(1, 1, 0.0), (1, -1, 3.9), (1, 0, 1.96)])
def test_plans_that_replay_the_same_batches_share_their_sampling_error(
    first: int, second: int, width: float
) -> None:
    """The standard error of each is 1 ms, but for batches that do not differ."""
    pattern = np.tile([0.25, -0.25], 8)
    one, both = DESIGN.one_device("resident"), replicas(DESIGN, "resident")
    fit = BootstrapFit(
        {(one, "step"): {0: 10.0}, (both, "step"): {0: 10.0}, (both, "rank 0"): {0: 10.0}},
        [],
        batch_deviations={
            (one.plan, "step"): first * pattern,
            (both.plan, "rank 0"): second * pattern,
            (both.plan, "step"): np.tile(pattern[:4], 4)[::-1],
        },
    )
    found = _width(fit, lambda view: view.step(both) - view.step(one))
    assert found / 2 == pytest.approx(2.13 / 1.96 * width, rel=0.15, abs=1e-9)


def test_intervals_of_turns_hold_the_truth_about_as_often_as_they_say() -> None:
    """Two trees of five turns each, 3 % apart, in which each turn is another 2 % off."""
    draws, held, times = random.Random(5), 0, 60
    steps = dict.fromkeys(
        [FULL, BARRIER, NONE, DESIGN.baseline, replicas(DESIGN, "resident")], 10.0
    )
    shared = {(trial, number): f"tree {number}" for trial in steps for number in (0, 1)}
    for _ in range(times):
        trees = [draws.lognormvariate(0, 0.03) for _ in range(2)]
        table: dict[MetricKey, dict[int, float]] = {
            (trial, "step"): {
                n: ms * t * draws.lognormvariate(0, 0.02) for n, t in enumerate(trees)
            }
            for trial, ms in steps.items()
        }
        low, high = _bounds(
            BootstrapFit(table, [], resamples=150, process_trees=shared), _difference
        )
        held += low <= 0 <= high
    assert held >= 0.9 * times


def _unexchanged(view: MetricView) -> Samples:
    return view.step(NONE)


def _width(fit: BootstrapFit, number: Statistic) -> float:
    low, high = _bounds(fit, number)
    return high - low


def _bounds(fit: BootstrapFit, number: Statistic) -> tuple[float, float]:
    found = fit.interval(number)
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


@pytest.mark.parametrize(("slow", "reference"), [(1.0, (0, 1)), (1.01, (0, 1)), (1.2, (0,))])
def test_ranks_that_differ_are_not_averaged(slow: float, reference: tuple[int, ...]) -> None:
    table: dict[MetricKey, dict[int, float]] = {
        (NONE, "step"): {0: 10.0},
        (NONE, "rank 0"): {0: 10.0},
        (NONE, "rank 1"): {0: 10.0 * slow},
    }
    view = BootstrapFit(table, [(NONE, 0.001)]).view
    assert view.reference == reference
    assert view.reference_step(NONE) == pytest.approx(
        10 * (1 + slow) / 2 if len(reference) > 1 else 10
    )


def test_a_gap_may_be_below_zero() -> None:
    table: dict[MetricKey, dict[int, float]] = {
        (FULL, "step"): {0: 10.0, 1: 10.0},
        (FULL, "gap"): {0: -0.1, 1: 0.3},
    }
    found = BootstrapFit(table, []).interval(lambda view: view.epoch_gap(FULL))
    assert found.value == pytest.approx(0.1)
    assert (found.low, found.high) == pytest.approx((-0.1, 0.3))


def test_what_is_not_waited_for_between_epochs_is_as_certain_as_both_are_together() -> None:
    """20 and 26 ms a step, all but 1 of each for a first batch, in trees that differ by a tenth."""
    table: dict[MetricKey, dict[int, float]] = {
        (FULL, "step"): {0: 10.0, 1: 11.0},
        (FULL, "gap"): {0: 20.0, 1: 26.0},
        (FULL, "first"): {0: 19.0, 1: 25.0},
    }
    fit = BootstrapFit(table, [])
    rest = fit.interval(lambda view: view.epoch_gap(FULL) - view.first_batch_wait(FULL))
    whole = fit.interval(lambda view: view.epoch_gap(FULL))
    assert (rest.low, rest.value, rest.high) == pytest.approx((1.0, 1.0, 1.0))
    assert (whole.low, whole.value, whole.high) == pytest.approx((20.0, 23.0, 26.0))


def test_trials_are_equal_where_they_ask_the_same() -> None:
    assert DESIGN.actual() == Trial(plan=DESIGN.plan, variant=Variant())
    assert barrier_only(DESIGN, "real") == Trial(
        plan=DESIGN.plan, variant=Variant(exchange="barrier")
    )
    weak = experiment_design("weak", batch=200)
    assert weak.baseline == weak.one_device("real")
    assert weak.baseline.plan.batch == 100
    assert str(weak.baseline) == "1 device, batch 100"
    assert str(NONE) == "2 devices, batch 200, input resident, exchange none"


def test_what_a_process_tree_does_to_all_its_trials_does_not_count_between_them() -> None:
    """Trees differ by 10 %, trials inside a tree by 0.1 %: a difference of two is known well."""
    draws = random.Random(5)
    table: dict[MetricKey, dict[int, float]] = {(DESIGN.baseline, "step"): {}, (FULL, "step"): {}}
    table[BARRIER, "step"] = {}
    shared = {}
    for number in range(4):
        tree = draws.lognormvariate(0, 0.1)
        table[DESIGN.baseline, "step"][number] = 20 * draws.lognormvariate(0, 0.1)
        for trial, ms in ((FULL, 12.0), (BARRIER, 10.0)):
            table[trial, "step"][number] = ms * tree * draws.lognormvariate(0, 0.001)
            shared[trial, number] = str(number)
    alone = BootstrapFit(table, []).interval(_difference)
    found = BootstrapFit(table, [], process_trees=shared).interval(_difference)
    assert None not in (found.low, found.high, alone.low, alone.high)
    assert (found.high or 0) - (found.low or 0) < 0.25 * ((alone.high or 0) - (alone.low or 0))
    assert (found.low or 0) <= found.value <= (found.high or 0)
    wide = BootstrapFit(table, [], process_trees=shared).interval(lambda view: view.step(FULL))
    assert (wide.high or 0) - (wide.low or 0) > 1.0


def test_two_runs_that_are_far_apart_are_not_as_sure_as_what_each_shows_inside() -> None:
    """Steps of a compiled model on one H200, by what its host takes to launch them."""
    table: dict[MetricKey, dict[int, float]] = {
        (FULL, "step"): {0: 8.59, 1: 8.65},
        (BARRIER, "step"): {0: 3.17, 1: 4.20},
    }
    found = BootstrapFit(table, [(FULL, 0.002), (BARRIER, 0.002)]).interval(
        lambda view: view.step(BARRIER)
    )
    assert found.low is not None
    assert found.high is not None
    assert found.low < 3.3
    assert found.high > 4.1


STARVED: dict[MetricKey, dict[int, float]] = {
    (FULL, "step"): {0: 8.0, 1: 28.0},
    (FULL, "loading"): {0: 11.2, 1: 11.2},
    (FULL, "waiting"): {0: 10.7, 1: 10.7},
    (BARRIER, "step"): {0: 0.2, 1: 0.2},
    (NONE, "step"): {0: 13.5, 1: 13.5},
}
"""A loader that sleeps, in two runs that are far apart; a batch that is replayed; another trial."""


@pytest.mark.parametrize(("other", "sure"), [(BARRIER, True), (NONE, False)])
def test_what_is_nearly_all_of_a_step_is_sure_however_far_steps_are_apart(
    other: Trial, sure: bool
) -> None:
    fit = BootstrapFit(STARVED, [])

    def lost(view: MetricView) -> Samples:
        return view.step(FULL) - view.step(other)

    found = fit.interval(lost)
    assert not exceeds_noise(found, float(fit.view.step(FULL)))
    assert fit.is_significant(found, lost, lambda view: view.step(FULL)) is sure


def test_a_loader_s_waiting_is_the_same_part_of_its_time_in_every_resample() -> None:
    def part(view: MetricView) -> Samples:
        loading, waiting = view.loading_and_waiting(FULL)
        return waiting / loading

    assert _width(BootstrapFit(STARVED, []), part) == pytest.approx(0, abs=1e-9)
    assert _width(BootstrapFit(STARVED, []), lambda view: view.loading_and_waiting(FULL)[0]) > 1


def test_a_host_gap_is_the_same_part_of_its_step_in_every_resample() -> None:
    def gap(view: MetricView) -> Samples:
        found = view.metric(FULL, "host_gap")
        assert found is not None
        return found

    steps = {(FULL, "step"): {0: 230.0}, (FULL, "host_gap"): {0: 206.0}}
    noisy = BootstrapFit(steps, [(FULL, 0.5)])
    assert _width(noisy, lambda view: gap(view) / view.step(FULL)) == pytest.approx(0.0, abs=1e-9)
    assert _width(noisy, gap) > 50
