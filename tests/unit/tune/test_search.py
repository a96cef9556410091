"""The search of ``nfold tune`` on the simulated framework, whose costs are known."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from explaining import HOST, Memory, failed, script_runner, target
from nfold.cli.tune_command import keep_result
from nfold.cli.tune_screen import describe_tried, result_lines
from nfold.core.errors import RunFailure
from nfold.core.measurement import Caveat, Measurement
from nfold.core.plan import Plan
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile
from nfold.core.source_edit import AddStatement
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.simulated import Scenario
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.script_probe import probe_script
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import WorkloadRunner
from nfold.launch.launch_spec import StopRequest
from nfold.launch.training_checks import AUGMENTED_COPIES
from nfold.tune.conversion.conversion_check import COMPARED_STEPS
from nfold.tune.plan_fields import EXCLUDED_WITH_RUN
from nfold.tune.remedies import Remedy
from nfold.tune.result import ConvertedScript, EditedCopy, Tried, TuneResult
from nfold.tune.runs.fresh_runs import TuneEvents
from nfold.tune.search import EXPLAIN_ROUNDS, EditScript, Search
from nfold.tune.source_patch import make_patch
from nfold.tune.waterfall import kept_groups

PLACE = Plan(framework="simulated", device="cuda", devices=2, cores_per_device=8, steps=1)
PROFILE = ScriptProfile(
    steps=30,
    loader=DataLoaderProfile(
        batch_size=100, batches_per_epoch=20, dataset_size=2000, created_at="train.py:7"
    ),
    samples_per_step=100.0,
    device="cuda:0",
    world_size=2,
    process_group=True,
    parallel="ddp",
    backend="nccl",
    broadcast_buffers=True,
    buffers=10,
    detects_anomalies=True,
    find_unused_parameters=True,
    optimizers=("AdamW",),
    precision="fp32",
)
COSTS: dict[str, Any] = {
    "compute_ms_per_sample": 0.1,
    "samples_per_epoch": 2000,
    "noise": 0.01,
    "process_noise": 0.004,
}
Sabotage = Callable[[Measurement, Variant], Measurement]


class Simulation:
    """Runs of a scenario: every one takes a second; ``sabotage`` changes measurements."""

    def __init__(
        self,
        scenario: Scenario,
        sabotage: Sabotage | None = None,
        *,
        profile: ScriptProfile = PROFILE,
        converted: ConvertedScript | None = None,
    ) -> None:
        self.seconds = 0.0
        self.profile = profile
        self.edited: EditScript = lambda kept, profile, converted: EditedCopy()
        self.converted = converted or ConvertedScript(obstacle="train.py:7: a reason")
        self._usual, self._sabotage = script_runner(scenario), sabotage
        self.runner = target(scenario, Memory(), self._run)

    def _run(
        self, workload: Any, plan: Plan, variant: Variant | None = None, **more: Any
    ) -> Measurement:
        self.seconds += 1.0
        found: Measurement = self._usual(workload, plan, variant, **more)
        losses = tuple((step, 1.0 / step) for step in range(1, 21))
        ranks = (  # hashes of simulated samples do not add up over ranks
            dataclasses.replace(rank, losses=losses, sample_hashes=()) for rank in found.ranks
        )
        found = dataclasses.replace(found, ranks=tuple(ranks))
        return self._sabotage(found, variant or Variant()) if self._sabotage else found

    def explain(
        self, runner: WorkloadRunner, seconds: float
    ) -> tuple[ExperimentDesign, Experiment]:
        budget = TimeBudget(seconds, now=lambda: self.seconds)
        events = ExperimentEvents()
        experiment = Experiment(runner, budget, events, max_rounds=EXPLAIN_ROUNDS)
        design = probe_script(experiment, PLACE, None, HOST, lambda _: (self.profile,))
        return experiment.run(design), experiment

    def tune(self, budget_s: float = 400.0, allowed: Collection[str] = ()) -> TuneResult:
        search = Search(
            runner=self.runner,
            explain=self.explain,
            time_budget=TimeBudget(budget_s, now=lambda: self.seconds),
            events=TuneEvents(),
            stop=StopRequest(),
            cores=HOST.cores,
            edit_script=self.edited,
            convert_script=lambda profile: self.converted,
            allowed=frozenset(allowed),
        )
        return search.run()


def scenario(**costs: Any) -> Scenario:
    return Scenario(**{**COSTS, **costs})


def scaled(found: Measurement, factor: float) -> Measurement:
    """Return a measurement with all times multiplied."""
    ranks = []
    for rank in found.ranks:
        windows = tuple(
            dataclasses.replace(one, seconds=factor * one.seconds) for one in rank.windows
        )
        step_ms = tuple(factor * one for one in rank.step_ms)
        ranks.append(dataclasses.replace(rank, windows=windows, step_ms=step_ms))
    return dataclasses.replace(found, ranks=tuple(ranks))


def outcomes(result: TuneResult) -> dict[str, str]:
    return {one.remedy.name: one.outcome for one in result.tried}


def test_remedies_of_known_costs_are_kept_and_verified() -> None:
    result = Simulation(scenario(anomaly_ms=5.0, unused_ms=2.0)).tune()
    kept = {one.name for one in result.kept}
    assert {"anomaly_detection", "find_unused_parameters"} <= kept
    gain = result.verification.gain
    assert gain is not None
    assert gain.low is not None
    assert result.is_verified
    assert gain.value == pytest.approx(17 / 10, rel=0.03)


def test_a_remedy_that_is_slower_is_not_kept() -> None:
    result = Simulation(
        scenario(anomaly_ms=5.0, intervention_ms={"gradient_as_bucket_view": -1.0})
    ).tune()
    assert outcomes(result)["gradient_as_bucket_view"] == "no gain"
    assert {one.name for one in result.kept} == {"anomaly_detection"}


def test_a_remedy_that_changes_losses_is_not_kept() -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        if variant.find_unused_parameters:
            return found
        wrong = tuple((step, 1.1 / step) for step in range(1, 21))
        ranks = (dataclasses.replace(rank, losses=wrong) for rank in found.ranks)
        return dataclasses.replace(found, ranks=tuple(ranks))

    result = Simulation(scenario(anomaly_ms=5.0, unused_ms=2.0), sabotage).tune()
    assert outcomes(result)["find_unused_parameters"] == "changes training"
    assert {one.name for one in result.kept} == {"anomaly_detection"}
    assert result.is_verified


@pytest.mark.parametrize(
    ("digest", "factor", "expected"),
    [
        pytest.param("a", 1.02, "kept", id="the same samples, augmented otherwise"),
        pytest.param("b", 1.02, "changes training", id="other samples"),
        pytest.param("a", 1.2, "changes training", id="another mean loss"),
    ],
)
def test_workers_may_draw_other_random_numbers(digest: str, factor: float, expected: str) -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        more = bool(found.plan.workers)
        ranks = (
            dataclasses.replace(
                rank,
                sample_hashes=((100, digest if more else "a"),),
                losses=tuple((s, (factor if more and s % 2 else 1.0) / s) for s in range(1, 21)),
            )
            for rank in found.ranks
        )
        found = dataclasses.replace(found, ranks=tuple(ranks))
        return scaled(found, 0.5) if more else found

    result = Simulation(scenario(), sabotage).tune()
    tried = [one for one in result.tried if one.remedy.name == "workers"]
    assert {one.outcome for one in tried} & {"kept", "changes training"} == {expected}
    assert result.is_verified == (expected == "kept")
    assert ("other random numbers" in result.losses) == (expected == "kept")


@pytest.mark.parametrize(
    ("draws", "factor", "expected"),
    [
        pytest.param(True, 1.1, "kept", id="other numbers for dropout"),
        pytest.param(True, 1.4, "changes training", id="another mean loss"),
        pytest.param(False, 1.1, "changes training", id="no numbers are drawn"),
    ],
)
def test_a_compiled_model_may_draw_other_numbers_for_dropout(
    *, draws: bool, factor: float, expected: str
) -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        ranks = (
            dataclasses.replace(
                rank,
                sample_hashes=((100, "a"),),
                losses=tuple(
                    (s, (factor if variant.compiled and s % 2 else 1.0) / s) for s in range(1, 21)
                ),
            )
            for rank in found.ranks
        )
        found = dataclasses.replace(found, ranks=tuple(ranks))
        return scaled(found, 0.5) if variant.compiled else found

    profile = dataclasses.replace(PROFILE, draws_random_numbers=draws)
    result = Simulation(scenario(), sabotage, profile=profile).tune()
    tried = [one for one in result.tried if one.remedy.name == "compiled"]
    assert {one.outcome for one in tried} & {"kept", "changes training"} == {expected}
    assert ("other random numbers" in result.losses) == (expected == "kept")


@pytest.mark.parametrize("can_be_edited", [True, False])
def test_what_only_an_edit_keeps_is_tried_if_the_script_can_be_edited(
    *, can_be_edited: bool
) -> None:
    profile = dataclasses.replace(PROFILE, accumulation=4, gradient_exchanges=4.0)
    simulation = Simulation(scenario(repeated_ms=5.0), profile=profile)

    def edit(kept: tuple[Remedy, ...], *_: Any) -> EditedCopy:
        if can_be_edited:
            return EditedCopy(sources=(("train.py", "edited/train.py"),))
        return EditedCopy(at_run_time=kept, notes=(f"{kept[0].label}: train.py:9: a reason",))

    simulation.edited = edit
    result = simulation.tune()
    (tried,) = [one for one in result.tried if one.remedy.name == "exchange_each_micro_batch"]
    if can_be_edited:
        assert tried.outcome == "kept"
        assert result.is_in_source_only
    else:
        assert (tried.outcome, tried.reason) == ("refused", "train.py:9: a reason")


def test_a_remedy_that_crashes_on_one_rank_is_not_kept() -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        if variant.find_unused_parameters:
            return found
        return failed(Trial(plan=found.plan, variant=variant), "rank 1: RuntimeError: unused")

    result = Simulation(scenario(anomaly_ms=5.0, unused_ms=2.0), sabotage).tune()
    (tried,) = [one for one in result.tried if one.remedy.name == "find_unused_parameters"]
    assert tried.outcome == "failed"
    assert "rank 1: RuntimeError: unused" in tried.reason
    assert result.is_verified


@pytest.mark.parametrize("intended", [True, False])
def test_a_caveat_of_the_original_is_no_failure_of_a_remedy(*, intended: bool) -> None:
    copies = Caveat(kind=AUGMENTED_COPIES, text="each with its own augmentation")

    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        has_copies = intended or variant.find_unused_parameters is False
        return dataclasses.replace(found, warnings=(copies,)) if has_copies else found

    result = Simulation(scenario(anomaly_ms=5.0, unused_ms=2.0), sabotage).tune()
    found = outcomes(result)["find_unused_parameters"]
    assert found == ("kept" if intended else "failed")
    assert result.is_verified


def test_what_only_helped_by_drift_is_not_kept() -> None:
    """Every run is faster than the one before it."""
    runs = 0

    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        nonlocal runs
        runs += 1
        return scaled(found, 0.99**runs)

    result = Simulation(scenario(), sabotage).tune()
    assert not result.is_verified


def test_remedies_that_change_the_training_need_permission() -> None:
    costs = scenario(intervention_ms={"tf32": 5.0})
    assert "tf32" not in outcomes(Simulation(costs).tune())
    result = Simulation(costs).tune(allowed=["precision"])
    assert {one.name for one in result.kept} == {"tf32"}


SHORT_S = 50.0  # for an explanation and some 15 pairs of runs
SHORTER_S = 30.0  # too short to try each of those that helped together alone


def test_without_time_for_all_remedies_they_are_tried_together() -> None:
    result = Simulation(scenario(anomaly_ms=5.0, unused_ms=2.0)).tune(SHORTER_S)
    kept = {one.name for one in result.kept}
    assert {"anomaly_detection", "find_unused_parameters"} <= kept
    assert "dropped" in outcomes(result).values()
    gain = result.verification.gain
    assert gain is not None
    assert result.is_verified
    assert gain.value == pytest.approx(17 / 10, rel=0.03)
    (group,) = (group for group in kept_groups(result) if len(group) > 1)
    lines = [text for text, _ in result_lines(result, {}, 100)]
    assert len(lines) <= 25
    first = next(place for place, text in enumerate(lines) if text.startswith("  together  "))
    members = lines[first + 1 : first + 1 + len(group)]
    assert [text.split("  ")[2] for text in members] == [one.remedy.label for one in group]
    assert not any("×" in text for text in members)


def test_what_was_tried_only_together_has_the_gain_of_the_group() -> None:
    result = Simulation(scenario()).tune(SHORTER_S)
    together = [one for one in result.tried if one.reason.startswith("together with ")]
    assert together
    for one in together:
        assert one.outcome == "no gain"
        assert one.gain is not None
        assert one.reason.endswith("; no time was left to try it alone")
    untried = {one.remedy.label for one in result.tried if one.lacked_time}
    assert {one.remedy.label for one in together} < untried
    first, *_ = result_lines(result, {}, 100)
    assert f"nothing kept, {len(untried)} not tried in time; next: --budget " in first[0]


def test_the_remedy_of_the_largest_cost_is_tried_before_others_together() -> None:
    """What gains little shows only after it."""
    loader = dataclasses.replace(PROFILE.training_loader, num_workers=2)
    profile = dataclasses.replace(PROFILE, loader=loader)
    costs = scenario(load_ms_per_sample=1.0, anomaly_ms=1.0)
    result = Simulation(costs, profile=profile).tune(SHORT_S + 10.0)
    assert result.tried[0].remedy.label == "num_workers=4"
    assert [one.label for one in result.kept] == ["num_workers=16", "no anomaly detection"]
    assert "dropped" in outcomes(result).values()
    gain = result.verification.gain
    assert gain is not None
    assert gain.value == pytest.approx(5, rel=0.05)


def test_the_gain_of_a_value_that_replaced_another_is_over_the_settings_without_either() -> None:
    loader = dataclasses.replace(PROFILE.training_loader, num_workers=2)
    profile = dataclasses.replace(PROFILE, loader=loader)
    result = Simulation(scenario(load_ms_per_sample=1.0), profile=profile).tune(SHORT_S + 30.0)
    (kept,) = (one for one in result.tried if one.outcome == "kept")
    assert "replaced" in {one.outcome for one in result.tried}
    assert kept.remedy.name == "workers"
    assert kept.gain is not None
    assert kept.gain.value == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize(("batches", "warm_up"), [(None, 40), (60, 61), (5000, 40)])
def test_the_end_of_the_first_epoch_is_not_timed(batches: int | None, warm_up: int) -> None:
    """Code is compiled again for the last batch of an epoch."""
    loader = dataclasses.replace(PROFILE.training_loader, batches_per_epoch=batches)
    profile = dataclasses.replace(PROFILE, loader=loader)
    asked: list[Plan] = []

    def seen(found: Measurement, variant: Variant) -> Measurement:
        asked.append(found.plan)
        return found

    Simulation(scenario(), seen, profile=profile).tune(SHORT_S)
    assert {plan.warmup_steps for plan in asked[-4:]} == {warm_up}


def test_one_that_crashes_is_found_among_those_tried_together() -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        if variant.gradient_as_bucket_view:
            return failed(Trial(plan=found.plan, variant=variant), "rank 1: a view")
        return found

    result = Simulation(scenario(anomaly_ms=5.0), sabotage).tune(SHORT_S)
    kept = {one.name for one in result.kept}
    assert "anomaly_detection" in kept
    assert "gradient_as_bucket_view" not in kept
    assert result.is_verified


def test_a_long_error_message_is_one_line_on_the_screen() -> None:
    remedy = Remedy(name="ddp_static_graph", value=True)
    long = Tried(remedy=remedy, outcome="failed", reason="crashed: " + "a sentence of it. " * 30)
    text = describe_tried(long)
    assert text.startswith("static_graph=True: failed (crashed: a sentence of it. ")
    assert text.endswith(" …; --json has all)")
    assert len(text) < 220
    short = dataclasses.replace(long, reason="crashed: no memory")
    assert describe_tried(short) == "static_graph=True: failed (crashed: no memory)"


def test_one_that_its_error_names_is_left_out_of_those_tried_together() -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        if variant.fused_optimizer:
            reason = "fused_optimizer: the script passes fused=True to AdamW"
            return failed(Trial(plan=found.plan, variant=variant), reason)
        return found

    result = Simulation(scenario(anomaly_ms=5.0), sabotage).tune(SHORT_S)
    assert outcomes(result)["fused_optimizer"] == "refused"
    assert {"anomaly_detection"} <= {one.name for one in result.kept}
    assert result.is_verified


@pytest.mark.slow
@pytest.mark.parametrize("budget_s", [150.0, SHORT_S])
@pytest.mark.parametrize(("noise", "most"), [(0.004, 0), (0.03, 6)])
def test_healthy_runs_keep_nothing(budget_s: float, noise: float, most: int) -> None:
    """With much noise, what seems to gain does not in the runs that verify it."""
    found = [
        Simulation(scenario(noise_seed=seed, process_noise=noise)).tune(budget_s)
        for seed in range(40)
    ]
    assert not any(one.is_verified for one in found)
    assert sum(bool(one.kept) for one in found) <= most


def test_without_time_nothing_is_tried() -> None:
    result = Simulation(scenario(anomaly_ms=5.0)).tune(6.0)
    assert set(outcomes(result).values()) <= {"not tried", "refused"}
    assert result.verification.gain is None
    sufficient = Simulation(scenario(anomaly_ms=5.0)).tune(result.sufficient_s)
    assert "not tried" not in outcomes(sufficient).values()
    assert sufficient.is_verified


def test_an_original_that_fails_is_an_error() -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        if variant.random_seed is None:
            return found
        return failed(Trial(plan=found.plan, variant=variant), "no seed, please")

    with pytest.raises(RunFailure, match="no seed, please"):
        Simulation(scenario(), sabotage).tune()


@pytest.mark.parametrize(("factor", "is_kept"), [(1.0, True), (3.0, False)])
def test_losses_that_do_not_repeat_are_compared_by_their_means(
    factor: float, is_kept: bool
) -> None:
    """``factor``: by which a remedy changes the losses of a script whose runs differ by chance."""
    chance = random.Random(4)

    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        size = 1.0 if variant.anomaly_detection else factor
        losses = tuple((step, size * chance.uniform(1.0, 1.5)) for step in range(1, 21))
        ranks = (dataclasses.replace(rank, losses=losses) for rank in found.ranks)
        return dataclasses.replace(found, ranks=tuple(ranks))

    result = Simulation(scenario(anomaly_ms=5.0), sabotage).tune()
    assert "only their means were compared" in result.losses
    assert ("anomaly_detection" in {one.name for one in result.kept}) == is_kept
    assert outcomes(result)["anomaly_detection"] == ("kept" if is_kept else "changes training")


ONE_PROCESS = dataclasses.replace(PROFILE, world_size=1, process_group=False, parallel="none")
CONVERTED = ConvertedScript(
    ordered_original=(("train.py", "original.py"),), ordered_copy=(("train.py", "copy.py"),)
)


def test_a_script_of_one_process_is_converted_first() -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        return scaled(found, 0.5) if found.plan.strategy == "ddp" else found

    simulation = Simulation(scenario(), sabotage, profile=ONE_PROCESS, converted=CONVERTED)
    result = simulation.tune()
    assert [one.name for one in result.kept] == ["conversion"]
    assert result.is_conversion
    assert result.is_verified
    assert result.final.plan.strategy == "ddp"
    gain = result.verification.gain
    assert gain is not None
    assert gain.value == pytest.approx(2, rel=0.03)
    tried, *later = result.tried
    assert {one.outcome for one in later} <= {"no gain", "refused", "not tried"}
    assert not {one.remedy.name for one in later} & {*EXCLUDED_WITH_RUN}
    assert (
        tried.remedy.reason
        == "the batch of a step is unchanged, 50 of its 100 samples on each device"
    )
    assert result.losses == "first 20 losses differ by 0 of the largest on 1 device and by 0 on 2"


def test_remedies_are_tried_on_a_converted_script() -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        if found.plan.strategy != "ddp":
            return found
        if found.plan.steps != COMPARED_STEPS:  # shuffled, its samples have another order
            losses = tuple((step, 1.5 / step) for step in range(1, 21))
            ranks = (dataclasses.replace(rank, losses=losses) for rank in found.ranks)
            found = dataclasses.replace(found, ranks=tuple(ranks))
        return scaled(found, 0.5)

    costs = scenario(anomaly_ms=5.0)
    result = Simulation(costs, sabotage, profile=ONE_PROCESS, converted=CONVERTED).tune()
    assert [one.name for one in result.kept] == ["conversion", "anomaly_detection"]
    assert result.is_verified
    assert result.final.plan.strategy == "ddp"
    assert result.final.variant.anomaly_detection is False
    gain = result.verification.gain
    assert gain is not None
    assert gain.value > 2.5


@pytest.mark.parametrize("stacks_tensors", [False, True])
def test_a_converted_script_that_stacks_tensors_needs_no_workers(*, stacks_tensors: bool) -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        return scaled(found, 0.5) if found.plan.strategy == "ddp" else found

    loader = dataclasses.replace(PROFILE.training_loader, stacks_tensors=stacks_tensors)
    profile = dataclasses.replace(ONE_PROCESS, loader=loader)
    result = Simulation(scenario(), sabotage, profile=profile, converted=CONVERTED).tune()
    tried = {one.remedy.name for one in result.tried}
    assert "conversion" in tried
    assert ("workers" in tried) != stacks_tensors


def test_what_keeps_a_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("a = 1\n")
    edit = AddStatement(location="train.py:1", statement="run = nfold.Run()", place="before")
    copy = EditedCopy(
        patch=make_patch([edit], tmp_path),
        sources=(("train.py", "copy.py"),),
        notes=("train.py:3: every device writes",),
    )

    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        return scaled(found, 0.5) if found.plan.strategy == "ddp" else found

    converted = dataclasses.replace(CONVERTED, copy=copy)
    result = Simulation(scenario(), sabotage, profile=ONE_PROCESS, converted=converted).tune()
    (tmp_path / "nfold.toml").write_text("")  # of an earlier result
    workload = Workload(name="train.py", script=("train.py", "--epochs", "3"))
    files = keep_result(result, workload, HOST, tmp_path, apply=True)
    assert files == {
        "patch": "nfold.patch",
        "applied to": "train.py; --revert takes it back",
        "run": "nfold run --devices 2 train.py --epochs 3",
        "next": "nfold tune --devices 2 train.py -- --epochs 3 tries the plan of nfold.Run on the "
        "changed script",
        "by hand": "train.py:3: every device writes",
    }
    assert not (tmp_path / "nfold.toml").exists()
    assert script.read_text() == "run = nfold.Run()\na = 1\n"
    lines = [text for text, _ in result_lines(result, files, 120)]
    gain = result.verification.gain
    assert gain is not None
    assert gain.value == pytest.approx(2, rel=0.03)
    assert lines[0].startswith(f"digits on 2 devices: {gain.value:.2f} × ")
    assert any(line.startswith("  nfold.Run on 2 devices ") for line in lines)
    assert "run: nfold run --devices 2 train.py --epochs 3" in lines


def test_tuning_goes_on_without_a_conversion_that_is_not_possible() -> None:
    result = Simulation(scenario(anomaly_ms=5.0), profile=ONE_PROCESS).tune()
    first = result.tried[0]
    assert (first.outcome, first.reason) == ("refused", "train.py:7: a reason")
    assert "anomaly_detection" in {one.name for one in result.kept}
    assert not result.is_conversion


def test_a_conversion_that_changes_losses_is_not_kept() -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        if found.plan.strategy != "ddp":
            return found
        wrong = tuple((step, 2.0 / step) for step in range(1, 21))
        ranks = (dataclasses.replace(rank, losses=wrong) for rank in found.ranks)
        return dataclasses.replace(found, ranks=tuple(ranks))

    simulation = Simulation(scenario(), sabotage, profile=ONE_PROCESS, converted=CONVERTED)
    result = simulation.tune()
    assert result.tried[0].outcome == "changes training"
    assert result.tried[0].reason.startswith("on 2 devices its mean loss differs by +100 %")
    assert not result.is_conversion


def test_a_conversion_that_crashes_is_not_kept() -> None:
    def sabotage(found: Measurement, variant: Variant) -> Measurement:
        if found.plan.strategy != "ddp" or variant.random_seed is None:
            return found
        return failed(Trial(plan=found.plan, variant=variant), "rank 1: no loader")

    simulation = Simulation(scenario(), sabotage, profile=ONE_PROCESS, converted=CONVERTED)
    result = simulation.tune()
    assert result.tried[0].outcome == "failed"
    assert "nfold.Run on all devices: crashed: rank 1: no loader" in result.tried[0].reason
    assert not result.is_conversion
