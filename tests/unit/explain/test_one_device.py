"""One device explained by itself: where the rest of what its compute alone would do went."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from explaining import HOST, experiment_design, explained, failed, runner, script_runner, target
from nfold.core.measurement import FetchStats, Measurement
from nfold.core.plan import Plan
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, SourceLocation, TraceSummary
from nfold.engines.simulated import Scenario
from nfold.explain.advice import pytorch
from nfold.explain.attribution import FindingBuilder, build_budget
from nfold.explain.cause_costs import Attribution
from nfold.explain.causes.input_pipeline import INPUT
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.planner import required
from nfold.explain.result.budget import Budget
from nfold.explain.result.view import build_view
from nfold.explain.script_probe import probe_script
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import TrialResults
from nfold.report import explanation

BASE: dict[str, Any] = {"compute_ms_per_sample": 0.1, "samples_per_epoch": 1000}
LOADER = DataLoaderProfile(
    batch_size=100,
    batches_per_epoch=20,
    dataset_size=2000,
    sampler="RandomSampler",
    created_at="train.py:7",
)
SEEN = ScriptProfile(steps=30, loader=LOADER, samples_per_step=100.0, device="cuda:0")
HEALTHY = 60


def alone(script: Scenario, seconds: float = 1000.0, **changes: Any) -> Budget:
    """One device with 100 samples a step: 10 ms."""
    said = {"devices": 1, "strategy": "single", "batch": 100, **changes}
    return explained(script, scaling="weak", seconds=seconds, **said)


def of_script(seen: ScriptProfile, **costs: Any) -> tuple[Budget, list[Measurement]]:
    script = Scenario(**{**BASE, **costs})
    made: list[Measurement] = []
    usual = script_runner(script)

    def run(*asked: Any, **more: Any) -> Measurement:
        done: Measurement = usual(*asked, **more)
        made.append(done)
        return done

    one = Experiment(target(script, run=run), TimeBudget(1000.0), ExperimentEvents())
    place = Plan(framework="simulated", device="cuda", devices=1, cores_per_device=8, steps=1)
    measured = one.run(probe_script(one, place, None, HOST, lambda _: (seen,)))
    return build_budget("train.py", measured, one.results), made


PLANTED: list[tuple[str, float, dict[str, Any], dict[str, Any], str]] = [
    ("input", 5.0, {"load_ms_per_sample": 0.6}, {"workers": 4}, "--input resident"),
    ("copies", 2.0, {"copy_ms_per_sample": 0.02}, {}, "--input resident"),
    ("launch-bound", 3.0, {"launch_ms": 13.0}, {}, "--step captured"),
    ("layout", 2.5, {"layout_ms": {"channels_first": 2.5}}, {}, "--layout channels_last"),
    ("epoch-boundary", 1.5, {"epoch_gap_ms": 15.0}, {}, ""),
]


@pytest.mark.parametrize(("cause", "lost_ms", "planted", "changes", "flag"), PLANTED)
def test_what_it_loses_is_told_with_a_change_that_was_measured(
    cause: str, lost_ms: float, planted: dict[str, Any], changes: dict[str, Any], flag: str
) -> None:
    found = alone(Scenario(**BASE, **planted), **changes)
    (first,) = found.significant
    assert (first.cause, first.fix_measured) == (cause, bool(flag))
    assert first.lost_ms.value == pytest.approx(lost_ms)
    assert flag in first.fix
    assert found.rows == ()
    assert found.speedup.value == pytest.approx(1)
    assert found.device_bound is not None
    assert found.device_bound.step_ms.value == pytest.approx(10)
    assert found.device_bound.samples_per_s.value == pytest.approx(10_000)
    assert first.predicted_speedup is not None
    assert first.predicted_speedup.value == pytest.approx((10 + lost_ms) / 10)
    assert first.predicted_samples_per_s is not None
    assert first.predicted_samples_per_s.value == pytest.approx(10_000)


def test_it_is_told_in_words_of_one_device() -> None:
    found = alone(Scenario(**BASE, load_ms_per_sample=0.6), workers=4)
    view = build_view(found)
    assert view.change is not None
    assert (view.change.row, view.change.code) == ("data-loader", "--input resident")
    assert view.change.measured
    assert view.change.factor is not None
    assert view.change.factor.value == pytest.approx(1.5)
    text = explanation.explanation_markdown(view, found)
    assert "1 GPU ·" in text
    assert "its compute alone" in text
    for other in ("1-fold", "1 devices", "link", "imbalance"):
        assert other not in text
    assert found.account is not None
    assert [row.id for row in found.account.rows] == ["compute", "data-loader", "not-attributed"]


def test_of_several_devices_the_second_block_says_what_compute_takes() -> None:
    found = explained(Scenario(**BASE, copy_ms_per_sample=0.02), scaling="weak")
    assert found.account is not None
    own = {row.id: row.ms.value for row in found.account.one_device}
    assert own["compute"] == pytest.approx(10)
    assert own["copies"] == pytest.approx(2)


def test_a_healthy_one_has_nothing_to_change() -> None:
    found = alone(Scenario(**BASE))
    assert build_view(found).tone == "healthy"


def test_what_is_above_no_noise_by_itself_is_told_together() -> None:
    costs: dict[str, Any] = {"copy_ms_per_sample": 0.0018, "layout_ms": {"channels_first": 0.18}}
    found = alone(Scenario(**BASE, **costs), input="loader")
    assert not found.significant
    assert found.not_significant_ms.value == pytest.approx(0.36)
    assert found.account is not None
    assert found.account.not_attributed.ms.value == pytest.approx(0.36)
    view = build_view(found)
    assert view.tone == "unknown"
    assert view.headline == (
        "Probably memory layout and host-to-device copies: together 0.36 of 10.4 ms per step (3 %); "
        "each alone is within the noise."
    )


def test_no_cause_is_named_on_healthy_runs() -> None:
    asked = experiment_design(
        "weak", devices=1, strategy="single", batch=100, steps=10, warmup_steps=1
    )
    rungs = list(dict.fromkeys([asked.actual(), *required(asked)]))
    named = []
    for seed in range(HEALTHY):
        healthy = Scenario(
            compute_ms_per_sample=0.1, noise=0.01, process_noise=0.01, noise_seed=seed
        )
        runs, measured = target(healthy, run=runner(healthy)), TrialResults()
        for number in range(3):
            for rung in rungs:
                measured.add(rung, number, runs.measure(rung, number))
        made = FindingBuilder(Attribution(asked, measured, resamples=60))
        named += [
            (seed, row.cause, row.lost_ms) for row in made.one_device_findings() if row.significant
        ]
    assert named == []


def test_a_script_is_started_once_as_torchrun_starts_one_rank() -> None:
    found, made = of_script(SEEN, load_ms_per_sample=0.05, copy_ms_per_sample=0.02)
    assert {one.plan.strategy for one in made} == {"single"}
    assert {one.plan.devices for one in made} == {1}
    assert sum(one.plan.batch is None for one in made) == 1
    assert found.headline == ""
    assert [row.cause for row in found.significant] == ["input", "copies"]
    costs = {row.cause: row.lost_ms.value for row in found.one_device_rows}
    assert costs["input"] == pytest.approx(5.0)
    assert costs["copies"] == pytest.approx(2.0)
    first = found.significant[0]
    assert first.fix_measured
    assert first.fix == "train.py:7: DataLoader(..., num_workers=1)"


@pytest.mark.parametrize(("load_ms", "at_once"), [(1.2, True), (0.6, False)])
def test_fixes_of_what_takes_most_of_a_step_follow_at_once(load_ms: float, at_once: bool) -> None:
    """20 of 30 ms are worth them before the next process tree, 5 of 15 are not."""
    script = Scenario(
        **BASE, load_ms_per_sample=load_ms, layout_ms={"channels_first": 2.5}, can_interleave=True
    )
    made: list[Measurement] = []
    usual = runner(script)

    def run(*asked: Any, **more: Any) -> Measurement:
        made.append(usual(*asked, **more))
        return made[-1]

    experiment = Experiment(target(script, run=run), TimeBudget(1000.0), ExperimentEvents())
    asked = experiment_design("weak", devices=1, strategy="single", batch=100, workers=4)
    experiment.run(asked)
    fixes = {rung.plan.workers for rung in INPUT.fixes(asked).values()} - {4}
    order = [one.plan.workers in fixes for one in made]
    assert any(order)
    evidence = next(place for place, one in enumerate(made) if one.variant and not one.folder)
    assert (order.index(True) < evidence) is at_once


def test_where_no_loader_was_seen_none_is_told() -> None:
    found, _ = of_script(dataclasses.replace(SEEN, loader=None))
    assert found.plan.workers is None
    assert build_view(found).title == "train.py · 1 GPU · one process · 100 samples per step"


@pytest.mark.parametrize(
    ("made_s", "device", "cores", "tried"),
    [
        (0.10, "cuda", 16, {2, 5}),  # 10 of 12 ms make a batch: the rest takes a fifth of that
        (0.02, "cuda", 16, {1, 2}),
        (0.118, "cuda", 16, {2, 16}),
        (0.118, "cuda", 4, {2, 4}),
        (0.10, "cpu", 16, {1, 2}),
    ],
)
def test_as_many_workers_are_tried_as_keep_up_with_the_rest_of_a_step(
    made_s: float, device: str, cores: int, tried: set[int]
) -> None:
    fetches = FetchStats(batches=10, seconds=made_s, waited_s=0.0)
    plan = Plan(device=device, devices=1, batch=100, workers=0, cores_per_device=cores)
    seen = dataclasses.replace(SEEN, fetches=fetches)
    design = ExperimentDesign(plan=plan, profile=seen, step_ms=12.0)
    found = INPUT.fixes(design)
    assert {rung.plan.workers for rung in found.values()} == tried
    told = f"train.py:7: DataLoader(..., num_workers={max(tried)})"
    assert INPUT.fix(design, MetricView({})) == told, "before any of them is measured"


def test_files_of_images_are_tried_on_the_device_before_anything_else() -> None:
    plan = Plan(device="cuda", devices=1, batch=64, workers=1, decode="cpu", augment="cpu")
    files = ExperimentDesign(plan=plan.edit(input="loader", cache="off"))
    flags = ["--decode device --augment device", "--input resident", "--augment device"]
    assert list(INPUT.fixes(files)) == [*flags, "--workers 2"]
    said = INPUT.fix(files, MetricView({}))
    assert said == f"{', '.join(flags)} or --workers 2 (measure them)"
    pixels = dataclasses.replace(files, plan=files.plan.edit(decode=None, augment="device"))
    assert list(INPUT.fixes(pixels)) == ["--input resident", "--workers 2"]
    keras = dataclasses.replace(files, plan=files.plan.edit(framework="jax"))
    assert list(INPUT.fixes(keras)) == [*flags[1:], "--workers 2"]


def test_what_would_be_slower_without_it_adds_nothing_to_the_compute_alone() -> None:
    """The other order of axes takes 2.5 ms more: the one that is there costs nothing."""
    found = alone(Scenario(**BASE, layout_ms={"channels_last": 2.5}, copy_ms_per_sample=0.02))
    costs = {row.cause: row.lost_ms.value for row in found.one_device_rows}
    assert costs["layout"] == pytest.approx(-2.5)
    assert found.device_bound is not None
    assert found.device_bound.step_ms.value == pytest.approx(10)
    assert found.device_bound is not None
    assert found.device_bound.step_ms.value + costs["copies"] == pytest.approx(
        found.one_device.step_ms.value
    )


def test_time_in_which_a_gpu_of_a_script_waits_for_launches_is_told() -> None:
    traced = TraceSummary(
        steps=6, layout_copy_ms=(0.0,) * 6, launches_per_step=300.0, device_busy_ms=8.0
    )
    seen = dataclasses.replace(SEEN, trace=traced)
    found, _ = of_script(seen, launch_ms=13.0)
    costs = {row.cause: row.lost_ms.value for row in found.one_device_rows}
    assert costs["launch-bound"] == pytest.approx(5.0)
    assert found.device_bound is not None
    assert found.device_bound.step_ms.value == pytest.approx(8.0)


def test_no_gain_is_promised_that_leaves_less_than_the_time_a_gpu_is_busy() -> None:
    """However much runs scatter: of steps that are 30 % apart nothing, or less, might be left."""
    traced = TraceSummary(
        steps=6, layout_copy_ms=(0.0,) * 6, launches_per_step=300.0, device_busy_ms=8.0
    )
    seen = dataclasses.replace(SEEN, trace=traced)
    scatters = {"noise": 0.05, "process_noise": 0.3, "noise_seed": 1}
    found, _ = of_script(seen, launch_ms=50.0, load_ms_per_sample=0.3, **scatters)
    (row,) = (one for one in found.one_device_rows if one.cause == "launch-bound")
    assert row.predicted_speedup is not None
    assert found.one_device.step_ms.high is not None
    assert row.predicted_speedup.high is not None
    assert row.predicted_speedup.high <= found.one_device.step_ms.high / 8.0 * 1.001


@pytest.mark.parametrize("host_syncs", [0.0, 2.0])
def test_a_gpu_that_is_idle_while_its_allocator_tries_again_waits_for_no_launch(
    host_syncs: float,
) -> None:
    traced = TraceSummary(
        steps=6, layout_copy_ms=(0.0,) * 6, launches_per_step=300.0, device_busy_ms=10.0
    )
    seen = dataclasses.replace(SEEN, trace=traced, alloc_retries=2.0, host_syncs=host_syncs)
    found, _ = of_script(seen, retries_ms=40.0, host_syncs_ms=host_syncs)
    costs = {row.cause: row.lost_ms.value for row in found.one_device_rows}
    assert costs["memory"] == pytest.approx(40.0)
    assert costs["launch-bound"] == pytest.approx(0.0)
    assert next(row.cause for row in found.significant) == "memory"
    assert found.device_bound is not None
    assert found.device_bound.step_ms.value == pytest.approx(10.0)


LAUNCHING = dataclasses.replace(
    SEEN,
    trace=TraceSummary(
        steps=6, layout_copy_ms=(0.0,) * 6, launches_per_step=300.0, device_busy_ms=10.0
    ),
    source_locations={"model": (SourceLocation(line="train.py:4"),)},
)


def test_what_launches_cost_is_tried_with_a_compiled_model() -> None:
    found, made = of_script(
        LAUNCHING, launch_ms=16.0, launch_ms_compiled={"default": 14.0, "reduce-overhead": 12.0}
    )
    (first,) = found.significant
    assert (first.cause, first.fix_measured) == ("launch-bound", True)
    assert first.lost_ms.value == pytest.approx(6.0)
    assert first.fix == "train.py:4: torch.compile(model, mode='reduce-overhead')"
    assert first.predicted_speedup is not None
    assert first.predicted_speedup.value == pytest.approx(16 / 12)
    tried = {one.variant.compiled for one in made if one.variant}
    assert tried == {"", "default", "reduce-overhead"}


def test_the_mode_that_replays_nothing_may_be_the_faster_one() -> None:
    found, _ = of_script(LAUNCHING, launch_ms=16.0, launch_ms_compiled={"default": 12.0})
    assert found.significant[0].fix == "train.py:4: torch.compile(model)"
    places = {"trainer": (SourceLocation(line="train.py:9"),), **LAUNCHING.source_locations}
    trained = dataclasses.replace(LAUNCHING, trainer="transformers", source_locations=places)
    told = pytorch.compile_model(trained, "default")
    assert told == "train.py:9: TrainingArguments(..., torch_compile=True)"


def test_a_compiled_model_that_is_no_faster_is_not_advised() -> None:
    found, made = of_script(LAUNCHING, launch_ms=16.0)
    (first,) = found.significant
    assert not first.fix_measured
    assert first.fix == (
        "train.py:7: a larger batch_size (torch.compile, reduce-overhead: no gain and "
        "default: no gain)"
    )
    assert any(one.variant and one.variant.compiled for one in made)


def test_a_gain_of_compilation_within_the_noise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attribution, "is_faster", lambda self, trial: False)
    found, _ = of_script(LAUNCHING, launch_ms=16.0, launch_ms_compiled={"reduce-overhead": 12.0})
    (first,) = found.significant
    assert not first.fix_measured
    assert re.search(r"\(torch.compile, reduce-overhead: 1\.\d\dx, within the noise", first.fix)


@pytest.mark.parametrize(
    ("status", "told"), [("crashed", "failed"), ("interrupted", "was not measured")]
)
def test_what_could_not_be_compiled_is_not_advised(status: Any, told: str) -> None:
    usual = script_runner(Scenario(**BASE, launch_ms=16.0))

    def run(workload: Any, asked: Plan, ablation: Any = None, **more: Any) -> Measurement:
        if ablation is not None and ablation.compiled:
            found = failed(Trial(plan=asked, variant=ablation), "nothing could be compiled")
            return dataclasses.replace(found, status=status)
        done: Measurement = usual(workload, asked, ablation, **more)
        return done

    one = Experiment(target(Scenario(**BASE), run=run), TimeBudget(1000.0), ExperimentEvents())
    place = Plan(framework="simulated", device="cuda", devices=1, cores_per_device=8, steps=1)
    asked = one.run(probe_script(one, place, None, HOST, lambda _: (LAUNCHING,)))
    (first,) = build_budget("train.py", asked, one.results).significant
    assert first.fix == f"train.py:7: a larger batch_size (torch.compile {told})"


def test_no_cost_of_the_host_leaves_less_than_the_device_was_busy_with() -> None:
    """Where batches are made beside a device, and slow it down, they cost more than its rest."""
    traced = TraceSummary(
        steps=6, layout_copy_ms=(0.0,) * 6, launches_per_step=300.0, device_busy_ms=20.0
    )
    seen = dataclasses.replace(LAUNCHING, trace=traced)
    found, _ = of_script(seen, launch_ms=16.0, load_ms_per_sample=1.0)
    lost = sum(row.lost_ms.value for row in found.one_device_rows)
    assert found.n_devices.step_ms.value - lost == pytest.approx(16.0)
    assert found.device_bound is not None
    assert found.device_bound.step_ms.value == pytest.approx(20.0)


def test_what_is_compiled_already_is_not_compiled_again() -> None:
    found, made = of_script(dataclasses.replace(LAUNCHING, compiled=True), launch_ms=16.0)
    assert found.plan.step == "compiled"
    assert found.significant[0].fix == "train.py:7: a larger batch_size"
    assert not any(one.variant and one.variant.compiled for one in made)


CONVOLVED = dataclasses.replace(
    SEEN,
    trace=TraceSummary(
        steps=6, layout_copy_ms=(0.0,) * 6, cudnn_transpose_ms=1.0, device_busy_ms=9.0
    ),
    convolutions=3,
    source_locations={"model": (SourceLocation(line="train.py:4"),)},
)


def test_another_order_of_weights_is_measured_where_cudnn_transposes() -> None:
    found, made = of_script(CONVOLVED, layout_ms={"channels_first": 2.5})
    (first,) = found.significant
    assert (first.cause, first.fix_measured) == ("layout", True)
    assert first.lost_ms.value == pytest.approx(2.5)
    assert first.fix == "train.py:4: model and images in channels_last"
    assert first.predicted_speedup is not None
    assert first.predicted_speedup.value == pytest.approx(12.5 / 10)
    tried = [one for one in made if one.variant and one.variant.channels_last]
    assert {one.variant.input for one in tried if one.variant} == {"resident", "real"}


@pytest.mark.parametrize("other_ms", [2.5, 4.0])
def test_transposes_are_no_loss_where_the_other_order_is_no_faster(other_ms: float) -> None:
    layouts = {"channels_first": 2.5, "channels_last": other_ms}
    found, made = of_script(CONVOLVED, layout_ms=layouts)
    assert any(one.variant and one.variant.channels_last for one in made)
    assert not found.significant
    (row,) = (row for row in found.one_device_rows if row.cause == "layout")
    assert row.lost_ms.value == pytest.approx(2.5 - other_ms)


OWN_COPY: dict[str, tuple[SourceLocation, ...]] = {
    "order on cuda": (SourceLocation(line="train.py:31"),)
}


def test_copies_of_a_script_s_own_are_told_beside_it() -> None:
    assert CONVOLVED.trace is not None
    traced = dataclasses.replace(CONVOLVED.trace, layout_copy_ms=(3.0,) * 6)
    seen = dataclasses.replace(CONVOLVED, trace=traced, source_locations=OWN_COPY)
    found, _ = of_script(seen)
    (first,) = found.significant
    assert first.lost_ms.value == pytest.approx(3.0)
    assert "no .contiguous() after a permute" in first.fix


def test_copies_that_convolutions_make_are_worth_what_the_other_order_gains() -> None:
    """Of 3 ms a step convolutions make 2: without the other order, which costs 1.2 less."""
    traced = TraceSummary(
        steps=6, layout_copy_ms=(3.0,) * 6, operator_layout_copy_ms=(2.0,) * 6, device_busy_ms=9.0
    )
    found, made = of_script(
        dataclasses.replace(CONVOLVED, trace=traced, source_locations=OWN_COPY),
        layout_ms={"channels_first": 1.2},
    )
    assert any(one.variant and one.variant.channels_last for one in made)
    (row,) = (row for row in found.one_device_rows if row.cause == "layout")
    assert row.lost_ms.value == pytest.approx(1.0 + 1.2)


@pytest.mark.parametrize("changed", [{"convolutions": 0}, {"channels_last": True}])
def test_where_there_is_no_other_order_to_try_none_is(changed: dict[str, Any]) -> None:
    _, made = of_script(dataclasses.replace(CONVOLVED, **changed))
    assert not any(one.variant and one.variant.channels_last for one in made)
