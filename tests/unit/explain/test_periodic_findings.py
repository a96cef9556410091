"""What a script does after some steps only, as a row of its budget."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

import made
from explaining import HOST, SECONDS, explained, script_runner, target
from nfold.core.plan import Plan
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, SourceLocation, TraceSummary
from nfold.engines.simulated import Scenario
from nfold.explain.attribution import build_budget
from nfold.explain.causes.epoch_boundary import EPOCH_BOUNDARY
from nfold.explain.design import ExperimentDesign
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.result.budget import Budget, Finding
from nfold.explain.result.view import build_view
from nfold.explain.script_probe import probe_script
from nfold.explain.time_budget import TimeBudget

COSTS: dict[str, Any] = {"compute_ms_per_sample": 0.1, "samples_per_epoch": 2000}
PAUSE: dict[str, Any] = {"host_gap_ms": 40.0, "host_gap_every": 20, "host_gap_rank": 0}
FED = DataLoaderProfile(
    batch_size=100,
    batches_per_epoch=20,
    dataset_size=2000,
    sampler="RandomSampler",
    created_at="train.py:7",
)
DDP = ScriptProfile(
    steps=30,
    loader=FED,
    samples_per_step=100.0,
    device="cuda:0",
    world_size=2,
    process_group=True,
    parallel="ddp",
    backend="nccl",
    source_locations={"step": (SourceLocation(line="train.py:31"),)},
)


EVERY_STEP: dict[str, Any] = {"host_gap_ms": 5.0, "host_gap_every": 1, "host_gap_rank": None}
TRACED = TraceSummary(
    steps=6, layout_copy_ms=(0.0,) * 6, launches_per_step=300.0, device_busy_ms=10.0
)


def _of_script(
    seen: ScriptProfile,
    seconds: float = SECONDS,
    unwatched: int = 0,
    device: Literal["cpu", "cuda"] = "cuda",
    **costs: Any,
) -> Budget:
    """Nobody saw when runs of ``unwatched`` ranks asked for their batches."""
    script = Scenario(**{**COSTS, **costs})
    one = Experiment(
        target(script, run=script_runner(script)), TimeBudget(seconds), ExperimentEvents()
    )
    place = Plan(framework="simulated", device=device, devices=2, steps=1)
    asked = one.run(probe_script(one, place, None, HOST, lambda _: (seen,)))
    for runs in one.results.runs.values():
        for number, found in runs.items():
            if len(found.ranks) == unwatched:
                ranks = (dataclasses.replace(rank, host_gaps_ms=()) for rank in found.ranks)
                runs[number] = dataclasses.replace(found, ranks=tuple(ranks))
    return build_budget("train.py", asked, one.results)


def _row(rows: tuple[Finding, ...], cause: str = "epoch-boundary") -> Finding:
    (found,) = (row for row in rows if row.cause == cause)
    return found


def test_what_rank_0_does_after_every_20th_step_has_its_line_and_its_size() -> None:
    """2 ms of every step, on one device alone too, which is rank 0 as well."""
    found = _of_script(DDP, **PAUSE)
    assert found.n_devices.step_ms.value == pytest.approx(10 + 2)
    assert _row(found.rows).lost_ms.value == pytest.approx(0)
    one = _row(found.one_device_rows)
    assert one.significant
    assert one.lost_ms.value == pytest.approx(2)
    assert one.fix.startswith("train.py:31: 40 ms every 20 steps: evaluate, log and")
    change = build_view(found).change
    assert change is not None
    assert change.location == "train.py:31"
    assert not {"imbalance", "input"} & {row.cause for row in found.significant}
    assert found.not_attributed_ms.value == pytest.approx(0, abs=1e-9)


def test_it_stands_beside_what_lies_between_epochs() -> None:
    """80 ms between epochs of 10 steps on two devices, of 20 on one."""
    found = _of_script(DDP, **PAUSE, epoch_gap_ms=80.0)
    row = _row(found.rows)
    assert {name: cost.value for name, cost in row.components} == {
        "between epochs": pytest.approx(4),
        "periodic work within epochs": pytest.approx(0),
    }
    assert row.lost_ms.value == pytest.approx(4)
    assert _row(found.one_device_rows).lost_ms.value == pytest.approx(4 + 2)
    assert "come after" not in row.fix
    assert found.not_attributed_ms.value == pytest.approx(0, abs=1e-9)


def test_a_rank_that_waits_for_a_slower_one_loses_only_the_rest() -> None:
    """13 ms of rank 1, of which rank 0 waits for 3: of its 43 ms between steps 40 are lost."""
    slow: dict[str, Any] = {"straggler_ms": 3.0, "straggler_rank": 1}
    found = explained(Scenario(**COSTS, **{**PAUSE, "host_gap_ms": 43.0}, **slow))
    lost = {row.cause: row.lost_ms.value for row in found.rows}
    assert lost["imbalance"] == pytest.approx(3)
    assert lost["epoch-boundary"] == pytest.approx(40 / 20 - 43 / 20 / 2)
    assert found.not_attributed_ms.value == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batches_per_epoch": None, "dataset_size": 2_000_000}, "whole epochs take"),
        (
            {"batches_per_epoch": 156_250_000, "dataset_size": 10_000},
            "an epoch has 156,250,000 batches: no",
        ),
    ],
)
def test_the_ends_of_epochs_may_still_be_unknown(changes: dict[str, Any], reason: str) -> None:
    seen = dataclasses.replace(DDP, loader=dataclasses.replace(FED, **changes))
    found = _of_script(seen, seconds=100.0, **PAUSE, samples_per_epoch=2_000_000)
    assert _row(found.one_device_rows).significant
    assert dict(found.unmeasured)["epoch-boundary"].startswith(f"its epoch boundaries: {reason}")


def test_what_recurs_on_n_devices_and_is_unknown_of_one_is_told_beside_the_rows() -> None:
    """It is in no usual step of two devices, and in no row."""
    endless = dataclasses.replace(
        DDP, loader=dataclasses.replace(FED, batches_per_epoch=156_250_000)
    )
    found = _of_script(endless, unwatched=1, **PAUSE)
    assert found.n_devices.step_ms.value == pytest.approx(10)
    reason = dict(found.unmeasured)["epoch-boundary"]
    assert reason.startswith(
        "2.00 ms per step of work after every 20 steps, which was not measured on one device"
    )


def test_what_rank_0_alone_does_after_every_step_is_a_slower_rank_and_one_device_is_it() -> None:
    """Two devices are twice as fast as one that does the same: nothing is missing to two-fold."""
    found = _of_script(DDP, **{**EVERY_STEP, "host_gap_rank": 0})
    assert found.speedup.value == pytest.approx(2)
    assert [row.cause for row in found.rows if abs(row.lost_ms.value) > 1e-6] == []
    (one,) = (row for row in found.one_device_rows if row.lost_ms.value > 1e-6)
    assert (one.cause, one.significant) == ("imbalance", True)
    assert one.lost_ms.value == pytest.approx(5)
    assert one.fix.startswith("train.py:31: rank 0 spends 5.0 ms outside of training")
    assert one.predicted_speedup is not None
    assert one.predicted_speedup.value == pytest.approx(1.5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_every_rank_does_after_every_step_is_no_launch(device: Any) -> None:
    """13 ms of launches for 10 of a GPU's, and 5 in which the host does something else."""
    seen = dataclasses.replace(DDP, device=device, trace=TRACED if device == "cuda" else None)
    found = _of_script(seen, device=device, **EVERY_STEP, launch_ms=13.0)
    lost = {
        row.cause: row.lost_ms.value for row in found.one_device_rows if row.lost_ms.value > 1e-6
    }
    launches = {"launch-bound": pytest.approx(3)} if device == "cuda" else {}
    assert lost == {"epoch-boundary": pytest.approx(5), **launches}
    assert _row(found.one_device_rows).fix.startswith(
        "train.py:31: 5.0 ms pass after every step before"
    )
    assert _row(found.rows).lost_ms.value == pytest.approx(0)
    told_by = {"cpu": "replayed", "cuda": "resident"}[device]
    assert any(f"input {told_by}" in name for name in _row(found.one_device_rows).evidence)
    assert found.device_bound is not None
    bound_ms = 10 if device == "cuda" else 13
    assert found.device_bound.step_ms.value == pytest.approx(bound_ms)


@pytest.mark.parametrize("followed", [False, True])
def test_without_a_loader_it_lasts_until_the_model_is_called(followed: bool) -> None:
    """Of a model that is compiled as a whole nobody sees the call: its forward may be in it."""
    seen = dataclasses.replace(DDP, loader=None, model_calls_hooked=followed)
    found = _of_script(seen, device="cpu", **EVERY_STEP)
    lost = {
        row.cause: row.lost_ms.value for row in found.one_device_rows if row.lost_ms.value > 1e-6
    }
    assert lost == ({"epoch-boundary": pytest.approx(5)} if followed else {})


@pytest.mark.parametrize("changes", [{"launch_ms": 1.0}, {"launch_ms": 13.0, "host_gap_ms": 0.2}])
def test_what_a_gpu_does_not_wait_for_or_hardly_costs_nothing(changes: dict[str, Any]) -> None:
    """A host that is a step ahead has the time."""
    seen = dataclasses.replace(DDP, trace=TRACED)
    found = _of_script(seen, **{**EVERY_STEP, **changes})
    assert [
        row for row in found.one_device_rows if row.cause == "epoch-boundary" and row.lost_ms.value
    ] == []


def test_what_rank_0_does_beyond_the_others_is_told_once() -> None:
    """2 ms of every rank, 3 more of rank 0."""
    seen = dataclasses.replace(DDP, trace=TRACED)
    more: dict[str, Any] = {"straggler_ms": 3.0, "straggler_rank": 0, "straggler_bound_to": "data"}
    found = _of_script(seen, **{**EVERY_STEP, "host_gap_ms": 2.0}, **more, launch_ms=13.0)
    lost = {row.cause: row.lost_ms.value for row in found.one_device_rows}
    assert lost["imbalance"] == pytest.approx(3)
    assert lost["epoch-boundary"] == pytest.approx(2)


def test_what_only_one_device_alone_has_is_told_with_how_often_it_comes() -> None:
    design = ExperimentDesign(
        plan=made.plan(HOST, devices=2, batch=16), profile=DDP, scaling="weak"
    )
    full, one = design.actual(), design.baseline
    known = {
        (full, "step"): 10.0,
        (one, "step"): 10.0,
        (full, "periodic"): 0.0,
        (one, "periodic"): 1.5,
        (one, "period"): 72.0,
    }
    assert EPOCH_BOUNDARY.one_device_fix(design, MetricView(known)).startswith(
        "train.py:31: 108 ms every 72 steps"
    )


def test_a_cpu_device_shows_its_gap_after_every_step_with_real_input_too() -> None:
    """A short explanation of long steps has no trial with replayed batches."""
    script = Scenario(**{**COSTS, **EVERY_STEP, "host_gap_ms": 40.0})
    one = Experiment(
        target(script, run=script_runner(script)), TimeBudget(SECONDS), ExperimentEvents()
    )
    place = Plan(framework="simulated", device="cpu", devices=2, steps=1)
    seen = dataclasses.replace(DDP, device="cpu", backend="gloo")
    asked = one.run(probe_script(one, place, None, HOST, lambda _: (seen,)))
    for trial in list(one.results.runs):
        if trial.variant.input != "real":
            del one.results.runs[trial]
    view = build_view(build_budget("train.py", asked, one.results))
    assert "time passes between epochs or between steps" in view.headline.lower()
    assert view.change is not None
    assert view.change.location == "train.py:31"
    assert "40.0 ms pass after every step" in view.change.code
