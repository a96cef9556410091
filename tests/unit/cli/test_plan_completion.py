"""Plans completed by rates that are measured once; what measures stands in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from made import machine
from nfold.cli import plan_completion
from nfold.cli.plan_completion import PlanCompleter, RatesNotMeasured
from nfold.core.errors import DataMissing
from nfold.core.input_rates import ImageRate, InputRates
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.engines.base import Task
from nfold.engines.torch.input.rate_cache import cache_file, rate_notes, read_rates
from nfold.workloads import info

HOST = machine(gpus=1, cores=16)
PHOTOS = Workload.parse("inception_v3:size=75")
RATES = InputRates(worker=ImageRate(value=200, low=190, high=210), device=800.0)


class Measuring:
    """Stands in for the process: answers the rates, and keeps what it was asked."""

    def __init__(self, rates: InputRates | None) -> None:
        self.rates, self.asked = rates, list[Task]()

    def __call__(self, task: Task) -> InputRates:
        self.asked.append(task)
        if self.rates is None:
            raise RatesNotMeasured("it broke")
        return self.rates


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RANK", raising=False)


def completing(told: list[str] | None = None, **more: object) -> PlanCompleter:
    tell = [].append if told is None else told.append
    return PlanCompleter(machine=HOST, prepare=lambda *_: None, notify=tell, **more)  # type: ignore[arg-type]


def test_rates_are_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = Measuring(RATES)
    monkeypatch.setattr(plan_completion, "measure_rates", measuring)
    plans = [completing()(PHOTOS, Plan(steps=steps)) for steps in (5, 5, 9)]
    assert [plan.workers for plan in plans] == [5, 5, 5]
    (asked,) = measuring.asked
    assert (asked.plan.decode, asked.plan.workers) == ("cpu", 15)
    task = Task(workload=PHOTOS, plan=plans[0], machine=HOST)
    assert read_rates(cache_file(PHOTOS, plans[0], HOST)) == RATES
    assert completing()(PHOTOS, Plan(augment="device", workers=2)).workers == 2
    assert len(measuring.asked) == 1
    ((kind, text),) = rate_notes(task)
    assert (kind, text) == ("input_rates", RATES.describe(plans[0]))
    other = Task(workload=PHOTOS, plan=plans[0].edit(workers=2), machine=HOST)
    assert rate_notes(other) == ()


def test_other_photographs_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = Measuring(RATES)
    monkeypatch.setattr(plan_completion, "measure_rates", measuring)
    for place in ("here", "there"):
        monkeypatch.setenv("NFOLD_DATA", place)
        completing()(PHOTOS, Plan())
    assert len(measuring.asked) == 2


@pytest.mark.parametrize(
    ("workload", "asked"),
    [
        ("inception_v3", Plan(decode="cpu", workers=4)),
        ("inception_v3", Plan(device="cpu")),
        ("inception_v3", Plan(framework="simulated")),
        ("inception_v3", Plan(step="graph")),
        ("cnn10", Plan()),
    ],
)
def test_where_nothing_is_open_nothing_is_measured(
    workload: str, asked: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(RATES)
    monkeypatch.setattr(plan_completion, "measure_rates", measuring)
    completing()(Workload.parse(workload), asked)
    assert not measuring.asked


def test_what_may_not_measure_uses_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = Measuring(RATES)
    monkeypatch.setattr(plan_completion, "measure_rates", measuring)
    assert completing(may_measure=False)(PHOTOS, Plan()).workers == 15
    completing()(PHOTOS, Plan())
    assert completing(may_measure=False)(PHOTOS, Plan()).workers == 5
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert completing()(PHOTOS, Plan()).workers == 15
    assert len(measuring.asked) == 1


def test_a_measurement_that_fails_is_told_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_completion, "measure_rates", Measuring(None))
    told: list[str] = []
    plan = completing(told)(PHOTOS, Plan())
    assert (plan.decode, plan.workers) == ("cpu", 15)
    assert told[-1] == "it broke; using 15 workers and decode cpu, not measured"
    assert read_rates(cache_file(PHOTOS, plan, HOST)) is None


def test_missing_files_are_an_error_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_completion, "measure_rates", Measuring(RATES))

    def missing(*_: object) -> None:
        raise DataMissing("no photographs")

    complete = PlanCompleter(machine=HOST, prepare=missing, notify=print)
    with pytest.raises(DataMissing, match="no photographs"):
        complete(PHOTOS, Plan())


def test_a_process_that_says_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    plan = Plan().resolve(HOST, info("inception_v3").defaults)
    with pytest.raises(RatesNotMeasured, match=r"exited with code 1: no error message"):
        plan_completion.measure_rates(Task(workload=PHOTOS, plan=plan, machine=HOST))
