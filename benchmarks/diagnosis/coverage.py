"""How often the 95 % intervals of explain hold the true cost, on the simulated framework.

    python benchmarks/diagnosis/coverage.py [--runs 125] [--kind batches] [--processes 2]

Each simulated explanation has one injected cost: ``coverage`` counts the intervals of that cause and
of the other known causes, whose cost is 0. ``narrows`` is the 95 % quantile of the width after twice
the time budget over the width before (target: at most 1.1). The noise is log-normal per step (1 %)
and per process tree (0.5 %); by kind, 5 % of the steps have noise of ten times as much (``heavy``),
each quarter of a run has a factor of its own (``drift``, 2 %), or the work of batches differs by a
factor of three (``batches``).
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from explaining import experiment_design, runner, target
from nfold.core.stats import Interval
from nfold.engines.simulated import Scenario
from nfold.explain.attribution import build_budget
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.time_budget import TimeBudget

KINDS: dict[str, dict[str, float]] = {
    "normal": {},
    "heavy": {"outlier_fraction": 0.05},
    "drift": {"drift": 0.02},
    "batches": {"batch_spread": 2.0},
}
INJECTED = {"link": "exchange_ms", "synchronization": "latency_ms", "threads": "contention_ms"}
DOSES = (0.5, 1.0, 2.0)
NOISE = 0.01
LOCKSTEP_EXCESS = NOISE / math.sqrt(math.pi)
"""Expected excess of the larger of two noisy steps: every part of a step in lockstep has it."""
BUDGETS = (10, 20, 40)  # in process trees
MIN_WIDTH_MS = 0.01  # narrower intervals may become wider


class Clock:
    """Makes every process tree take one second."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.now = 0.0
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.now += 1
        return self._run(*args, **kwargs)


@dataclass(frozen=True)
class Row:
    """An interval of a cause in milliseconds, and the true cost."""

    kind: str
    seed: int
    budget: int
    cause: str
    found: Interval
    true_ms: float

    @property
    def covers(self) -> bool:
        return (self.found.low or 0.0) <= self.true_ms <= (self.found.high or 0.0)

    @property
    def width_ms(self) -> float:
        return (self.found.high or 0.0) - (self.found.low or 0.0)


def explain(kind: str, seed: int) -> list[Row]:
    """Return the rows of one scenario after every budget."""
    drawn = random.Random(seed)
    cause, dose = drawn.choice(list(INJECTED)), drawn.choice(DOSES)
    base: dict[str, Any] = {
        "compute_ms_per_sample": 0.1,
        "noise": NOISE,
        "process_noise": 0.005,
        "noise_seed": seed,
        "can_interleave": True,
    }
    scenario = Scenario(**{**base, **KINDS[kind], INJECTED[cause]: dose})
    true_ms = dose if cause == "threads" else dose * (1 + LOCKSTEP_EXCESS)
    rows = []
    for budget in BUDGETS:
        clock = Clock(runner(scenario))
        time_budget = TimeBudget(budget, now=lambda clock=clock: clock.now)  # type: ignore[misc]
        experiment = Experiment(target(scenario, None, clock), time_budget, ExperimentEvents())
        design = experiment.run(experiment_design(batch=200))
        found = build_budget("coverage", design, experiment.results)
        known = {row.cause: row.lost_ms for row in found.rows if row.cause in INJECTED}
        rows += [
            Row(kind, seed, budget, name, interval, true_ms if name == cause else 0.0)
            for name, interval in known.items()
        ]
    return rows


def report(kind: str, rows: Iterable[Row]) -> str:
    every = list(rows)
    lines = []
    for budget in BUDGETS:
        own = [row for row in every if row.budget == budget]
        injected = [row for row in own if row.true_ms]
        lines.append(
            f"{kind:8} {budget:3} trees: coverage {statistics.fmean(r.covers for r in own):.3f} "
            f"of {len(own)}, injected {statistics.fmean(r.covers for r in injected):.3f} of "
            f"{len(injected)}, half width {statistics.median(r.width_ms for r in own) / 2:.3f} ms"
        )
    widths = {(row.seed, row.cause, row.budget): row.width_ms for row in every}
    for less, more in itertools.pairwise(BUDGETS):
        ratios = [
            widths[seed, cause, more] / width
            for (seed, cause, budget), width in widths.items()
            if budget == less and width > MIN_WIDTH_MS and (seed, cause, more) in widths
        ]
        high = statistics.quantiles(ratios, n=20)[-1] if len(ratios) > 1 else float("nan")
        lines.append(f"{kind:8} {less} to {more} trees: narrows, 95 % quantile {high:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=125, help="explanations per kind")
    parser.add_argument("--kind", choices=list(KINDS), action="append")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        for kind in asked.kind or KINDS:
            found = pool.map(partial(explain, kind), range(asked.runs), chunksize=5)
            print(report(kind, (row for rows in found for row in rows)), flush=True)


if __name__ == "__main__":
    main()
