"""Healthy runs: no cause is named on any of two hundred."""

from __future__ import annotations

import pytest

from explaining import experiment_design, runner, target
from nfold.engines.simulated import Scenario
from nfold.explain.attribution import FindingBuilder
from nfold.explain.cause_costs import Attribution
from nfold.explain.planner import required
from nfold.explain.trials import TrialResults

RUNS = 200
ROUNDS = 3


@pytest.mark.slow
def test_no_cause_is_named_on_healthy_runs() -> None:
    asked = experiment_design(batch=200, steps=10, warmup_steps=1)
    rungs = list(dict.fromkeys([asked.actual(), asked.baseline, *required(asked)]))
    named = []
    for seed in range(RUNS):
        healthy = Scenario(
            compute_ms_per_sample=0.1, noise=0.01, process_noise=0.01, noise_seed=seed
        )
        runs, measured = target(healthy, run=runner(healthy)), TrialResults()
        for number in range(ROUNDS):
            for rung in rungs:
                measured.add(rung, number, runs.measure(rung, number))
        made = FindingBuilder(Attribution(asked, measured, resamples=60))
        rows = (*made.multi_device_findings(), *made.one_device_findings())
        named += [(seed, row.cause, row.lost_ms) for row in rows if row.significant]
    assert named == []
