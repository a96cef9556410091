"""A script as a target: the first look, the plan that follows from it, the lines to change."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest

from explaining import HOST, SECONDS, Memory, failed, script_runner, target
from nfold.core.errors import RunFailure, UsageError
from nfold.core.measurement import Caveat, EpochGap, FailureCause, FetchStats, Measurement
from nfold.core.plan import Plan
from nfold.core.script_profile import (
    NO_OPTIMIZER,
    BatchFunction,
    DataLoaderProfile,
    Recompilation,
    ScriptProfile,
    SourceLocation,
    TraceSummary,
)
from nfold.core.variant import Variant
from nfold.engines.simulated import Scenario
from nfold.explain import causes
from nfold.explain.advice import headline, pytorch
from nfold.explain.attribution import build_budget
from nfold.explain.causes.epoch_boundary import short_epoch_trials
from nfold.explain.causes.input_pipeline import INPUT, InputCosts
from nfold.explain.design import (
    ExperimentDesign,
    Scaling,
    Trial,
    over_short_epochs,
    with_expandable_segments,
)
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.result.budget import NOT_ENOUGH_TIME, BreakEvenBatch, Budget
from nfold.explain.result.view import build_view
from nfold.explain.script_probe import probe_script
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import TrialResults
from nfold.launch.training_checks import SAME_ORDER

PLACE = Plan(framework="simulated", device="cuda", devices=2, cores_per_device=8, steps=1)
LOADER = DataLoaderProfile(
    batch_size=100,
    batches_per_epoch=20,
    dataset_size=2000,
    sampler="RandomSampler",
    created_at="train.py:7",
)
PLAIN = ScriptProfile(steps=30, loader=LOADER, samples_per_step=100.0, device="cuda:0")
DDP = dataclasses.replace(
    PLAIN, world_size=2, process_group=True, parallel="ddp", backend="nccl", broadcast_buffers=True
)
COSTS: dict[str, Any] = {"compute_ms_per_sample": 0.1, "samples_per_epoch": 2000}


def experiment(script: Scenario, refused: str = "", between: EpochGap | None = None) -> Experiment:
    """One on the simulated framework; under a strategy that is ``refused`` the script fails.

    All windows of runs of several ranks but those in short passes have this ``between`` them.
    """
    usual = script_runner(script)

    def run(
        workload: Any, asked: Plan, ablation: Variant | None = None, **more: Any
    ) -> Measurement:
        if asked.strategy == refused:
            return failed(Trial(plan=asked), f"ValueError: no {refused} (train.py:3)")
        done: Measurement = usual(workload, asked, ablation, **more)
        short = ablation is not None and ablation.batches_per_epoch
        seen = between is not None and len(done.ranks) > 1 and not short
        return ended(done, between) if seen else done

    return Experiment(target(script, Memory(), run), TimeBudget(SECONDS), ExperimentEvents())


def ended(done: Measurement, between: EpochGap | None) -> Measurement:
    """The same with what lies before each of its windows."""
    ranks = [
        dataclasses.replace(
            rank, windows=tuple(dataclasses.replace(w, epoch_gap=between) for w in rank.windows)
        )
        for rank in done.ranks
    ]
    return dataclasses.replace(done, ranks=tuple(ranks))


def looked(
    seen: ScriptProfile, scaling: Scaling | None = None, refused: str = ""
) -> ExperimentDesign:
    one = experiment(Scenario(**COSTS), refused)
    return probe_script(one, PLACE, scaling, HOST, lambda found: (seen,) * (found.status == "ok"))


def placed(seen: ScriptProfile, what: str, where: str) -> ScriptProfile:
    return dataclasses.replace(seen, source_locations={what: (SourceLocation(line=where),)})


def explained(seen: ScriptProfile, **costs: Any) -> Budget:
    one = experiment(Scenario(**{**COSTS, **costs}))
    asked = probe_script(one, PLACE, None, HOST, lambda _: (seen,))
    return build_budget("train.py", one.run(asked), one.results)


def test_passes_of_all_ranks_are_kept_if_all_were_counted() -> None:
    def passes(*counted: tuple[int, ...]) -> tuple[int, ...]:
        ranks = tuple(dataclasses.replace(DDP, pass_batches=batches) for batches in counted)
        one = experiment(Scenario(**COSTS))
        return probe_script(one, PLACE, None, HOST, lambda _: ranks).facts.pass_batches

    assert passes((120,), (102,)) == (120, 102)
    assert passes((), (102,)) == ()


def test_a_process_group_means_ranks_and_a_batch_for_each() -> None:
    asked = looked(DDP)
    assert (asked.scaling, asked.plan.strategy, asked.plan.batch) == ("weak", "ddp", 200)
    assert (asked.batch_per_device, asked.baseline.plan.batch) == (100, 100)


def test_strong_scaling_divides_the_batch_that_the_script_has() -> None:
    asked = looked(DDP, "strong")
    assert (asked.plan.batch, asked.batch_per_device, asked.baseline.plan.batch) == (100, 50, 100)


def test_without_a_process_group_one_process_is_compared_at_its_batch() -> None:
    asked = looked(PLAIN)
    assert (asked.scaling, asked.plan.strategy, asked.plan.batch) == ("strong", "dp", 100)
    assert asked.single_device_script
    assert looked(dataclasses.replace(PLAIN, parallel="dp"), "weak").plan.batch == 200


@pytest.mark.parametrize("fed", [None, dataclasses.replace(LOADER, batch_size=None)])
@pytest.mark.parametrize("parallel", ["none", "dp"])
def test_where_nothing_gives_smaller_batches_each_device_has_one_of_its_own(
    fed: DataLoaderProfile | None, parallel: Any
) -> None:
    """Under strong scaling a share of the batch would be told that no run has had."""
    seen = dataclasses.replace(PLAIN, loader=fed, parallel=parallel, samples_per_step=100.0)
    asked = looked(seen)
    assert (asked.scaling, asked.plan.batch, asked.baseline.plan.batch) == ("weak", 200, 100)
    with pytest.raises(UsageError, match="next: --scaling weak"):
        looked(seen, "strong")
    found = explained(seen, latency_ms=30.0)
    assert found.headline.endswith(
        "No DataLoader whose batch size can be changed: a step below is 2 of the script's own."
    )
    assert looked(dataclasses.replace(seen, loader=LOADER)).scaling == "strong"


def test_no_other_batch_is_told_where_nothing_gives_one() -> None:
    costs, unknown = (
        {"latency_ms": 30.0},
        BreakEvenBatch(devices_help=False, batch=None, evidence=()),
    )
    assert explained(DDP, **costs).break_even_batch not in (None, unknown)
    without = dataclasses.replace(DDP, loader=None, samples_per_step=100.0)
    assert explained(without, **costs).break_even_batch == unknown


def test_a_script_without_an_optimizer_is_told_so() -> None:
    assert explained(DDP).headline == ""
    found = explained(dataclasses.replace(DDP, optimizers=(NO_OPTIMIZER,)))
    assert found.headline == "No torch optimizer steps in it: nfold.mark_step() ends its steps."


@pytest.mark.parametrize(
    ("parallel", "said"), [("tensor", "tensor parallel"), ("pipeline", "a pipeline")]
)
def test_a_model_that_is_divided_is_no_work_that_is(parallel: Any, said: str) -> None:
    """Its ranks get the same samples on purpose, and have other parameters than each other."""
    seen = dataclasses.replace(DDP, parallel=parallel)
    with pytest.raises(RunFailure, match=rf"divides its model over 2 devices \({said}\)"):
        looked(seen)


def test_generator_over_an_undivided_loader_needs_a_mark() -> None:
    whole = dataclasses.replace(LOADER, shards_dataset=False, in_generator=True)
    line = SourceLocation(line="train.py:18")
    seen = dataclasses.replace(DDP, loader=whole, source_locations={"generator": (line,)})
    with pytest.raises(RunFailure, match=r"^train\.py:18: a generator .* nfold\.batches\(\)"):
        looked(seen)
    divided = dataclasses.replace(whole, shards_dataset=True)
    assert looked(dataclasses.replace(seen, loader=divided)).profile is not None


@pytest.mark.parametrize(
    ("alike", "through", "slices"), [(True, 50.0, True), (True, 100.0, False), (False, 50.0, False)]
)
def test_ranks_that_take_their_parts_of_the_same_batches_divide_the_work(
    through: float, *, alike: bool, slices: bool
) -> None:
    """That they were fed the same is no wrong training then."""
    fed = dataclasses.replace(LOADER, shards_dataset=False)
    seen = dataclasses.replace(DDP, parallel="other", loader=fed, model_samples_per_step=through)
    one = experiment(Scenario(**COSTS, same_samples=alike))
    asked = probe_script(one, PLACE, None, HOST, lambda _: (seen,))
    assert asked.plan.batch == (100 if slices else 200)
    assert asked.profile is not None
    assert asked.profile.replay_hints.slices_batches == slices
    assert (pytorch.duplicated_epochs(asked.profile) is None) == slices
    assert ("Every rank builds the whole" in headline.write_headline(asked.profile, 2)) == slices


def test_steps_whose_samples_nobody_saw_are_counted_and_told_so() -> None:
    """Of one process, each copy makes one of its own."""
    seen = dataclasses.replace(PLAIN, loader=None, samples_per_step=0.0)
    asked = looked(seen)
    assert (asked.plan.batch, asked.baseline.plan.batch) == (2, 1)
    by_hand = dataclasses.replace(seen, optimizers=(NO_OPTIMIZER,))
    assert pytorch.use_process_per_device(by_hand, 2).startswith(
        "dist.all_reduce() of all gradients"
    )
    assert "DistributedDataParallel" in pytorch.use_process_per_device(seen, 2)
    unseen = "Samples per step are unknown: each step counts as one sample per device."
    assert unseen in headline.write_headline(seen, 2)
    assert unseen not in headline.write_headline(PLAIN, 2)


def test_the_warm_up_lets_pass_what_workers_made_ahead() -> None:
    busy = dataclasses.replace(LOADER, num_workers=3, prefetch_factor=5, batches_per_epoch=100)
    seen = dataclasses.replace(DDP, loader=busy, accumulation=2)
    asked = looked(seen)
    assert asked.plan.warmup_steps == 10 + 4 * 3 * 5 // 2
    assert asked.plan.batch == 400


def test_an_epoch_has_no_more_than_itself_made_ahead() -> None:
    short = dataclasses.replace(LOADER, num_workers=3, prefetch_factor=5, batches_per_epoch=7)
    assert looked(dataclasses.replace(DDP, loader=short)).plan.warmup_steps == 10 + 2 * 7


@pytest.mark.parametrize(
    ("fetches", "step_ms"),
    [
        (None, None),
        (FetchStats(batches=0, seconds=0.0, waited_s=0.0), None),
        (FetchStats(batches=10, seconds=1.0, waited_s=0.0), pytest.approx(10.0, rel=0.2)),
        (FetchStats(batches=10, seconds=8.0, waited_s=0.0), 2 * 8e3 / 10 / 20),
    ],
)
def test_steps_that_queues_fed_take_as_long_as_their_batches(
    fetches: FetchStats | None, step_ms: float | None
) -> None:
    deep = dataclasses.replace(LOADER, num_workers=20, batches_per_epoch=1000)
    seen = dataclasses.replace(DDP, loader=deep, accumulation=2, fetches=fetches)
    assert looked(seen).step_ms == step_ms


def test_of_a_sharded_model_all_that_is_exchanged_is_one_row() -> None:
    seen = dataclasses.replace(DDP, parallel="fsdp", broadcast_buffers=False)
    costs = {"exchange_ms": 3.0, "latency_ms": 1.0, "straggler_ms": 2.0, "straggler_rank": 1}
    found = explained(seen, **costs)
    rows = {row.cause: row for row in found.rows}
    assert rows["link"].lost_ms.value == pytest.approx(4.0)
    assert [name.partition(" and")[0] for name, _ in rows["link"].components] == [
        "parameters gathered"
    ]
    assert "DistributedDataParallel" in rows["link"].fix
    assert rows["imbalance"].lost_ms.value == pytest.approx(2.0)
    assert found.not_attributed_ms.value == pytest.approx(0.0, abs=1e-9)
    assert dict(found.unmeasured)["synchronization"].endswith("is in link")
    read = explained(dataclasses.replace(seen, host_syncs=1.0), host_syncs_ms=1.0, **costs)
    assert {row.cause: row.lost_ms.value for row in read.rows}["link"] == pytest.approx(4.0)


@pytest.mark.parametrize("parallel", ["ddp", "none"])
@pytest.mark.parametrize("reads_ms", [0.0, 1.0])
def test_backwards_that_are_searched_for_nan_are_in_a_row(parallel: Any, reads_ms: float) -> None:
    own = DDP if parallel == "ddp" else PLAIN
    seen = dataclasses.replace(own, detects_anomalies=True, host_syncs=reads_ms)
    found = explained(seen, anomaly_ms=4.0, host_syncs_ms=reads_ms)
    (row,) = (row for row in found.one_device_rows if row.cause == "synchronization")
    assert row.significant
    assert row.lost_ms.value == pytest.approx(4.0 + reads_ms)
    assert row.fix.startswith("anomaly detection checks")


def test_a_script_that_fails_as_ranks_is_tried_as_one_process_and_told_so() -> None:
    asked = looked(PLAIN, refused="ddp")
    assert asked.single_device_script
    assert asked.multi_process_failure == "ValueError: no ddp (train.py:3)"
    assert "DistributedDataParallel" in headline.write_headline(PLAIN, 2)
    assert not headline.write_headline(PLAIN, 2, asked.multi_process_failure)
    assert not looked(PLAIN).multi_process_failure


def test_a_script_that_fails_both_ways_says_its_own_error() -> None:
    one = experiment(Scenario(failures=()), refused="ddp")
    one.runner = dataclasses.replace(target(Scenario()), run=lambda *a, **k: _broken(*a))
    with pytest.raises(RunFailure, match=r"ValueError: broken \(train.py:3\)"):
        probe_script(one, PLACE, None, HOST, lambda _: ())


@pytest.mark.parametrize(
    ("works", "tried", "works_then", "tried_then"),
    [
        ("", ["ddp", "dp"], "ddp", ["ddp"]),
        ("", ["ddp", "dp"], "dp", ["ddp", "dp"]),
        ("dp", ["ddp", "dp"], "dp", []),
        ("ddp", ["ddp"], "ddp", []),
    ],
)
def test_what_failed_before_is_tried_anew_unless_another_way_works(
    works: str, tried: list[str], works_then: str, tried_then: list[str]
) -> None:
    """What it lacked may be there now: its data, a package, a device that others had."""
    store, made = Memory(), list[str | None]()
    usual = script_runner(Scenario(**COSTS))

    def run(workload: Any, asked: Plan, ablation: Any = None, **more: Any) -> Measurement:
        made.append(asked.strategy)
        if asked.strategy != works:
            return failed(Trial(plan=asked, variant=ablation), "RuntimeError: device busy")
        done: Measurement = usual(workload, asked, ablation, **more)
        return done

    def look() -> ExperimentDesign:
        one = Experiment(
            target(Scenario(**COSTS), store, run), TimeBudget(SECONDS), ExperimentEvents()
        )
        return probe_script(one, PLACE, None, HOST, lambda m: (DDP,) * (m.status == "ok"))

    with nullcontext() if works else pytest.raises(RunFailure, match="device busy"):
        look()
    assert made == tried
    made.clear()
    works = works_then
    look()
    assert made == tried_then


def _broken(_workload: Any, asked: Plan, ablation: Any = None) -> Measurement:
    del ablation
    return failed(Trial(plan=asked), "ValueError: broken (train.py:3)")


@pytest.mark.parametrize(
    ("status", "step", "said"),
    [
        ("hung", 0, "no step of a torch optimizer; next: add nfold.mark_step"),
        ("interrupted", 0, "no step of a torch optimizer; next: add nfold.mark_step"),
        ("interrupted", 13, "it ended; next: --budget 200s"),
        ("interrupted", 4, "it ended; next: --budget 700s"),
        ("hung", 3, "it ended"),
    ],
)
def test_a_script_that_takes_no_step_is_told_so(status: Any, step: int, said: str) -> None:
    """Evolution strategies, an endless evaluation: it may be alive and well."""
    given: list[float] = []

    def run(_workload: Any, asked: Plan, ablation: Any = None, **more: Any) -> Measurement:
        given.append(more["options"].time_limit_s)
        ended = failed(Trial(plan=asked, variant=ablation), "")
        return dataclasses.replace(
            ended,
            status=status,
            cause=FailureCause(text="it ended", step=step),
            wall_seconds=50.0,
        )

    one = Experiment(target(Scenario(**COSTS), run=run), TimeBudget(SECONDS), ExperimentEvents())
    with pytest.raises(RunFailure, match=said):
        probe_script(one, PLACE, None, HOST, lambda _: ())
    assert given == [SECONDS] * (2 if status == "hung" else 1)


@pytest.mark.parametrize(("budget_s", "fits"), [(20.0, False), (100.0, True)])
def test_a_budget_that_a_slow_start_exceeds_is_refused_after_the_probe_run(
    budget_s: float, fits: bool
) -> None:
    """The probe run of 40 s leaves time for two more process trees, or does not."""
    usual, now = script_runner(Scenario(**COSTS)), [0.0]
    limits: list[float] = []

    def run(workload: Any, asked: Plan, ablation: Any = None, **more: Any) -> Measurement:
        now[0] += 40.0
        limits.append(more["options"].time_limit_s)
        done: Measurement = usual(workload, asked, ablation, **more)
        twice = Caveat(kind=SAME_ORDER, text="every epoch has the same order")
        return dataclasses.replace(done, wall_seconds=40.0, warnings=(twice,))

    budget = TimeBudget(budget_s, now=lambda: now[0])
    one = Experiment(target(Scenario(**COSTS), Memory(), run), budget, ExperimentEvents())
    design = probe_script(one, PLACE, None, HOST, lambda _: (DDP,))
    if fits:
        one.run(design)
        assert now[0] <= budget_s + max(60.0, budget_s)
        assert limits[:2] == [budget_s, (2 * budget_s - 40.0) / 2]
        return
    message = r"wrong training: .* same order.*takes 40 s to start.*next: --budget \d+s"
    with pytest.raises(RunFailure, match=message):
        one.run(design)
    assert limits == [60.0]


def test_a_hint_names_the_time_that_the_user_gives() -> None:
    assert TimeBudget(30.0).sufficient_option(60.0) == "--budget 70s"
    assert TimeBudget(30.0, share=0.3).sufficient_option(60.0) == "--budget 200s"


def test_the_same_order_of_epochs_shows_in_short_ones() -> None:
    usual = script_runner(Scenario(**COSTS))

    def run(
        workload: Any, asked: Plan, ablation: Variant | None = None, **more: Any
    ) -> Measurement:
        done: Measurement = usual(workload, asked, ablation, **more)
        short = ablation is not None and ablation.batches_per_epoch
        alike = (Caveat(kind=SAME_ORDER, text="every epoch has the same order"),)
        return dataclasses.replace(done, warnings=alike) if short else done

    script = target(Scenario(**COSTS), Memory(), run)
    one = Experiment(script, TimeBudget(SECONDS), ExperimentEvents())
    unset = dataclasses.replace(DDP, loader=dataclasses.replace(LOADER, epoch_unset=True))
    design = one.run(probe_script(one, PLACE, None, HOST, lambda _: (unset,)))
    found = build_budget("train.py", design, one.results)
    assert found.training_errors == ("train.py:7: every epoch has the same order",)


def test_ranks_that_stop_by_what_they_all_reduce_are_in_step() -> None:
    """Without the real all-reduce each of them stops by its own loss."""
    usual, alone = script_runner(Scenario(**COSTS)), list[Variant]()

    def run(
        workload: Any, asked: Plan, ablation: Variant | None = None, **more: Any
    ) -> Measurement:
        variants = more.get("interleaved_variants") or (ablation or Variant(),)
        if any(one.exchange in ("none", "barrier") or one.independent for one in variants):
            cause = FailureCause(text="ranks are out of step", out_of_step=True)
            return dataclasses.replace(failed(Trial(plan=asked), ""), status="hung", cause=cause)
        alone.extend(variants)
        done: Measurement = usual(workload, asked, ablation, **more)
        return done

    script = target(Scenario(**COSTS), Memory(), run)
    one = Experiment(script, TimeBudget(SECONDS), ExperimentEvents())
    stops = placed(DDP, "collective", "train.py:9")
    design = one.run(probe_script(one, PLACE, None, HOST, lambda _: (stops,)))
    assert not build_budget("train.py", design, one.results).training_errors
    assert Variant(input="replayed") in alone
    left_behind = {t.variant for t, why in one.results.reasons.items() if "out of step" in why}
    assert {one.exchange for one in left_behind} >= {"none", "barrier"}
    silent = Experiment(script, TimeBudget(SECONDS), ExperimentEvents())
    with pytest.raises(RunFailure, match="out of step"):
        silent.run(probe_script(silent, PLACE, None, HOST, lambda _: (DDP,)))


def test_no_loader_has_no_other_scaling_and_no_other_input() -> None:
    bare = dataclasses.replace(DDP, loader=None)
    assert looked(bare).cheapest_input == "real"
    with pytest.raises(UsageError, match="next: --scaling weak"):
        looked(bare, "strong")


@pytest.mark.parametrize("on_device", [False, True])
def test_a_function_that_makes_batches_is_replayed_as_a_loader_is(on_device: bool) -> None:
    maker = BatchFunction(names=("get_batch",), defined_at="train.py:5", on_device=on_device)
    seen = dataclasses.replace(DDP, loader=None, batch_function=maker, device="cuda:0")
    assert looked(seen).cheapest_input == ("replayed" if on_device else "resident")
    costs = {"load_ms_per_sample": 0.1, "copy_ms_per_sample": 0.02}
    found = explained(seen, **costs)
    (row,) = [row for row in found.significant if row.cause == "input"]
    assert row.total_ms.value == pytest.approx(10.0)
    assert row.fix.startswith("train.py:5: less work in get_batch(), or a DataLoader")
    assert "batches by get_batch()" in found.parallelism
    assert row.fix.endswith("while the device computes")
    several = explained(dataclasses.replace(seen, accumulation=2), **costs)
    (row,) = [row for row in several.significant if row.cause == "input"]
    assert row.fix.endswith(", unless they depend on what the model did")
    untested = dict(found.unmeasured)
    assert untested["storage"].startswith("waiting in get_batch() is not measured")
    if on_device:
        assert untested["copies"].startswith("get_batch() makes a batch and copies it")
    else:
        (copied,) = [row for row in found.one_device_rows if row.cause == "copies"]
        assert copied.fix.startswith("train.py:5: batches in pinned memory and ")


def test_a_fix_names_the_line() -> None:
    found = explained(DDP, exchange_ms=3.0)
    assert found.rows[0].cause == "link"
    found = explained(placed(DDP, "wrapper", "train.py:9"), exchange_ms=3.0)
    assert found.rows[0].fix.startswith("train.py:9: send less often")
    whole = dataclasses.replace(DDP, parameter_count=10, parameter_bytes=40)
    found = explained(placed(whole, "wrapper", "train.py:9"), transfer_ms=3.0, overlap=0.0)
    assert found.rows[0].fix.startswith("train.py:9: model.register_comm_hook")
    assert found.rows[0].predicted_speedup is not None
    assert found.rows[0].predicted_speedup.value > 1.1
    change = build_view(found).change
    assert change is not None
    assert (change.row, change.location) == ("communication", "train.py:9")


def test_workers_are_tried_and_named_by_the_line_of_the_loader() -> None:
    busy = dataclasses.replace(LOADER, num_workers=2)
    seen = dataclasses.replace(DDP, loader=busy)
    found = explained(seen, load_ms_per_sample=1.0)
    row = next(row for row in found.significant if row.cause == "input")
    assert row.fix == "train.py:7: DataLoader(..., num_workers=4)"


def test_as_many_workers_are_tried_first_as_keep_up_with_the_rest_of_the_step() -> None:
    """Two workers make a batch in 240 ms: 480 ms of one. The rest of a step takes 62 ms."""
    probe = dataclasses.replace(
        DDP,
        loader=dataclasses.replace(LOADER, num_workers=2),
        fetches=FetchStats(batches=10, seconds=4.8, waited_s=0.0),
        input_wait_ms=190.0,
    )
    plan = Plan(
        framework="torch", device="cuda", devices=2, cores_per_device=16, workers=2, batch=9
    )
    design = ExperimentDesign(plan=plan, profile=probe, step_ms=252.0)
    assert [trial.plan.workers for trial in INPUT.fixes(design).values()] == [8, 1]
    assert INPUT.fix(design, MetricView({})) == "train.py:7: DataLoader(..., num_workers=8)"
    few_cores = dataclasses.replace(design, plan=plan.edit(cores_per_device=3))
    assert [trial.plan.workers for trial in INPUT.fixes(few_cores).values()] == [4, 1]


def test_workers_that_were_tried_and_gain_nothing_are_not_asked_for() -> None:
    """Of one device all of whose cores load: more workers only take turns, fewer load less."""
    busy = dataclasses.replace(LOADER, num_workers=4)
    seen = dataclasses.replace(DDP, loader=busy)
    found = explained(seen, load_ms_per_sample=1.0, host_cores=8)
    row = next(row for row in found.significant if row.cause == "input")
    assert not row.fix_measured
    assert row.fix.startswith("train.py:7: less work per sample in the data set")
    assert row.fix.endswith("(num_workers=2 and 8: no gain beyond the noise)")


def test_a_plain_script_is_told_what_copies_would_give() -> None:
    found = explained(placed(PLAIN, "model", "train.py:5"))
    assert found.headline.startswith("To change: DistributedDataParallel")
    assert found.parallelism == "one process"
    assert found.to_json()["warnings"][0]["kind"] == "headline"


def test_ranks_that_each_go_through_everything_are_wrong() -> None:
    whole = dataclasses.replace(LOADER, shards_dataset=False)
    found = explained(dataclasses.replace(DDP, loader=whole))
    assert found.training_errors == (
        "train.py:7: every rank visits all 2,000 samples (RandomSampler divides nothing): "
        "an epoch on 2 devices is 2 epochs",
    )
    assert found.rows[0].cause == "undivided-work"
    assert found.speedup.value == pytest.approx(1.0)
    assert "DistributedSampler" in found.rows[0].fix


def test_epochs_of_ranks_that_divide_nothing_end_as_often_for_the_same_samples() -> None:
    whole = dataclasses.replace(LOADER, shards_dataset=False)
    found = explained(dataclasses.replace(DDP, loader=whole), epoch_gap_ms=100.0)
    rows = {row.cause: row.lost_ms.value for row in found.rows}
    assert rows["undivided-work"] == pytest.approx(10.0)
    # 10 ms of every step, of which one device has 5; then once more.
    assert rows["epoch-boundary"] == pytest.approx(10.0 - 5.0 + 10.0)
    assert found.not_attributed_ms.value == pytest.approx(0.0, abs=1e-6)


def test_copies_that_read_as_slowly_as_they_crowd_each_other_add_up() -> None:
    """What waits for others hides behind them: threads and input are no more than both lose."""
    found = explained(read(PLAIN, 8), contention_ms=10.0, read_ms_per_sample=1.0)
    rows = {row.cause: row.lost_ms.value for row in found.rows}
    assert rows["input"] == pytest.approx(0.0, abs=1e-6)
    assert found.not_attributed_ms.value == pytest.approx(0.0, abs=1e-6)


def test_gloo_on_gpus_is_the_networks() -> None:
    found = explained(dataclasses.replace(DDP, backend="gloo"), exchange_ms=3.0)
    assert found.rows[0].cause == "network"
    assert "nccl" in found.rows[0].fix
    assert "link" not in {row.cause for row in found.rows}


def test_more_threads_than_cores_are_told_on_one_device() -> None:
    found = explained(dataclasses.replace(DDP, threads=16))
    assert "threads" in {row.cause for row in found.one_device_rows}
    assert "threads" not in {row.cause for row in explained(DDP).one_device_rows}


def test_threads_that_crowd_the_input_are_told_from_the_input() -> None:
    """And a change that was measured to help is said, though two devices are slower now."""
    seen = dataclasses.replace(placed(DDP, "threads", "train.py:4"), threads=32)
    found = explained(seen, crowding_ms=60.0, load_ms_per_sample=0.02)
    by_cause = {row.cause: row for row in found.rows}
    assert by_cause["threads"].lost_ms.value == pytest.approx(60.0)
    assert by_cause["input"].lost_ms.value == pytest.approx(0.0, abs=1e-6)
    assert found.not_attributed_ms.value == pytest.approx(0.0, abs=1e-6)
    assert found.speedup.value < 1
    change = build_view(found).change
    assert change is not None
    assert (change.location, change.code) == ("train.py:4", "torch.set_num_threads(8)")
    assert not found.devices_cannot_help
    assert "cannot_help" not in [doubt["kind"] for doubt in found.to_json()["warnings"]]


def test_too_many_threads_are_told_before_there_is_time_for_the_other_trials() -> None:
    """The real run with fewer threads shares its process tree: it is known before most."""
    one = experiment(Scenario(**COSTS, crowding_ms=60.0, load_ms_per_sample=0.02))
    seen = dataclasses.replace(placed(DDP, "threads", "train.py:4"), threads=32)
    asked = one.run(probe_script(one, PLACE, None, HOST, lambda _: (seen,)))
    given = [asked.actual(), *(asked.actual(i, threads=8) for i in ("real", "replayed"))]
    runs = {
        trial: one.results.runs[trial]
        for trial in (*given, asked.actual("replayed"), asked.baseline)
    }
    found = build_budget("train.py", asked, TrialResults(runs))
    (first,) = (row for row in found.rows if row.significant)
    assert (first.cause, first.fix) == ("threads", "train.py:4: torch.set_num_threads(8)")
    assert first.lost_ms.value == pytest.approx(60.0)
    assert "threads" in dict(found.unmeasured)
    del runs[asked.actual("replayed", threads=8)]
    assert not any(
        row.significant for row in build_budget("train.py", asked, TrialResults(runs)).rows
    )


def test_an_exchange_with_every_batch_of_a_step_is_a_part_of_synchronisation() -> None:
    seen = dataclasses.replace(
        placed(DDP, "step", "train.py:9"), accumulation=4, gradient_exchanges=4.0
    )
    found = explained(seen, repeated_ms=6.0, exchange_ms=2.0)
    first, *_ = found.rows
    assert first.cause == "synchronization"
    assert first.lost_ms.value == pytest.approx(6.0)
    assert first.fix == "train.py:9: all forwards and backwards but the last in model.no_sync()"
    assert first.fix_measured
    link = next(row for row in found.rows if row.cause == "link")
    assert link.lost_ms.value == pytest.approx(2.0)
    once = explained(dataclasses.replace(seen, gradient_exchanges=1.0), exchange_ms=2.0)
    assert "synchronization" not in {row.cause for row in once.rows if row.significant}


def test_what_ranks_exchange_beside_gradients_goes_one_by_one() -> None:
    """The input and the link are what is left without all of it: nothing is in no row."""
    seen = dataclasses.replace(DDP, accumulation=4, gradient_exchanges=4.0, buffers=3)
    script = {"repeated_ms": 6.0, "buffers_ms": 3.0, "latency_ms": 0.5, "exchange_ms": 2.0}
    found = explained(seen, **script, load_ms_per_sample=0.1)
    rows = {row.cause: row for row in found.rows}
    parts = {name: part.value for name, part in rows["synchronization"].components}
    assert parts[causes.collectives.BUFFERS] == pytest.approx(3.0)
    assert parts[causes.collectives.REPEATED_ALL_REDUCE] == pytest.approx(6.0)
    assert rows["synchronization"].lost_ms.value == pytest.approx(9.5)
    assert rows["link"].lost_ms.value == pytest.approx(2.0)
    assert rows["input"].lost_ms.value == pytest.approx(0.0, abs=1e-6)
    assert found.not_attributed_ms.value == pytest.approx(0.0, abs=1e-6)


LOOKING = dataclasses.replace(placed(DDP, "wrapper", "train.py:8"), find_unused_parameters=True)


def test_looking_for_parameters_in_vain_is_a_measured_fix() -> None:
    found = explained(LOOKING, unused_ms=3.0, wrapper_ms=0.5)
    first, *_ = found.rows
    assert first.cause == "synchronization"
    assert first.lost_ms.value == pytest.approx(3.5)
    assert first.fix == "train.py:8: DistributedDataParallel(..., find_unused_parameters=False)"
    assert first.fix_measured
    assert first.predicted_speedup is not None
    assert first.predicted_speedup.value == pytest.approx(2 * 10 / 10.5)


@pytest.mark.parametrize("changes", [{"unused_parameter_bytes": 144}, {}])
def test_it_is_not_advised_where_some_have_none_or_it_gains_nothing(changes: Any) -> None:
    found = explained(dataclasses.replace(LOOKING, **changes), wrapper_ms=3.0)
    first, *_ = found.rows
    assert first.cause == "synchronization"
    assert (
        first.fix == "train.py:7: a larger batch_size, or an optimizer step after several batches"
    )
    assert not first.fix_measured


def read(seen: ScriptProfile, workers: int) -> ScriptProfile:
    """With loader workers that can be watched."""
    fetches = FetchStats(batches=10, seconds=1.0, waited_s=0.5, read_bytes=10**8, disk_bytes=10**8)
    busy = dataclasses.replace(LOADER, num_workers=workers)
    return dataclasses.replace(seen, loader=busy, fetches=fetches)


@pytest.mark.parametrize(
    ("workers", "costs", "storage", "input_"),
    [
        # A batch computes for 10 ms. Without workers all that is added is lost.
        (0, {"load_ms_per_sample": 0.03, "read_ms_per_sample": 0.05}, 5.0, 3.0),
        (0, {"load_ms_per_sample": 0.03}, 0.0, 3.0),
        # Two workers take 15 ms: 5 are lost, and without waiting 5 are hidden.
        (2, {"load_ms_per_sample": 0.1, "read_ms_per_sample": 0.2}, 5.0, 0.0),
        (2, {"load_ms_per_sample": 0.2, "read_ms_per_sample": 0.1}, 0.0, 5.0),
        (2, {"load_ms_per_sample": 0.05, "read_ms_per_sample": 0.4}, 12.5, 0.0),
        (2, {"load_ms_per_sample": 0.26, "read_ms_per_sample": 0.1}, 0.0, 8.0),
        (2, {"load_ms_per_sample": 0.3, "read_ms_per_sample": 0.28}, 4.0, 15.0),
        # What is hidden costs nothing.
        (2, {"load_ms_per_sample": 0.05, "read_ms_per_sample": 0.14}, 0.0, 0.0),
    ],
)
def test_waiting_and_computing_share_what_the_input_costs(
    workers: int, costs: dict[str, float], storage: float, input_: float
) -> None:
    """On one device, and no more on two: the ranks do not crowd each other."""
    found = explained(read(DDP, workers), **costs)
    single = {row.cause: row for row in found.one_device_rows}
    assert single["storage"].lost_ms.value == pytest.approx(storage)
    assert single["input"].lost_ms.value == pytest.approx(input_)
    assert {row.cause for row in found.significant} == {
        cause for cause, cost in (("storage", storage), ("input", input_)) if cost
    }
    assert found.not_attributed_ms.value == pytest.approx(0.0, abs=1e-9)


def test_workers_that_wait_are_cured_by_many_more_of_them() -> None:
    found = explained(read(DDP, 2), read_ms_per_sample=0.6)
    (first,) = found.significant
    assert first.cause == "storage"
    assert first.fix == "train.py:7: DataLoader(..., num_workers=8)"
    assert first.predicted_speedup is not None
    assert first.predicted_speedup.value == pytest.approx(3.0)
    words = pytorch.speed_up_reads(read(DDP, 2))
    assert words.startswith("train.py:7: DataLoader(..., num_workers=8) (waiting workers")
    assert words.endswith("; a batch reads 10.00 MB, 100% of it from a local disk")
    assert "MB" not in pytorch.speed_up_reads(DDP)


@pytest.mark.parametrize(("workers", "storage"), [(0, 9.0), (2, 8.0)])
def test_what_sleeping_costs_beside_the_sleep_goes_with_it(workers: int, storage: float) -> None:
    """A batch sleeps for 8 ms and computes for 2; where nobody but a worker sleeps, 2.5 are not
    of making it.
    """
    found = ExperimentDesign(
        plan=PLACE.edit(batch=200, workers=workers), profile=read(DDP, workers)
    )
    real, replayed = found.one_device("real"), found.one_device("replayed")
    exposed_ms = 11.25
    made_ms = {(real, "loading"): 10.0, (real, "waiting"): 8.0}
    view = MetricView({(replayed, "step"): 10.0, (real, "step"): 10.0 + exposed_ms, **made_ms})
    computing, waiting = InputCosts(
        found, (), INPUT.one_device_contrasts(found)
    ).one_device_cpu_and_storage_ms(view)
    assert (computing, waiting) == pytest.approx((exposed_ms - storage, storage))


def test_waiting_under_noise_is_in_its_interval() -> None:
    noisy = {"noise": 0.01, "process_noise": 0.01}
    found = explained(read(DDP, 0), read_ms_per_sample=0.04, load_ms_per_sample=0.02, **noisy)
    single = {row.cause: row.lost_ms for row in found.one_device_rows}
    for cause, cost in (("storage", 4.0), ("input", 2.0)):
        low, high = single[cause].low, single[cause].high
        assert low is not None
        assert high is not None
        assert low - 1e-9 <= cost <= high + 1e-9


def test_of_one_process_that_reads_copies_tell() -> None:
    """Copies of it share the disk's time and not the cores: nothing more is lost by two."""
    found = explained(read(PLAIN, 0), read_ms_per_sample=0.05)
    assert {row.cause for row in found.one_device_rows if row.significant} == {"storage"}
    by_cause = {row.cause: row.lost_ms.value for row in found.rows}
    assert by_cause["storage"] == pytest.approx(0.0, abs=1e-9)
    assert by_cause["input"] == pytest.approx(0.0, abs=1e-9)


def test_a_data_set_that_nobody_could_watch_leaves_all_to_the_input() -> None:
    found = explained(DDP, read_ms_per_sample=0.05)
    assert {row.cause for row in found.significant} == {"input"}
    assert "spawned workers" in dict(found.unmeasured)["storage"]


def test_an_allocator_that_tries_again_is_told_by_one_that_need_not() -> None:
    seen = dataclasses.replace(DDP, alloc_retries=1.5)
    found = explained(seen, retries_ms=4.0)
    (first,) = found.significant
    assert first.cause == "memory"
    assert first.lost_ms.value == pytest.approx(4.0)
    assert first.fix == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the launch command"
    assert first.predicted_speedup is not None
    assert first.predicted_speedup.value == pytest.approx(14 / 10)
    assert pytorch.reduce_allocator_retries(seen).endswith(
        "a smaller batch_size (1.5 allocator retries a step)"
    )


def test_allocators_in_each_other_s_way_are_no_threads() -> None:
    """Copies that exchange nothing are slower than one device then, too."""
    seen = dataclasses.replace(DDP, alloc_retries=1.5)
    found = explained(seen, retries_ms=4.0, neighbor_retries_ms=3.0, contention_ms=0.5)
    costs = {row.cause: row.lost_ms.value for row in found.rows}
    assert costs["memory"] == pytest.approx(3.0)
    assert costs["threads"] == pytest.approx(0.5)
    assert found.not_attributed_ms.value == pytest.approx(0.0, abs=1e-9)
    (row,) = (one for one in found.one_device_rows if one.cause == "memory")
    assert row.lost_ms.value == pytest.approx(4.0)


def test_what_another_allocator_gains_is_told_before_it_is_known_what_one_device_loses() -> None:
    """Steps of 10 ms are 14 on one device and 44 on two: 34 is more than one can lose."""
    one = experiment(Scenario(**COSTS, retries_ms=4.0, neighbor_retries_ms=30.0))
    seen = dataclasses.replace(DDP, alloc_retries=1.5)
    asked = one.run(probe_script(one, PLACE, None, HOST, lambda _: (seen,)))
    known = (asked.actual(), asked.baseline, with_expandable_segments(asked, asked.actual()))
    runs = {trial: one.results.runs[trial] for trial in known}
    found = build_budget("train.py", asked, TrialResults(runs))
    (first,) = (row for row in found.rows if row.significant)
    assert (first.cause, first.fix_measured) == ("memory", True)
    assert first.lost_ms.value == pytest.approx(34 - 14)
    assert first.predicted_speedup is not None
    assert first.predicted_speedup.value == pytest.approx(2 * 14 / 10)
    assert dict(found.unmeasured)["memory"] == NOT_ENOUGH_TIME
    del runs[with_expandable_segments(asked, asked.actual())]
    assert not any(
        row.significant for row in build_budget("train.py", asked, TrialResults(runs)).rows
    )


@pytest.mark.parametrize(("seen", "share"), [(DDP, 1.0), (PLAIN, 0.5)])
def test_copies_into_another_order_are_told_by_a_trace(seen: ScriptProfile, share: float) -> None:
    traced = TraceSummary(steps=3, layout_copy_ms=(2.0, 2.1, 2.2))
    inside = explained(dataclasses.replace(seen, trace=traced))
    assert "layout" not in [row.cause for row in inside.significant], "no line can be changed"
    line = {f"order on {seen.device.partition(':')[0]}": (SourceLocation(line="train.py:31"),)}
    seen = dataclasses.replace(seen, source_locations=seen.source_locations | line)
    found = explained(dataclasses.replace(seen, trace=traced))
    (row,) = (row for row in found.one_device_rows if row.significant)
    assert row.cause == "layout"
    ends = (row.lost_ms.low, row.lost_ms.value, row.lost_ms.high)
    assert ends == pytest.approx((2.0 * share, 2.1 * share, 2.2 * share))
    assert row.fix.endswith("a permute in a step")
    convolved = dataclasses.replace(seen, trace=traced, convolutions=3)
    (row,) = (row for row in explained(convolved).one_device_rows if row.significant)
    assert row.fix.endswith("a permute in a step (images are channels_first)")
    busy = TraceSummary(steps=3, layout_copy_ms=(), launches_per_step=411.7, device_busy_ms=4.9)
    assert headline.describe_parallelism(dataclasses.replace(seen, trace=busy)).endswith(
        ", 412 launches a step, busy for 4.90 ms"
    )
    calm = explained(
        dataclasses.replace(seen, trace=TraceSummary(steps=3, layout_copy_ms=(0.0,) * 3))
    )
    assert not calm.significant
    assert "layout" not in dict(calm.unmeasured)
    assert "was profiled" in dict(explained(seen).unmeasured)["layout"]


def test_where_the_allocator_never_tried_again_the_used_memory_is_told() -> None:
    reason = dict(explained(DDP).unmeasured)["memory"]
    assert reason == "no allocator retry in 30 steps"
    used = dataclasses.replace(DDP, peak_memory_bytes=10**9)
    told = causes.device_memory.MEMORY.not_applicable_reason(
        dataclasses.replace(looked(used), memory_bytes=4 * 10**9)
    )
    assert told == f"{reason}; uses 1.0 of 4.0 GB of a device: the batch can grow"


def test_a_process_a_device_gains_what_is_left_of_it_by_an_exchange() -> None:
    """At batch 100 one device takes 10 ms, two 5 + 8 + 4; copies 5, with an exchange at the end 14.

    The simulated process has ranks inside, which hide 5 of the 9 ms of their exchange.
    """
    seen = dataclasses.replace(PLAIN, parallel="dp", dp_devices=2)
    found = explained(seen, wrapper_ms=8.0, transfer_ms=9.0, overlap=1.0)
    row = next(row for row in found.rows if row.cause == "single-process")
    assert row.lost_ms.value == pytest.approx(12.0)
    assert found.speedup.value == pytest.approx(10 / 17)
    predicted = row.predicted_speedup
    assert predicted is not None
    assert predicted.value == pytest.approx(10 / 14)
    assert predicted.low == pytest.approx(10 / 14, rel=0.01)
    assert predicted.high == pytest.approx(10 / 5, rel=0.01)
    assert found.not_attributed_ms.value == pytest.approx(0.0, abs=1e-9)


def test_an_exchange_that_costs_more_than_the_one_process_is_no_gain() -> None:
    seen = dataclasses.replace(PLAIN, parallel="dp", dp_devices=2)
    found = explained(seen, dp_exchange_ms=2.0, transfer_ms=9.0, overlap=1.0)
    row = next(row for row in found.rows if row.cause == "single-process")
    assert row.predicted_speedup is not None
    assert row.predicted_speedup.value < found.speedup.value


def test_the_wait_for_an_epochs_first_batch_goes_with_the_input() -> None:
    """Between epochs of 10 steps: 60 ms wait for the loader, 20 ms are the script's own."""
    seen = dataclasses.replace(DDP, loader=dataclasses.replace(LOADER, num_workers=2))
    costs = {"load_ms_per_sample": 0.3, "host_cores": 4}
    found = explained(seen, **costs, epoch_wait_ms=60.0, epoch_gap_ms=20.0)
    assert found.n_devices.step_ms.value == pytest.approx(15 + 8)
    rows = {row.cause: row for row in found.rows}
    # An epoch has 10 steps on two devices, and 20 on one, which loses half as much in each.
    assert [cost.value for _, cost in rows["epoch-boundary"].components] == pytest.approx([3, 1])
    rates = {cause: row.predicted_samples_per_s for cause, row in rows.items()}
    assert rates["input"] is not None
    assert rates["input"].value == pytest.approx(200 / 12e-3)
    assert rates["epoch-boundary"] is not None
    assert rates["epoch-boundary"].value == pytest.approx(200 / 15e-3)


def test_a_first_batch_is_waited_for_as_it_is_made() -> None:
    """Of 60 ms in every 10 steps its worker waits for a disk in two thirds."""
    costs = {"load_ms_per_sample": 0.1, "read_ms_per_sample": 0.2}
    found = explained(read(DDP, 2), **costs, epoch_wait_ms=60.0)
    assert found.n_devices.step_ms.value == pytest.approx(15 + 6)
    rates = {row.cause: row.predicted_samples_per_s for row in found.rows}
    assert rates["storage"] is not None
    assert rates["storage"].value == pytest.approx(200 / 12e-3)
    assert rates["input"] is not None
    assert rates["input"].value == pytest.approx(200 / 19e-3)


def test_of_long_epochs_some_are_cut_short() -> None:
    """Ten seconds between epochs of 10,000 steps on two devices, of 20,000 on one."""
    fed = dataclasses.replace(LOADER, batches_per_epoch=10_000, dataset_size=2_000_000)
    seen = dataclasses.replace(DDP, loader=fed)
    found = explained(seen, samples_per_epoch=2_000_000, epoch_gap_ms=10_000.0)
    assert found.n_devices.step_ms.value == pytest.approx(10 + 1)
    rows = {row.cause: row for row in found.rows}
    assert rows["epoch-boundary"].lost_ms.value == pytest.approx(0.5)
    assert rows["epoch-boundary"].significant
    endless = dataclasses.replace(DDP, loader=dataclasses.replace(fed, batches_per_epoch=None))
    unknown = dict(explained(endless, samples_per_epoch=2_000_000).unmeasured)
    assert unknown["epoch-boundary"].startswith("whole epochs take 900 s; next: --budget 9000s")
    counted = dataclasses.replace(DDP, loader=dataclasses.replace(fed, length_read_ahead=True))
    refused = dict(explained(counted, samples_per_epoch=2_000_000).unmeasured)
    assert "the trainer reads their length ahead" in refused["epoch-boundary"]


def test_nobody_waits_for_the_end_of_an_epoch_without_one() -> None:
    """A sampler draws 10 billion samples with replacement; the script has 30 ms between epochs."""
    fed = dataclasses.replace(LOADER, batches_per_epoch=156_250_000, dataset_size=10_000)
    made = looked(dataclasses.replace(DDP, loader=fed))
    one = experiment(Scenario(**COSTS | {"samples_per_epoch": 10**10, "epoch_gap_ms": 30.0}))
    whole = one.run(made)
    assert not any(trial == over_short_epochs(trial) for trial in one.results.runs)
    reasons = dict(build_budget("train.py", whole, one.results).unmeasured)
    assert reasons["epoch-boundary"] == "an epoch has 156,250,000 batches: no epoch ends"


def test_what_nobody_waited_for_is_known_to_cost_so_much_at_least() -> None:
    """A run of short passes is ended 20 s after its first: 2 ms of each of 10,000 steps."""
    fed = dataclasses.replace(LOADER, batches_per_epoch=10_000, dataset_size=2_000_000)
    seen = dataclasses.replace(DDP, loader=fed)
    made = looked(seen)
    one = experiment(Scenario(**COSTS))
    whole = one.run(made)
    (short, _) = short_epoch_trials(whole)
    one.results.runs.pop(short)
    cause = FailureCause(text="the 30 s that it was given were over", step=10, stalled_s=20.0)
    over = dataclasses.replace(failed(short, ""), status="interrupted", cause=cause)
    one.results.add(short, 0, over)
    found = build_budget("train.py", whole, one.results)
    assert dict(found.unmeasured)["epoch-boundary"].endswith("; next: a larger --budget")
    assert found.lower_bound is not None
    assert found.lower_bound.devices == 2
    assert found.to_json()["at_least"]["lost_ms"] == pytest.approx(2.0)
    view = build_view(found)
    assert view.change is not None
    assert (view.change.row, view.change.code) == (
        "epoch-boundary",
        "evaluate, log and save less often",
    )
    assert view.headline.startswith("Every epoch ends with more than 20 s without a step")
    less = dataclasses.replace(found.lower_bound, seconds=0.2)
    assert build_view(dataclasses.replace(found, lower_bound=less)).change is None


def test_only_the_trial_whose_epochs_nobody_saw_has_short_passes() -> None:
    """6 s between epochs of 200 steps on two devices; one device's, of 400, are not over."""
    fed = dataclasses.replace(LOADER, batches_per_epoch=200, dataset_size=40_000)
    seen = dataclasses.replace(DDP, loader=fed)
    costs = COSTS | {"samples_per_epoch": 40_000, "epoch_gap_ms": 6000.0}
    one = experiment(Scenario(**costs), between=EpochGap(seconds=6.0, steps=200))
    whole = one.run(probe_script(one, PLACE, None, HOST, lambda _: (seen,)))
    assert over_short_epochs(whole.actual()) not in one.results.runs
    alone = over_short_epochs(whole.baseline)
    assert alone in one.results.runs
    found = build_budget("train.py", whole, one.results)
    (row,) = (row for row in found.rows if row.cause == "epoch-boundary")
    assert row.lost_ms.value == pytest.approx(30 - 6000 / 400)
    assert found.lower_bound is None

    one.results.runs.pop(alone)
    without = build_budget("train.py", whole, one.results)
    assert dict(without.unmeasured)["epoch-boundary"] == NOT_ENOUGH_TIME
    assert without.n_devices.step_ms.value == pytest.approx(10)
    assert without.lower_bound is not None
    assert without.to_json()["at_least"]["whole"]
    view = build_view(without)
    assert view.change is not None
    assert view.change.code == "evaluate, log and save less often"
    assert view.headline == "Every epoch ends with 6 s without a step: 30.0 ms per step."


@pytest.mark.parametrize(
    ("persistent", "waits", "said"),
    [
        (False, True, "persistent_workers=True), and evaluate"),
        (False, False, "save less often; train.py:7: DataLoader(..., persistent_workers=True)"),
        (
            True,
            True,
            "(every epoch waits for its first batch), or less work per sample, which also",
        ),
        (True, False, "evaluate, log and save less often"),
    ],
)
def test_what_lies_between_epochs_has_the_change_that_helps(
    persistent: bool, waits: bool, said: str
) -> None:
    fed = dataclasses.replace(LOADER, num_workers=2, persistent_workers=persistent)
    assert said in pytorch.shorten_epoch_boundary(dataclasses.replace(DDP, loader=fed), waits=waits)


def test_a_scaler_that_reads_a_value_in_every_step_is_told_with_the_launches() -> None:
    traced = TraceSummary(
        steps=6, layout_copy_ms=(0.0,) * 6, launches_per_step=900, device_busy_ms=10.0
    )
    seen = dataclasses.replace(DDP, trace=traced, host_syncs=1.0, autocast="fp16")
    found = explained(seen, launch_ms=13.0)
    (row,) = [row for row in found.one_device_rows if row.cause == "launch-bound"]
    assert row.lost_ms.value == pytest.approx(3.0)
    assert "bf16 without GradScaler" in row.fix


@pytest.mark.parametrize(
    ("launch_ms", "reads_ms", "lost_ms"), [(13.0, 0.0, 3.0), (9.0, 0.0, 0.0), (13.0, 4.0, 3.0)]
)
def test_a_gpu_that_waits_for_launches_is_told_by_how_long_it_was_busy(
    launch_ms: float, reads_ms: float, lost_ms: float
) -> None:
    """Where the host is ahead of it, it waits for nothing; where the host waits, that is apart."""
    traced = TraceSummary(
        steps=6, layout_copy_ms=(0.0,) * 6, launches_per_step=900, device_busy_ms=10.0
    )
    seen = dataclasses.replace(DDP, trace=traced, host_syncs=float(reads_ms > 0))
    found = explained(seen, launch_ms=launch_ms, host_syncs_ms=reads_ms)
    rows = {row.cause: row for row in found.one_device_rows}
    if reads_ms:
        assert rows["synchronization"].lost_ms.value == pytest.approx(reads_ms)
    assert found.device_bound is not None
    assert found.device_bound.step_ms.value == pytest.approx(10.0)
    assert rows["launch-bound"].lost_ms.value == pytest.approx(lost_ms)
    assert rows["launch-bound"].significant == (lost_ms > 0)
    assert "torch.compile" in rows["launch-bound"].fix


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize(("saved", "tone"), [(0.99, "healthy"), (0.96, "healthy"), (0.9, "costly")])
def test_input_that_fills_a_cache_is_named_as_the_first_epoch_only(saved: float, tone: str) -> None:
    plain = explained(DDP, load_ms_per_sample=1.0)
    (usual,) = (row for row in plain.one_device_rows if row.cause == "input")
    seen = dataclasses.replace(DDP, cached_input_fraction=saved)
    found = explained(seen, load_ms_per_sample=1.0)
    rows = {row.cause: row for row in found.one_device_rows}
    assert rows["first-epoch"].lost_ms.value == pytest.approx(saved * usual.lost_ms.value)
    assert rows["input"].lost_ms.value == pytest.approx((1 - saved) * usual.lost_ms.value)
    assert rows["first-epoch"].fix == ""
    view = build_view(found)
    assert view.tone == tone
    assert (view.change is None) == (tone == "healthy")


def test_a_recompilation_in_every_step_has_a_cost_and_advice() -> None:
    again = Recompilation(
        function="loss", location="train.py:22", guard="beta == 0.5", step_ms=(4.0, 3.9, 4.2)
    )
    found = explained(dataclasses.replace(DDP, recompilation=again))
    (row,) = (row for row in found.one_device_rows if row.significant)
    assert (row.cause, row.lost_ms.value) == ("recompilation", 4.0)
    assert row.fix.startswith("train.py:22: pass changing numbers as tensors")
    longer = dataclasses.replace(again, step_ms=(1e3, 900.0, 1100.0))
    (row,) = (r for r in explained(dataclasses.replace(DDP, recompilation=longer)).significant)
    assert row.lost_ms.value < found.one_device.step_ms.value
    shaped = dataclasses.replace(again, guard="size mismatch at index 0")
    found = explained(dataclasses.replace(DDP, recompilation=shaped))
    assert "mark_dynamic" in found.significant[0].fix


def test_a_device_that_starves_is_said_first_and_from_which_batch_a_second_one_helps() -> None:
    """At batch 100 a step computes for 10 ms and waits 20 ms for its input; an exchange takes 15."""
    costs = {"load_ms_per_sample": 0.2, "transfer_ms": 15.0, "overlap": 0.0}
    found = explained(PLAIN, **costs)
    several = found.several_devices
    assert several is not None
    assert several.is_starved
    assert (several.input_ms.value, several.step_ms.value) == pytest.approx((20.0, 30.0))
    assert several.exchange_ms is not None
    assert several.sample_ms is not None
    assert several.batch is not None
    estimate = (several.exchange_ms.value, several.sample_ms.value, several.batch.value)
    assert estimate == pytest.approx((15.0, 0.1, 300.0))
    view = build_view(found)
    assert view.headline == (
        "One device waits for its data loader: 20.0 of 30.0 ms per step (67 %). Fix that first."
    )
    assert view.change is not None
    assert view.change.row == "data-loader"
    assert (
        "A second device helps from about 300 samples per step on: an estimate from 15.0 ms to "
        "exchange gradients after backward and 100.0 µs of compute per sample, if devices neither "
        "wait for input nor slow each other."
    ) in view.notices


def test_a_device_with_fast_input_is_not_starved() -> None:
    found = explained(PLAIN, transfer_ms=1.0, overlap=0.0)
    assert found.several_devices is not None
    assert not found.several_devices.is_starved
    assert "samples per step on" not in " ".join(build_view(found).notices)
    assert explained(DDP).several_devices is None


@pytest.mark.parametrize("seen", [DDP, PLAIN])
def test_workers_are_tried_before_another_layout_where_input_takes_most(
    seen: ScriptProfile,
) -> None:
    traced = TraceSummary(
        steps=6, layout_copy_ms=(3.0,) * 6, operator_layout_copy_ms=(3.0,) * 6, device_busy_ms=9.0
    )
    loader = dataclasses.replace(LOADER, num_workers=2)
    seen = dataclasses.replace(seen, trace=traced, convolutions=3, loader=loader, input_wait_ms=80)
    one = experiment(Scenario(**COSTS, load_ms_per_sample=1.0, host_cores=32))
    one.run(probe_script(one, PLACE, None, HOST, lambda _: (seen,)))
    order = list(one.results.runs)
    workers = [at for at, trial in enumerate(order) if trial.plan.workers == 4]
    layouts = [at for at, trial in enumerate(order) if trial.variant.channels_last]
    assert workers
    assert min(workers) < min(layouts, default=len(order))
