"""The search for a plan, with models whose step times are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nfold.engines.torch.run.automatic_plan import (
    PROFILED_STEPS,
    AutomaticPlan,
    Candidate,
    StreamClock,
    busy_ms,
)
from nfold.engines.torch.run.job import Job

JOB = Job(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
COMPILED = Candidate(steps=("compiled",), cost_s=0.0)


class KnownTimes(StreamClock):
    """A run whose step times follow from its fields; the clock advances with its steps."""

    def __init__(self, step_ms: dict[str, float], candidate: Candidate | None = COMPILED) -> None:
        self.initial_step = self.current = "eager"
        self.applied: list[tuple[str, bool]] = []
        self.fails: str | None = None
        self.elapsed_ms = 0.0
        self.is_profiled = self.is_full = False
        self.kernels_ms = 1.0
        self._step_ms, self._candidate = step_ms, candidate

    def candidate(self) -> Candidate | None:
        return self._candidate

    def fingerprint(self) -> str:
        return "a model on a machine"

    def apply(self, step: str, *, check: bool) -> None:
        self.current = step
        self.applied.append((step, check))

    def settle(self, step: str) -> None:
        self.current = step

    def lacks_memory(self) -> bool:
        return self.is_full

    def note(self) -> str | None:
        return None

    def failure(self) -> str | None:
        return self.fails

    def step(self) -> None:
        self.elapsed_ms += self._step_ms[self.current]

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


def train(run: KnownTimes, steps: int = 400, certain: int = 10**13) -> AutomaticPlan:
    plan = AutomaticPlan(run, JOB, clock=run)
    plan.on_epoch(certain)
    for _ in range(steps):
        run.step()
        plan.on_step()
    return plan


STEP_MS = {"eager": 10.0, "compiled": 5.0}


def test_a_faster_step_is_kept_and_stored(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = KnownTimes(STEP_MS)
    assert not train(run).is_searching
    assert run.current == "compiled"
    assert "step compiled: 10 → 5 ms a step, 2.00 × as fast" in capsys.readouterr().err
    (file,) = cache.iterdir()
    stored = json.loads(file.read_text())
    assert (stored["step"], stored["before_ms"], stored["after_ms"]) == ("compiled", 10, 5)


def test_nothing_is_tried_where_graphs_do_not_fit(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = KnownTimes(STEP_MS)
    run.is_full = True
    assert not train(run).is_searching
    assert (run.current, run.applied) == ("eager", [])
    assert "step compiled is not tried: a CUDA graph keeps the memory" in capsys.readouterr().err
    assert not cache.exists()


@pytest.mark.parametrize("best", ["compiled", "compiled+captured"])
def test_the_fastest_of_several_steps_is_kept(best: str) -> None:
    candidate = Candidate(steps=("compiled", "compiled+captured"), cost_s=0.0)
    step_ms = {"eager": 10.0, "compiled": 6.0, "compiled+captured": 6.0, best: 5.0}
    first, again = KnownTimes(step_ms, candidate), KnownTimes(step_ms, candidate)
    train(first)
    assert first.current == best
    assert first.applied[0] == ("compiled+captured", True)
    train(again, steps=1)
    assert again.applied == [(best, False)]


def test_a_step_that_is_not_faster_is_taken_back_and_not_tried_again() -> None:
    for trials in (1, 0):
        run = KnownTimes({**STEP_MS, "compiled": 9.9})
        train(run)
        assert run.current == "eager"
        assert [check for _, check in run.applied].count(True) == trials


def test_a_step_that_fails_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    run = KnownTimes(STEP_MS)
    run.fails = "TypeError: no graph"
    train(run)
    assert run.current == "eager"
    assert "not used: TypeError: no graph" in capsys.readouterr().err


def test_nothing_is_tried_that_costs_more_than_a_part_of_the_certain_training() -> None:
    run = KnownTimes(STEP_MS, Candidate(steps=("compiled",), cost_s=30.0))
    plan = train(run, certain=0)
    assert plan.is_searching
    assert run.applied == []
    plan.on_epoch(10**13)
    run.step()
    plan.on_step()
    assert run.applied == [("compiled", True)]


def test_a_step_that_may_take_too_long_is_not_tried(capsys: pytest.CaptureFixture[str]) -> None:
    run = KnownTimes(STEP_MS, Candidate(steps=("compiled",), cost_s=61.0))
    assert not train(run).is_searching
    assert run.applied == []
    assert "it may take 61 s" in capsys.readouterr().err


def test_a_stored_choice_is_applied_at_once_if_it_pays() -> None:
    train(KnownTimes(STEP_MS))
    again = KnownTimes(STEP_MS)
    train(again, steps=1)
    assert again.applied == [("compiled", False)]


def test_a_stored_choice_that_fails_now_is_taken_back() -> None:
    train(KnownTimes(STEP_MS))
    again = KnownTimes(STEP_MS)
    again.fails = "out of memory"
    train(again)
    assert again.current == "eager"


def test_a_damaged_file_is_ignored(cache: Path) -> None:
    train(KnownTimes(STEP_MS))
    (file,) = cache.iterdir()
    file.write_text("{")
    again = KnownTimes(STEP_MS)
    train(again)
    assert ("compiled", True) in again.applied


def test_it_is_said_how_long_the_device_waits_for_the_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = KnownTimes(STEP_MS)
    run.kernels_ms = 4.0
    train(run)
    assert "computes for 4 of 5 ms of a step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kernels_ms", "step", "profiled"), [(4.9, "eager", 0), (1, "captured", 0), (1, "eager", 1)]
)
def test_nothing_is_said_about_a_busy_device_or_a_captured_step(
    capsys: pytest.CaptureFixture[str], kernels_ms: float, step: str, profiled: int
) -> None:
    run = KnownTimes({**STEP_MS, "captured": 10.0})
    run.kernels_ms, run.is_profiled = kernels_ms, bool(profiled)
    run.initial_step = run.current = step
    assert not train(run).is_searching
    assert "@run.step" not in capsys.readouterr().err


def test_a_model_that_cannot_be_compiled_has_no_trial() -> None:
    run = KnownTimes(STEP_MS, None)
    assert not train(run).is_searching
    assert run.applied == []


def test_overlapping_kernels_count_once() -> None:
    assert busy_ms([(3e3, 5e3), (0, 1e3), (500, 2e3), (4e3, 4.5e3)]) == 4.0
