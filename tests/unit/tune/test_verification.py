"""The verification of ``nfold tune``: which runs it makes, and which of them count."""

from __future__ import annotations

import math
import random

import pytest

from explaining import Memory, script_runner, target
from nfold.core.plan import Plan
from nfold.core.stats import Interval
from nfold.engines.simulated import Scenario
from nfold.explain.design import Trial
from nfold.explain.time_budget import TimeBudget
from nfold.launch.launch_spec import StopRequest
from nfold.tune.remedies import Remedy
from nfold.tune.result import EditedCopy, Verification
from nfold.tune.runs.fresh_runs import Arm, FreshRuns, TuneEvents
from nfold.tune.runs.pair_series import NoisePool, Pair
from nfold.tune.runs.verification import (
    LEAST_PAIRS,
    MAX_PAIRS,
    FinalComparison,
    pairs_to_confirm,
)

KEPT = (Remedy(name="channels_last", value=True),)
FAILURE = "crashed: an error of the copy"


class TimedRuns(FreshRuns):
    """Pairs of two seconds each. ``ms`` has the time of a sample by what runs, None if it fails."""

    ms: dict[str, float | None]
    order: list[str]

    def run_pair(self, old: Arm, new: Arm, label: str) -> Pair | None:
        what = label.removeprefix("verifying: ")
        self.order.append(what)
        self._pair_seconds[new.key] = [2.0]
        old_ms, new_ms = self.ms["original"], self.ms[what]
        if new_ms is None:
            self.failures[new.key] = FAILURE
            return None
        assert old_ms is not None
        noise = random.Random(len(self.order)).gauss(0.0, 0.003)
        return Pair(old.key, new.key, old_ms, new_ms, math.log(old_ms / new_ms) + noise)


def verify(
    seconds: float,
    *,
    with_copy: bool = True,
    kept: tuple[Remedy, ...] = KEPT,
    **ms: float | None,
) -> tuple[Verification, list[str]]:
    """Return the verification within so many seconds, and what ran."""
    costs = Scenario(compute_ms_per_sample=1.0)
    runner = target(costs, Memory(), script_runner(costs))
    order: list[str] = []
    budget = TimeBudget(seconds, now=lambda: 2.0 * len(order))
    original = Trial(plan=Plan(batch=10))
    runs = TimedRuns(runner, budget, TuneEvents(), original, reserved_s=lambda: 0.0)
    runs.ms, runs.order = ms, order
    copy = EditedCopy(sources=(("train.py", "copy.py"),)) if with_copy else None
    copy_runner = runner if with_copy else None
    return FinalComparison(runs, kept, StopRequest(), copy, copy_runner).verify(), order


def test_runs_of_a_good_copy_count_for_the_gain() -> None:
    found, order = verify(3.0, original=20.0, final=10.0, copy=10.0)
    assert order == ["final", "copy"]
    assert found.pairs == 2
    assert found.copy_objection is None
    assert found.holds
    assert found.gain is not None
    assert found.gain.value == pytest.approx(2, rel=0.02)
    assert found.final_ms == pytest.approx(100, rel=0.02)


def test_a_copy_that_is_not_faster_does_not_count() -> None:
    found, order = verify(3.0, original=20.0, final=10.0, copy=20.0)
    assert order.count("final") == found.pairs == 2
    assert found.copy_objection is not None
    assert found.copy_objection.startswith("it is not certainly faster than the original (")
    assert found.holds
    assert found.gain is not None
    assert found.gain.value == pytest.approx(2, rel=0.02)


def test_a_copy_that_fails_does_not_run_again() -> None:
    found, order = verify(100.0, original=20.0, final=10.0, copy=None)
    assert order.count("copy") == 1
    assert found.copy_objection == FAILURE
    assert found.holds
    assert found.objection is None


@pytest.mark.parametrize(
    ("copy", "with_copy", "expected"),
    [
        pytest.param(10.0, True, None, id="a good copy"),
        pytest.param(20.0, True, "it is not certainly faster", id="a slow copy"),
        pytest.param(None, True, FAILURE, id="a copy that fails"),
        pytest.param(10.0, False, "it did not run", id="no copy"),
    ],
)
def test_what_only_an_edit_keeps_needs_a_good_copy(
    copy: float | None, *, with_copy: bool, expected: str | None
) -> None:
    kept = (Remedy(name="exchange_each_micro_batch", value=False),)
    found, _ = verify(100.0, kept=kept, with_copy=with_copy, original=20.0, final=10.0, copy=copy)
    assert found.holds == (expected is None)
    assert (expected or "") in (found.objection or "")


def test_settings_that_fail_do_not_run_again() -> None:
    found, order = verify(100.0, original=20.0, final=None, copy=10.0)
    assert order.count("final") == 1
    assert found.objection == FAILURE
    assert not found.holds


def test_a_precise_gain_ends_the_pairs() -> None:
    found, order = verify(100.0, with_copy=False, original=20.0, final=10.0)
    assert len(order) < MAX_PAIRS
    assert found.pairs == order.count("final") >= 3
    assert found.gain is not None
    assert found.gain.low is not None
    assert found.gain.low > 1.9


@pytest.mark.parametrize(
    ("gain", "noise", "expected"),
    [
        pytest.param(1.24, 0.003, LEAST_PAIRS, id="quiet"),
        pytest.param(3.0, 0.08, LEAST_PAIRS, id="large"),
        pytest.param(1.24, 0.08, 5, id="noisy"),
        pytest.param(1.05, 0.08, MAX_PAIRS, id="hidden by the noise"),
        pytest.param(0.9, 0.08, LEAST_PAIRS, id="no gain"),
    ],
)
def test_the_pairs_that_a_gain_needs_depend_on_the_noise(
    gain: float, noise: float, expected: int
) -> None:
    pool = NoisePool(squares=20 * 2 * noise**2, degrees_of_freedom=20)  # of both runs
    assert pairs_to_confirm(Interval(gain), pool) == expected
