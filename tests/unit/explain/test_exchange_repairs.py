"""Exchanges that can be repaired at the same batch size, and work that grows with the devices."""

from __future__ import annotations

import dataclasses

import pytest

from explaining import experiment_design
from nfold.core.measurement import Caveat, Window
from nfold.core.script_profile import CollectiveUse, RowGradient, ScriptProfile, SourceLocation
from nfold.explain.advice.caveats import collect_caveats
from nfold.explain.advice.exchange_repairs import describe_exchange, repair_exchange
from nfold.explain.attribution import build_budget
from nfold.explain.causes.collectives import LINK, SYNCHRONIZATION, WRAPPER
from nfold.explain.causes.growing_work import GROWING_WORK
from nfold.explain.design import ExperimentDesign, no_allreduce, replicas
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.planner import observed_in_probe
from nfold.explain.result.budget import Budget
from nfold.explain.result.view import TO_CHECK, build_view
from nfold.explain.trials import TrialResults
from timed import rank, timed

LINE = SourceLocation(line="train.py:20", per_step=78.0)
BY_HAND = ScriptProfile(
    parallel="other",
    backend="gloo",
    parameter_bytes=90_000,
    collectives=(CollectiveUse(name="all_reduce", per_step=78.0, bytes_per_step=90_000.0),),
    source_locations={"collective": (LINE,)},
)
TABLE = ScriptProfile(
    parallel="ddp",
    backend="gloo",
    parameter_bytes=58_000_000,
    optimizers=("Adam",),
    row_gradients=(RowGradient(name="near.weight", bytes=29_000_000, changed_fraction=0.01),),
    source_locations={"wrapper": (SourceLocation(line="train.py:8"),)},
)
GATHERS = ScriptProfile(
    parallel="ddp", source_locations={"gathered_work": (SourceLocation(line="train.py:31"),)}
)


def test_a_collective_for_every_parameter_is_replaced_by_one_for_all() -> None:
    advice = repair_exchange(BY_HAND)
    assert advice.startswith("train.py:20: one all_reduce of all gradients")
    assert "DistributedDataParallel" in advice
    assert "78 all_reduce calls" in describe_exchange(BY_HAND)
    wrapped = dataclasses.replace(BY_HAND, parallel="ddp", parameter_bytes=10**9)
    assert "DistributedDataParallel" not in repair_exchange(wrapped)


@pytest.mark.parametrize(
    "usual",
    [
        {"parallel": "fsdp"},
        {"collectives": (CollectiveUse(name="all_reduce", per_step=1.0, bytes_per_step=90.0),)},
        {"collectives": (CollectiveUse(name="all_reduce", per_step=78.0, bytes_per_step=1e9),)},
        {"source_locations": {"collective": (dataclasses.replace(LINE, package_line="x.py:1"),)}},
    ],
)
def test_few_or_large_collectives_and_those_of_libraries_stay(usual: dict[str, object]) -> None:
    assert repair_exchange(dataclasses.replace(BY_HAND, **usual)) == ""  # type: ignore[arg-type]


def test_rows_that_no_step_changes_are_not_exchanged() -> None:
    advice = repair_exchange(TABLE)
    assert advice.startswith("train.py:8: nn.Embedding(..., sparse=True) and SparseAdam")
    assert "near.weight: 50%" in advice
    nccl = repair_exchange(dataclasses.replace(TABLE, backend="nccl"))
    assert "sparse=True" not in nccl
    assert "changed rows only" in nccl
    assert repair_exchange(dataclasses.replace(TABLE, parameter_bytes=10**9)) == ""


def test_half_of_the_bytes_is_not_tried_where_rows_can_stay() -> None:
    design = experiment_design(input="loader")
    table = dataclasses.replace(TABLE, parameter_count=14_500_000)
    assert LINK.fixes(dataclasses.replace(design, profile=table)) == {}
    assert LINK.has_repair(dataclasses.replace(design, profile=table))
    whole = dataclasses.replace(table, row_gradients=())
    assert LINK.fixes(dataclasses.replace(design, profile=whole))


def test_work_on_gathered_samples_is_not_the_wrapper() -> None:
    gathers = ScriptProfile(
        parallel="ddp", source_locations={"gathered_work": (SourceLocation(line="train.py:31"),)}
    )
    design = dataclasses.replace(experiment_design(input="loader"), profile=gathers)
    alone, none = (run(design, design.cheapest_input) for run in (replicas, no_allreduce))
    view = MetricView({(alone, "step"): 16.0, (none, "step"): 40.0})
    assert GROWING_WORK.costs(design).lost_ms(view) == 24.0
    assert GROWING_WORK.fix(design, view).startswith("train.py:31: ")
    names = [one.name for one in SYNCHRONIZATION.contrasts(design)]
    assert WRAPPER not in names
    usual = dataclasses.replace(design, profile=ScriptProfile(parallel="ddp"))
    assert GROWING_WORK.not_applicable_reason(usual)
    assert WRAPPER in [one.name for one in SYNCHRONIZATION.contrasts(usual)]


def test_what_the_probe_can_repair_is_measured_first() -> None:
    usual = experiment_design(input="loader")
    usual = dataclasses.replace(
        usual,
        plan=usual.plan.edit(steps=20, accumulate=4),
        profile=ScriptProfile(parallel="ddp", accumulation=4, gradient_exchanges=1.0),
    )
    assert not list(observed_in_probe(usual))
    each = dataclasses.replace(usual.facts, gradient_exchanges=4.0)
    for cause, seen in (
        (GROWING_WORK, GATHERS),
        (LINK, TABLE),
        (SYNCHRONIZATION, BY_HAND),
        (SYNCHRONIZATION, each),
    ):
        design = dataclasses.replace(usual, profile=seen)
        trials = cause.costs(design).trials
        assert trials
        assert set(trials) <= set(observed_in_probe(design))


@pytest.mark.parametrize(
    ("seen", "lines"),
    [
        (GATHERS, ["train.py:31:"]),
        (BY_HAND, ["train.py:20:"]),
        (TABLE, ["train.py:8:"]),
        (ScriptProfile(parallel="ddp"), []),
    ],
)
def test_what_can_be_repaired_is_to_be_checked_where_its_cost_is_below_the_noise(
    seen: ScriptProfile, lines: list[str]
) -> None:
    design = dataclasses.replace(experiment_design(), profile=seen)
    results = TrialResults()
    found = [
        one for one in collect_caveats(design, results, results.fit(20)) if one.kind in TO_CHECK
    ]
    assert [one.text.partition(" ")[0] for one in found] == lines


def test_an_observed_cause_of_a_large_uncertain_cost_is_likely() -> None:
    usual = dataclasses.replace(experiment_design(strategy="ddp", scaling="weak"), profile=GATHERS)
    assert _likely_rows(_uncertain_budget(usual, 60.0)) == ["growing-work"]
    assert build_view(_uncertain_budget(usual, 60.0)).change is not None
    assert not _likely_rows(_uncertain_budget(usual, 36.0))
    ddp = dataclasses.replace(usual, profile=ScriptProfile(parallel="ddp"))
    assert not _likely_rows(_uncertain_budget(ddp, 60.0))


def _likely_rows(budget: Budget) -> list[str]:
    assert budget.account is not None
    return [row.id for row in budget.account.costs if not row.significant]


def test_a_likely_cost_is_shown_after_the_certain_ones() -> None:
    design = dataclasses.replace(
        experiment_design(strategy="ddp", scaling="weak"), profile=ScriptProfile(parallel="ddp")
    )
    view = build_view(_uncertain_budget(design, 60.0, other_cores=0.2))
    notes = {row.label: row.note for row in view.rows}
    assert notes["host contention"] == "probably"
    assert notes["wrapper and synchronization"] == ""
    assert "Probably" not in view.headline


def test_what_the_probe_observed_is_in_the_headline_if_it_was_not_measured() -> None:
    usual = experiment_design(strategy="ddp", scaling="weak")
    for seen, part in ((GATHERS, "samples of all ranks"), (BY_HAND, "78 all_reduce calls")):
        design = dataclasses.replace(usual, profile=seen)
        headline = build_view(_uncertain_budget(design, None)).headline
        assert "not tested" in headline
        assert part in headline
    plain = dataclasses.replace(usual, profile=ScriptProfile(parallel="ddp"))
    assert "not tested:" not in build_view(_uncertain_budget(plain, None)).headline
    measured = dataclasses.replace(usual, profile=GATHERS)
    assert "not tested:" not in build_view(_uncertain_budget(measured, 36.0)).headline


def _uncertain_budget(
    design: ExperimentDesign, local_ms: float | None, *, other_cores: float = 1.0
) -> Budget:
    """The budget if others use cores, from one run of each trial of the cause, or without them."""
    step_ms = {design.baseline: 20.0, design.actual(): 80.0}
    if local_ms is not None:
        step_ms[replicas(design, design.cheapest_input)] = 34.0
        step_ms[no_allreduce(design, design.cheapest_input)] = local_ms
    results, busy = TrialResults(), Caveat(kind="busy_host", text="", value=other_cores)
    for trial, ms in step_ms.items():
        devices, samples = trial.plan.devices or 1, design.batch_per_device
        one = Window(start_s=0.0, seconds=ms / 100, steps=10, samples=10 * samples)
        ranks = [rank(k, step_ms=(ms,) * 120) for k in range(devices)]
        ranks = [dataclasses.replace(each, windows=(one,) * 12) for each in ranks]
        run = timed(devices=devices, cores=2, warnings=(busy,), ranks=tuple(ranks))
        run = dataclasses.replace(run, plan=trial.plan, variant=trial.variant, id=str(trial))
        results.add(trial, 0, run)
    return build_budget("train.py", design, results)
