"""The screens of nfold explain against golden files, from the simulated engine.

NFOLD_UPDATE_GOLDEN=1 writes the files anew.
"""

from __future__ import annotations

import dataclasses
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from explaining import HOST, Memory, script_runner, target
from explaining import explained as explained_workload
from nfold.cli.explain_screen import conclusion_lines, detail_lines
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, SourceLocation
from nfold.core.stats import Interval
from nfold.core.variant import Variant
from nfold.engines.simulated import Scenario
from nfold.explain.attribution import build_budget
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.result.budget import Budget
from nfold.explain.result.view import Previous, build_view
from nfold.explain.script_probe import probe_script
from nfold.explain.time_budget import TimeBudget
from nfold.report.explanation import explanation_markdown

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
PAGE = "nfold-results/train/explain.html"
COSTS: dict[str, Any] = {"compute_ms_per_sample": 0.1, "samples_per_epoch": 2000}
LOADER = DataLoaderProfile(
    batch_size=100,
    batches_per_epoch=20,
    dataset_size=2000,
    sampler="DistributedSampler",
    created_at="train.py:35",
    num_workers=2,
)
PROFILE = ScriptProfile(steps=30, loader=LOADER, samples_per_step=100.0, device="cuda:0")
DDP = dataclasses.replace(
    PROFILE,
    world_size=2,
    process_group=True,
    parallel="ddp",
    backend="nccl",
    source_locations={"wrapper": (SourceLocation(line="train.py:31"),)},
)


def _explained(profile: ScriptProfile, **costs: Any) -> Budget:
    scenario = Scenario(**{**COSTS, **costs})
    usual = script_runner(scenario)

    def run(workload: Any, plan: Plan, variant: Variant | None = None, **more: Any) -> Measurement:
        """One process uses one device, whatever the plan says."""
        if plan.strategy != "dp":
            done: Measurement = usual(workload, plan, variant, **more)
            return done
        single: Measurement = usual(
            workload, plan.edit(devices=1, strategy="single"), variant, **more
        )
        return dataclasses.replace(single, plan=plan)

    runner = target(scenario, Memory(), run)
    experiment = Experiment(runner, TimeBudget(1000.0), ExperimentEvents())
    devices = Plan(framework="simulated", device="cuda", devices=2, cores_per_device=8, steps=1)
    design = probe_script(experiment, devices, None, HOST, lambda _: (profile,))
    return build_budget("train.py", experiment.run(design), experiment.results)


@cache
def _budget(name: str) -> Budget:
    budgets = {
        "loader": lambda: _explained(DDP, load_ms_per_sample=0.8, exchange_ms=2.0),
        "communication": lambda: _explained(DDP, transfer_ms=6.0, latency_ms=1.0),
        "one-process": lambda: _explained(PROFILE, exchange_ms=1.0),
        "healthy": lambda: _explained(DDP),
        "wrong": lambda: explained_workload(Scenario(**COSTS, same_samples=True)),
    }
    return budgets[name]()


def _matches(name: str, text: str) -> bool:
    path = GOLDEN / name
    if os.environ.get("NFOLD_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8") == text


def _screen(name: str, width: int) -> list[str]:
    previous = Previous(samples_per_s=6000.0, devices=2) if name == "loader" else None
    view = build_view(_budget(name), previous, 60.0)
    return [text for text, _ in conclusion_lines(view, width, page=PAGE)]


SCREENS = ["loader", "communication", "one-process", "healthy", "wrong"]


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("name", SCREENS)
def test_the_conclusion(name: str, width: int) -> None:
    lines = _screen(name, width)
    assert max(map(len, lines)) <= width
    if width == 100:
        assert len(lines) <= 25
    assert _matches(f"explain-{name}-{width}.txt", "\n".join(lines) + "\n")


def test_a_failure_as_several_processes_comes_first() -> None:
    failure = "AssertionError (train.py:87 `assert steps % ranks == 0`); next: pass --steps=2"
    budget = dataclasses.replace(_budget("one-process"), multi_process_failure=failure)
    view = build_view(budget)
    sentence = f"train.py fails as 2 processes, as torchrun starts it: {failure}."
    assert (view.headline, view.tone, view.change) == (sentence, "wrong", None)
    assert view.notices[0].startswith("train.py uses one process: 2 processes would train")
    assert budget.to_json()["warnings"][0]["text"].startswith(sentence)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_details(width: int) -> None:
    lines = [text for text, _ in detail_lines(_budget("loader"), width)]
    assert max(map(len, lines)) <= width
    assert _matches(f"explain-details-{width}.txt", "\n".join(lines) + "\n")


def test_no_number_is_cropped_at_any_width() -> None:
    budget = _budget("loader")
    view = build_view(budget)
    numbers = {f"{row.ms.value:.1f}" for row in view.rows if row.ms.value >= 10}
    for width in range(40, 101, 5):
        words = " ".join(text for text, _ in conclusion_lines(view, width)).split()
        assert numbers <= set(words)


def test_the_markdown() -> None:
    budget = _budget("loader")
    text = explanation_markdown(build_view(budget), budget)
    assert _matches("explain-loader.md", text)


def test_the_json_has_the_account_and_the_changes() -> None:
    values = _budget("loader").to_json()
    kept = {name: values[name] for name in ("account", "changes", "named")}
    # The last digits depend on the instructions of the processor.
    rounded = json.loads(json.dumps(kept), parse_float=lambda text: round(float(text), 6))
    assert _matches("explain-loader.json", json.dumps(rounded, indent=1) + "\n")


@pytest.mark.parametrize("name", SCREENS)
def test_the_rows_add_up_to_the_measured_step(name: str) -> None:
    budget = _budget(name)
    assert budget.account is not None
    total = sum(row.ms.value for row in budget.account.rows)
    assert total == pytest.approx(budget.account.step_ms.value)
    assert total == pytest.approx(budget.n_devices.step_ms.value)


def test_the_first_change_is_for_the_costliest_row() -> None:
    view = build_view(_budget("loader"))
    account = _budget("loader").account
    assert account is not None
    assert view.change is not None
    assert view.change.row == account.costs[0].id
    assert view.change.measured
    steps = {one.value: one.step_ms.value for one in view.change.alternatives}
    assert f"num_workers={min(steps, key=lambda value: steps[value])}" in view.change.code


@pytest.mark.parametrize(("rest_ms", "advised"), [(8.0, True), (45.0, False)])
def test_a_change_for_a_fraction_of_what_is_missing_is_not_advised(
    rest_ms: float, *, advised: bool
) -> None:
    budget = _budget("loader")
    assert budget.account is not None
    compute, loader, *_, rest = budget.account.rows
    assert loader.id == "data-loader"
    rows = (
        compute,
        dataclasses.replace(loader, ms=Interval(7.0, 6.0, 8.0)),
        dataclasses.replace(rest, ms=Interval(rest_ms, 4.0, 2 * rest_ms)),
    )
    view = build_view(
        dataclasses.replace(budget, account=dataclasses.replace(budget.account, rows=rows))
    )
    assert view.tone == "unknown"
    assert "not attributed yet; the largest known cost is data loader" in view.headline
    assert (view.change is not None) == advised
