"""Remedies that are fields of a plan: which values are tried, and what else they need."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from explaining import HOST, Memory, experiment_design, explained, target
from nfold.core.plan import PLAN_FIELDS, Plan
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, SourceLocation
from nfold.core.source_edit import SetKeywords
from nfold.core.stats import Interval
from nfold.core.workload import Workload
from nfold.engines.base import get_framework
from nfold.engines.simulated import Scenario
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import WorkloadRunner
from nfold.interventions.registry import REGISTRY
from nfold.launch.launch_spec import StopRequest
from nfold.tune.keep import source_edits
from nfold.tune.plan_edits import loader_batch_size
from nfold.tune.plan_fields import EXCLUDED_WITH_RUN, TUNABLE_FIELDS, field_values
from nfold.tune.remedies import (
    PERMISSIONS,
    PlanCompletion,
    Remedy,
    apply_all,
    choose_remedies,
    groups_to_try,
    values_to_try,
)
from nfold.tune.result import ConvertedScript, EditedCopy, TuneResult
from nfold.tune.runs.fresh_runs import TuneEvents
from nfold.tune.search import Search

FIXED_FIELDS = {
    *("framework", "device", "devices", "cores_per_device"),  # where it trains
    *("seed", "steps", "epochs", "warmup_steps", "bad_images"),  # what it trains, for how long
    *("memory", "optimizer_state", "allocation"),  # memory in place of time
}


def refusal(workload: str) -> Any:
    def reason(trial: Trial) -> str | None:
        framework = get_framework(trial.plan.framework)
        return framework.unsupported_reason(Workload.parse(workload), trial.plan, HOST)

    return reason


def torch_plan(**changes: Any) -> Plan:
    asked = {"device": "cuda", "devices": 2, "batch": 64, "input": "loader", **changes}
    return experiment_design(**{"framework": "torch", **asked}).plan


def complete(name: str, value: Any, plan: Plan, *allowed: str) -> Remedy | None:
    completion = PlanCompletion(HOST.cores, allowed, refusal("digits"))
    return completion.complete(Remedy(name=name, value=value), Trial(plan=plan))


def candidates(plan: Plan, *allowed: str) -> list[tuple[str, Any]]:
    design = ExperimentDesign(plan=plan)
    budget = explained(Scenario())
    found = choose_remedies(design, budget, HOST.cores, allowed, refusal("digits"))
    return [(one.name, one.value) for one in found]


def test_every_field_is_tried_or_is_no_matter_of_speed() -> None:
    assert TUNABLE_FIELDS.keys() | FIXED_FIELDS == set(PLAN_FIELDS)
    assert not TUNABLE_FIELDS.keys() & FIXED_FIELDS
    remedies = {name for name, each in REGISTRY.items() if each.kind == "remedy"}
    assert not TUNABLE_FIELDS.keys() & remedies


def test_values_of_the_plan_are_not_tried_again() -> None:
    plan = torch_plan(accumulate=2)
    for name in TUNABLE_FIELDS:
        assert getattr(plan, name) not in field_values(name, plan, HOST.cores)


@pytest.mark.parametrize(
    ("permission", "remedy"),
    [
        ("precision", ("precision", "bf16")),
        ("communication", ("exchange", "bf16")),
        ("batch_norm", ("batch_norm", "device")),
        ("batch", ("batch", 128)),
    ],
)
def test_values_that_change_the_training_need_permission(
    permission: str, remedy: tuple[str, Any]
) -> None:
    plan = torch_plan(batch_norm="synchronised")
    assert permission in PERMISSIONS
    assert remedy not in candidates(plan)
    assert remedy in candidates(plan, permission)


def test_values_that_the_rules_refuse_are_no_candidates() -> None:
    on_cpu = candidates(torch_plan(device="cpu"), "precision")
    assert ("precision", "bf16") in on_cpu
    assert not {("precision", "tf32"), ("precision", "fp16"), ("step", "captured")} & set(on_cpu)


def test_a_value_is_tried_with_the_fields_that_it_needs() -> None:
    plan = torch_plan(strategy="ddp")
    found = complete("step", "compiled", plan)
    assert found is not None
    assert found.label == "step compiled with strategy nfold"
    kernels = complete("kernels", "tuned", plan)
    assert kernels is not None
    assert dict(kernels.needs) == {"strategy": "nfold", "step": "compiled"}
    assert complete("precision", "tf32", torch_plan(device="cpu"), "precision") is None


def test_needed_fields_leave_those_of_kept_remedies() -> None:
    completion = PlanCompletion(HOST.cores, (), refusal("digits"))
    step = Remedy(name="step", value="compiled", needs=(("strategy", "nfold"),))
    kept_trial = step.apply(Trial(plan=torch_plan(strategy="ddp")))
    other = completion.complete(Remedy(name="strategy", value="ddp"), kept_trial, [step])
    assert other is None
    captured = completion.complete(Remedy(name="step", value="captured"), kept_trial, [step])
    assert captured is not None
    assert dict(captured.needs) == {"strategy": "nfold"}


def tune(scenario: Scenario, *allowed: str, **changes: Any) -> TuneResult:
    def explain(runner: WorkloadRunner, seconds: float) -> tuple[ExperimentDesign, Experiment]:
        budget = TimeBudget(seconds, now=lambda: float(len(memory.kept)))
        experiment = Experiment(runner, budget, ExperimentEvents())
        return experiment.run(experiment_design(**changes)), experiment

    memory = Memory()
    search = Search(
        runner=target(scenario, memory),
        explain=explain,
        time_budget=TimeBudget(400.0, now=lambda: float(len(memory.kept))),
        events=TuneEvents(),
        stop=StopRequest(),
        cores=HOST.cores,
        edit_script=lambda kept, profile, converted: EditedCopy(),
        convert_script=lambda profile: ConvertedScript(obstacle="a workload"),
        allowed=frozenset(allowed),
    )
    return search.run()


def test_a_field_of_a_workload_is_kept_and_verified() -> None:
    costs = Scenario(
        compute_ms_per_sample=0.1,
        noise=0.01,
        process_noise=0.004,
        batch_norm_ms=5.0,
        layout_ms={"channels_first": 3.0},
    )
    changes = {"batch_norm": "synchronised"}
    without = tune(costs, **changes)
    assert {(one.name, one.value) for one in without.kept} == {("layout", "channels_last")}
    allowed = tune(costs, "batch_norm", **changes)
    assert {one.name for one in allowed.kept} == {"layout", "batch_norm"}
    assert allowed.is_verified
    assert allowed.verification.gain is not None
    assert allowed.verification.gain.value == pytest.approx(18 / 10, rel=0.03)
    assert allowed.final.plan.batch_norm == "device"


RUN_PROFILE = ScriptProfile(
    precision="fp32", source_locations={"run": (SourceLocation(line="train.py:3"),)}
)
SCRIPT = Workload(name="train.py", script=("train.py",))


def script_candidates(profile: ScriptProfile, *allowed: str) -> list[Remedy]:
    def reason(trial: Trial) -> str | None:
        return get_framework("torch").refusal_reason(trial.variant, SCRIPT, trial.plan)

    design = ExperimentDesign(plan=torch_plan(device="cpu"), profile=profile)
    budget = explained(Scenario())
    found = choose_remedies(design, budget, HOST.cores, allowed, reason)
    return [one for one in found if one.name in TUNABLE_FIELDS]


def test_fields_of_nfold_run_are_remedies_of_its_script() -> None:
    assert script_candidates(ScriptProfile(), "precision") == []
    values = {(one.name, one.value) for one in script_candidates(RUN_PROFILE)}
    assert ("step", "compiled") in values
    assert not {("step", "captured"), ("precision", "bf16"), ("workers", 2)} & values
    permitted = script_candidates(RUN_PROFILE, "precision", "communication")
    assert {("precision", "bf16"), ("exchange", "bf16")} <= {(o.name, o.value) for o in permitted}


def test_what_fields_of_nfold_run_do_is_no_other_remedy_of_its_script() -> None:
    assert set(EXCLUDED_WITH_RUN) <= {*REGISTRY, *TUNABLE_FIELDS}
    plan, usual = torch_plan(device="cpu"), dataclasses.replace(RUN_PROFILE, source_locations={})
    for profile, number in ((RUN_PROFILE, 0), (usual, 1)):
        design = ExperimentDesign(plan=plan, profile=profile)
        assert min(1, len(values_to_try("compiled", design, HOST.cores))) == number


def test_the_batch_of_a_script_is_doubled_if_that_is_allowed() -> None:
    loader = DataLoaderProfile(batch_size=16, created_at="train.py:7")
    profile = ScriptProfile(loader=loader, world_size=2, accumulation=2)
    assert "batch" not in {one.name for one in script_candidates(profile)}
    (remedy,) = [one for one in script_candidates(profile, "batch") if one.name == "batch"]
    assert (remedy.value, remedy.numerics) == (128, "training")
    assert remedy.apply(Trial(plan=torch_plan())).plan.batch == 128
    # 2 processes that take 2 batches for a step: 32 samples in each.
    keywords = (("batch_size", "32"),)
    assert source_edits(remedy, profile) == (
        SetKeywords(location="train.py:7", function="DataLoader", keywords=keywords),
    )
    slices = dataclasses.replace(profile, slices_batches=True)
    assert loader_batch_size(128, slices) == 64
    others = dataclasses.replace(profile, companion_loaders=(loader,))
    sized = dataclasses.replace(profile, loader=DataLoaderProfile(created_at="train.py:7"))
    for without in (others, sized, dataclasses.replace(RUN_PROFILE, loader=loader)):
        found = script_candidates(without, "batch")
        assert "batch" not in {one.name for one in found}


def test_a_batch_that_is_kept_is_doubled_again() -> None:
    plan = torch_plan(batch=64)
    values = [128]
    while (further := Remedy(name="batch", value=values[-1]).further(HOST.cores, plan)) is not None:
        values.append(further.value)
    assert values == [128, 256, 512]


def test_the_first_remedies_tried_together_need_no_permission() -> None:
    found = script_candidates(RUN_PROFILE, "precision", "communication")
    names = {one.name for group in groups_to_try(found) for one in group}
    assert {"step", "layout"} <= names
    assert not {"precision", "exchange"} & names


def test_remedies_are_tried_together_by_what_they_work_on() -> None:
    compiled = Remedy(name="compiled", value="default")
    views = Remedy(name="gradient_as_bucket_view", value=True)
    pinned = Remedy(name="loader_pin_memory", value=True)
    workers = Remedy(name="workers", value=4, predicted=Interval(1.5, 1.4, 1.6))
    more = dataclasses.replace(workers, value=8)
    assert groups_to_try([views, compiled, workers, pinned, more]) == [
        [workers, pinned],
        [compiled],
        [views],
    ]


def test_fields_of_nfold_run_are_kept_together_and_in_its_call() -> None:
    found = script_candidates(RUN_PROFILE, "precision", "communication")
    chosen = [one for one in found if one.value == "bf16"]
    trial = apply_all(chosen, Trial(plan=torch_plan(device="cpu")))
    assert dict(trial.variant.run_plan) == {"precision": "bf16", "exchange": "bf16"}
    assert trial.plan == torch_plan(device="cpu")
    (edit,) = source_edits(chosen[0], RUN_PROFILE) or ()
    assert edit == SetKeywords(
        location="train.py:3", function="Run", keywords=((chosen[0].name, '"bf16"'),)
    )
