"""Pairs of runs of ``nfold tune``: that alternate, and that cannot."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from explaining import Memory, failed, script_runner, target
from nfold.core.errors import MachineUnfit
from nfold.core.interleave import SLICES
from nfold.core.measurement import Measurement, Status
from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.engines.simulated import Scenario
from nfold.explain.design import Trial
from nfold.explain.time_budget import TimeBudget
from nfold.tune.runs.fresh_runs import NOISE_LABEL, FreshRuns, TuneEvents

ORIGINAL = Trial(
    plan=Plan(
        framework="simulated",
        device="cuda",
        devices=2,
        cores_per_device=8,
        batch=200,
        steps=24,
        warmup_steps=2,
    )
)
REMEDY = ORIGINAL.under(anomaly_detection=False)
Fate = Callable[[bool, bool], Status | Exception]
"""The status of a run, by whether it alternates and whether it has the remedy."""


class Machine(Memory, TuneEvents):
    """Runs a script of 10 ms per step, 5 of which a remedy saves; notes what runs in what way."""

    drift = 1.0

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self.order: list[tuple[str, bool]] = []
        self.labels: list[str] = []
        self.append_threads: set[threading.Thread] = set()
        costs = Scenario(compute_ms_per_sample=0.05, anomaly_ms=5.0, noise=0.0, process_noise=0.0)
        self._fate, self._usual = fate, script_runner(costs)
        runner = target(costs, self, self._run)
        budget = TimeBudget(1000.0, now=lambda: float(len(self.order)))
        self.runs = FreshRuns(runner, budget, self, ORIGINAL, lambda: 0.0, alternates=True)

    def append(self, measurement: Measurement) -> None:
        self.append_threads.add(threading.current_thread())
        super().append(measurement)

    def trying(self, what: str, remaining_s: float) -> None:
        self.labels.append(what)

    def _run(self, workload: Any, plan: Plan, variant: Variant | None, **more: Any) -> Measurement:
        alternates = more["options"].alternates
        has_remedy = variant is not None and variant.anomaly_detection is False
        self.order.append(("remedy" if has_remedy else "original", alternates))
        fate = self._fate(alternates, has_remedy)
        if isinstance(fate, Exception):
            raise fate
        if fate != "ok":
            trial = Trial(plan=plan, variant=variant or Variant())
            return dataclasses.replace(failed(trial, "a reason"), status=fate)
        if alternates:
            more["interleaved_variants"] = (variant or Variant(),) * SLICES
        found: Measurement = self._usual(workload, plan, variant, **more)
        return self._drifting(found, has_remedy) if alternates and self.drift != 1 else found

    def _drifting(self, found: Measurement, is_second: bool) -> Measurement:
        """Every slice of two runs is slower by a factor than the one before it."""
        ranks = []
        for rank in found.ranks:
            factors = [self.drift ** (2 * number + is_second) for number in rank.slots]
            windows = tuple(
                dataclasses.replace(window, seconds=window.seconds * factor)
                for window, factor in zip(rank.windows, factors, strict=True)
            )
            times = zip(rank.windows_with_step_times(), factors, strict=True)
            step_ms = tuple(ms * factor for (_, own), factor in times for ms in own)
            ranks.append(dataclasses.replace(rank, windows=windows, step_ms=step_ms))
        return dataclasses.replace(found, ranks=tuple(ranks))


def always_ok(alternates: bool, has_remedy: bool) -> Status:
    del alternates, has_remedy
    return "ok"


def test_the_runs_of_a_pair_alternate() -> None:
    machine = Machine(always_ok)
    runs = machine.runs
    assert runs.measure(ORIGINAL, ORIGINAL, NOISE_LABEL) is None
    assert runs.measure(ORIGINAL, REMEDY, "a remedy") is None
    assert {alternates for _, alternates in machine.order} == {True}
    assert machine.labels == [NOISE_LABEL, "a remedy"]
    gain = runs.gain(ORIGINAL, REMEDY)
    assert gain is not None
    assert gain.value == pytest.approx(2, rel=0.01)
    assert machine.append_threads == {threading.current_thread()}  # a store belongs to one
    assert len(machine.kept) == 4


def test_a_drift_of_the_machine_is_no_gain() -> None:
    """Over the twelve slices of both runs it is 1.7 x; what is left is an eleventh of one slice."""
    machine = Machine(always_ok)
    machine.drift = 1.05
    machine.runs.measure(ORIGINAL, REMEDY, "a remedy")
    (pair,) = machine.runs.series.pairs
    assert abs(pair.log_gain - math.log(2)) < math.log(machine.drift) / 5


@pytest.mark.parametrize(
    "fate",
    [
        pytest.param("oom", id="too little memory on a device"),
        pytest.param("killed", id="too little memory on the host"),
        pytest.param(MachineUnfit("in use by another run"), id="both need a file"),
    ],
)
def test_what_fails_only_beside_another_run_is_run_alone(fate: Status | Exception) -> None:
    machine = Machine(lambda alternates, remedy: fate if alternates and remedy else "ok")
    runs = machine.runs
    runs.measure(ORIGINAL, ORIGINAL, NOISE_LABEL)
    runs.measure(ORIGINAL, REMEDY, "a remedy")
    assert not runs.alternates
    assert runs.measure(ORIGINAL, REMEDY, "a remedy") is None
    alone = [what for what, alternates in machine.order if not alternates]
    assert alone == ["original"] * 2 + ["remedy", "original", "original", "remedy"]
    assert [one.new == REMEDY for one in runs.series.pairs] == [False, True, True]
    gain = runs.gain(ORIGINAL, REMEDY)
    assert gain is not None
    assert gain.value == pytest.approx(2, rel=0.01)


def test_a_remedy_that_crashes_beside_another_run_has_failed() -> None:
    machine = Machine(lambda alternates, remedy: "crashed" if remedy else "ok")
    runs = machine.runs
    runs.measure(ORIGINAL, ORIGINAL, NOISE_LABEL)
    assert runs.measure(ORIGINAL, REMEDY, "a remedy") == "crashed: a reason"
    assert runs.alternates
    assert len(machine.order) == 4
    assert len(runs.series.pairs) == 1


@pytest.mark.parametrize("fate", ["crashed", "hung"])
def test_if_the_original_fails_only_beside_itself_pairs_do_not_alternate(fate: Status) -> None:
    """As if it chose a port itself."""
    machine = Machine(lambda alternates, remedy: fate if alternates else "ok")
    runs = machine.runs
    assert runs.measure(ORIGINAL, ORIGINAL, NOISE_LABEL) is None
    assert not runs.alternates
    assert [alternates for _, alternates in machine.order] == [True, True, False, False]


def test_an_original_that_fails_alone_has_failed() -> None:
    runs = Machine(lambda alternates, remedy: "crashed").runs
    assert runs.measure(ORIGINAL, ORIGINAL, NOISE_LABEL) == "crashed: a reason"


def test_a_script_that_ends_before_its_last_slice_does_not_alternate() -> None:
    machine = Machine(always_ok)
    usual = machine._usual

    def without_slices(*asked: Any, **more: Any) -> Measurement:
        more.pop("interleaved_variants", None)
        found: Measurement = usual(*asked, **more)
        ranks = (dataclasses.replace(rank, slots=(0,) * len(rank.windows)) for rank in found.ranks)
        return dataclasses.replace(found, ranks=tuple(ranks))

    machine._usual = without_slices
    assert machine.runs.measure(ORIGINAL, ORIGINAL, NOISE_LABEL) is None
    assert not machine.runs.alternates


def test_pairs_that_do_not_alternate_run_in_both_orders() -> None:
    machine = Machine(always_ok)
    machine.runs.alternates = False
    for _ in range(2):
        assert machine.runs.measure(ORIGINAL, REMEDY, "a remedy") is None
    assert [what for what, _ in machine.order] == ["remedy", "original", "original", "remedy"]
    assert len(machine.runs.series.pairs) == 2
