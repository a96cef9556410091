"""The search for a plan, with models whose step times are known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from nfold.engines.torch.run.automatic_plan import (
    BUILD_STEPS,
    PROFILED_STEPS,
    AutomaticPlan,
    Candidate,
    Fields,
    StreamClock,
    busy_ms,
)
from nfold.engines.torch.run.job import Job

JOB = Job(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
EAGER = {"step": "eager", "layout": "channels_first"}
LAST = Candidate(fields={"layout": "channels_last"}, cost_s=0.0)
REPLAYED = Candidate(fields={"step": "compiled+captured"}, cost_s=0.0)
COMPILED = Candidate(fields={"step": "compiled"}, cost_s=0.0, unless_kept=True)


class KnownTimes(StreamClock):
    """A run whose step times follow from its fields; the clock advances with its steps."""

    def __init__(self, step_ms: dict[str, float], candidates: list[Candidate]) -> None:
        self.initial: Fields = dict(EAGER)
        self.fields = dict(EAGER)
        self.applied: list[tuple[Fields, bool]] = []
        self.fails: str | None = None
        self.elapsed_ms = 0.0
        self.is_captured = self.is_profiled = False
        self.kernels_ms = 1.0
        self._step_ms, self._candidates = step_ms, candidates

    def candidates(self) -> Iterable[Candidate]:
        return self._candidates

    def fingerprint(self) -> str:
        return "a model on a machine"

    def apply(self, fields: Fields, *, check: bool) -> None:
        self.fields = dict(fields)
        self.applied.append((dict(fields), check))

    def failure(self) -> str | None:
        return self.fails

    def step(self) -> None:
        self.elapsed_ms += self._step_ms[" ".join(self.fields.values())]

    def mark(self) -> float:
        return self.elapsed_ms

    def milliseconds(self, first: float, last: float) -> float:
        return last - first

    def now(self) -> float:
        return self.elapsed_ms / 1e3

    def begin_kernels(self) -> None:
        if self.is_profiled:
            raise RuntimeError("a profiler is active")

    def end_kernels(self) -> float:
        return PROFILED_STEPS * self.kernels_ms


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path))
    return tmp_path / "plans"


def train(run: KnownTimes, steps: int = 400, certain: int = 10**9) -> AutomaticPlan:
    plan = AutomaticPlan(run, JOB, clock=run)
    plan.on_epoch(certain)
    for _ in range(steps):
        run.step()
        plan.on_step()
    return plan


STEP_MS = {
    "eager channels_first": 10.0,
    "eager channels_last": 8.0,
    "compiled channels_first": 7.0,
    "compiled channels_last": 6.0,
    "compiled+captured channels_first": 5.0,
    "compiled+captured channels_last": 4.0,
}


def test_the_fastest_of_all_is_found_and_stored(cache: Path) -> None:
    run = KnownTimes(STEP_MS, [LAST, REPLAYED, COMPILED])
    assert not train(run).is_searching
    assert run.fields == {"step": "compiled+captured", "layout": "channels_last"}
    assert {"step": "compiled", "layout": "channels_last"} not in [f for f, _ in run.applied]
    (file,) = cache.iterdir()
    stored = json.loads(file.read_text())
    assert stored["fields"] == run.fields
    assert stored["gain"] == pytest.approx(2.5)


def test_a_plan_that_is_not_faster_is_taken_back() -> None:
    run = KnownTimes({**STEP_MS, "compiled+captured channels_first": 9.9}, [REPLAYED])
    train(run)
    assert run.fields == EAGER


def test_a_failure_is_taken_back_and_the_next_candidate_tried() -> None:
    run = KnownTimes(STEP_MS, [REPLAYED, COMPILED])
    apply = run.apply

    def fail_in_replays(fields: Fields, *, check: bool) -> None:
        apply(fields, check=check)
        if fields["step"] == "compiled":
            run.fails = None
        elif fields["step"] == "compiled+captured":
            run.fails = "TypeError: no graph"

    run.apply = fail_in_replays  # type: ignore[method-assign]
    train(run)
    assert run.fields == {**EAGER, "step": "compiled"}


def test_the_first_outputs_of_each_candidate_are_checked_once() -> None:
    run = KnownTimes(STEP_MS, [LAST, REPLAYED])
    train(run)
    assert [check for _, check in run.applied].count(True) == 2


def test_nothing_is_tried_that_costs_more_than_a_part_of_the_certain_training() -> None:
    dear = Candidate(fields=REPLAYED.fields, cost_s=30.0)
    run = KnownTimes(STEP_MS, [dear])
    plan = train(run, certain=0)
    assert plan.is_searching
    assert run.applied == []


def test_a_stored_choice_is_applied_at_once_if_it_pays() -> None:
    train(KnownTimes(STEP_MS, [REPLAYED]))
    again = KnownTimes(STEP_MS, [REPLAYED])
    train(again, steps=3 + BUILD_STEPS)
    assert again.fields == {**EAGER, "step": "compiled+captured"}
    assert len(again.applied) == 1


def test_a_stored_choice_that_fails_now_is_taken_back() -> None:
    train(KnownTimes(STEP_MS, [REPLAYED]))
    again = KnownTimes(STEP_MS, [REPLAYED])
    again.fails = "out of memory"
    train(again)
    assert again.fields == EAGER


def test_a_damaged_file_is_ignored(cache: Path) -> None:
    train(KnownTimes(STEP_MS, [REPLAYED]))
    (file,) = cache.iterdir()
    file.write_text("{")
    again = KnownTimes(STEP_MS, [REPLAYED])
    train(again)
    assert again.fields["step"] == "compiled+captured"


def test_it_is_said_how_long_the_device_waits_for_the_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = KnownTimes(STEP_MS, [REPLAYED])
    run.kernels_ms = 4.0
    train(run)
    assert "computes for 4 of 5 ms of a step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kernels_ms", "captured", "profiled"), [(4.9, 0, 0), (1, 1, 0), (1, 0, 1)]
)
def test_nothing_is_said_about_a_busy_device_or_a_captured_step(
    capsys: pytest.CaptureFixture[str], kernels_ms: float, captured: int, profiled: int
) -> None:
    run = KnownTimes(STEP_MS, [REPLAYED])
    run.kernels_ms, run.is_captured, run.is_profiled = kernels_ms, bool(captured), bool(profiled)
    assert not train(run).is_searching
    assert "@run.step" not in capsys.readouterr().err


def test_overlapping_kernels_count_once() -> None:
    assert busy_ms([(3e3, 5e3), (0, 1e3), (500, 2e3), (4e3, 4.5e3)]) == 4.0
