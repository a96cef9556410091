"""Replayed batches whose work differs by a factor of three: differences are known all the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from explaining import experiment_design, runner, target
from nfold.core.stats import Interval
from nfold.engines.simulated import Scenario
from nfold.explain.design import barrier_only, no_allreduce
from nfold.explain.estimate.replay import batch_deviations, with_equal_batches
from nfold.explain.trials import TrialResults

TEXTS = Scenario(
    compute_ms_per_sample=0.29,
    latency_ms=14.0,
    batch_spread=2.0,
    noise=0.01,
    process_noise=0.005,
    can_interleave=True,
)
DESIGN = experiment_design(batch=200, steps=40, warmup_steps=3)


def _latency(seed: int) -> Interval:
    """Return the cost of latency from one process tree, with 40 steps of every trial."""
    cheapest = DESIGN.cheapest_input
    barrier, none = barrier_only(DESIGN, cheapest), no_allreduce(DESIGN, cheapest)
    trials, results = [DESIGN.actual(), barrier, none], TrialResults()
    scenario = dataclasses.replace(TEXTS, noise_seed=seed)
    found = target(scenario, run=runner(scenario)).measure_interleaved(trials, 0)
    for trial, measurement in zip(trials, found, strict=True):
        results.add(trial, 0, measurement)
    return results.fit().interval(lambda view: view.step(barrier) - view.slowest_rank_step(none))


def test_a_cost_is_known_with_40_pairs_of_replayed_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """14 of 43 ms, with batches of 15 to 44 ms; without pairing it is known to 1 to 5 ms."""
    paired = [_latency(seed) for seed in range(6)]
    assert all((one.low or 0.0) <= 14.0 <= (one.high or 0.0) for one in paired)
    assert max(map(_width, paired)) < 4.0
    monkeypatch.setattr("nfold.explain.trials.with_equal_batches", lambda one, **_: one)
    assert max(_width(_latency(seed)) for seed in range(6)) > 8.0


def _width(found: Interval) -> float:
    return (found.high or 0.0) - (found.low or 0.0)


def test_windows_are_as_long_as_with_the_mean_batch() -> None:
    quiet = dataclasses.replace(TEXTS, noise=0.0, process_noise=0.0)
    trial = DESIGN.one_device(DESIGN.cheapest_input)
    measured = target(quiet, run=runner(quiet)).measure(trial, 0)
    (rank,) = with_equal_batches(measured, ranks_synchronize=True).ranks
    steps = {round(window.seconds / window.steps, 9) for window in rank.windows}
    before = {round(w.seconds / w.steps, 9) for w in measured.ranks[0].windows}
    assert (len(steps), len(before) > 1) == (1, True)
    # Work is uniform between half and one and a half of the mean: 29 % standard deviation.
    deviations = batch_deviations(measured, ranks_synchronize=True)["step"]
    assert len(deviations) == 16
    assert 0.2 * 29 < 4 * float(np.linalg.norm(deviations)) < 0.4 * 29


def test_real_batches_are_left_as_they_are() -> None:
    measured = target(TEXTS, run=runner(TEXTS)).measure(DESIGN.one_device("real"), 0)
    assert with_equal_batches(measured, ranks_synchronize=True) == measured
    assert batch_deviations(measured, ranks_synchronize=True) == {}
