"""Healthy runs: no cause is named on any of two hundred."""

from __future__ import annotations

from explaining import ladder, runner, target
from nfold.explain.account import Account
from nfold.explain.asking import wanted
from nfold.explain.measured import Measured
from nfold.explain.rows import Rows
from nfold.frameworks.simulated import Script

RUNS = 200
ROUNDS = 3


def test_no_cause_is_named_on_healthy_runs() -> None:
    asked = ladder(batch=200, steps=10, warmup_steps=1)
    rungs = list(dict.fromkeys([asked.full(), asked.one, *wanted(asked)]))
    named = []
    for seed in range(RUNS):
        healthy = Script(compute_ms_per_sample=0.1, noise=0.01, process_noise=0.01, noise_seed=seed)
        runs, measured = target(healthy, run=runner(healthy)), Measured()
        for number in range(ROUNDS):
            for rung in rungs:
                measured.add(rung, number, runs.measure(rung, number))
        made = Rows(Account(asked, measured, resamples=60))
        rows = (*made.on_n(), *made.on_one())
        named += [(seed, row.cause, row.lost_ms) for row in rows if row.named]
    assert named == []
