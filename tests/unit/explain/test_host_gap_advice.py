"""What to change about what a script does while it makes no step, where it is known where."""

from __future__ import annotations

import dataclasses

import pytest

from made import machine
from nfold.core.measurement import (
    STARTS_WORKERS,
    HostGapKind,
    HostGapLocation,
    Measurement,
    RankSamples,
)
from nfold.core.plan import Plan
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, SourceLocation
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.explain.advice.pytorch import (
    ITERABLE_SAMPLER,
    gap_locations,
    reduce_host_gap,
    reduce_periodic_work,
    reduce_rank_host_gap,
    shorten_epoch_boundary,
    split_code,
    split_location,
    with_gap_locations,
)
from nfold.explain.causes.launch_bound import idle_trial, shared_host_gap_ms
from nfold.explain.design import ExperimentDesign, no_allreduce
from nfold.explain.estimate.bootstrap import BootstrapFit, MetricView
from nfold.explain.estimate.samples import Samples

PLAN = Plan(device="cpu", devices=2, batch=64)
SEEN = ScriptProfile(
    loader=DataLoaderProfile(batch_size=64, batches_per_epoch=100, created_at="train.py:7"),
    source_locations={"step": (SourceLocation(line="train.py:31"),)},
)
Spots = tuple[HostGapLocation, ...]


def at(when: HostGapKind, place: str, seconds: float, calls: str | None = None) -> HostGapLocation:
    return HostGapLocation(kind=when, location=place, seconds=seconds, callee=calls)


def experiment_design(*ranks: Spots, seen: ScriptProfile = SEEN) -> ExperimentDesign:
    return ExperimentDesign(plan=PLAN, scaling="weak", profile=seen, gap_locations=ranks)


def test_what_comes_after_every_step_has_its_line_and_what_is_called_there() -> None:
    spots = (
        at("after a step", "train.py:40", 0.97, "histograms()"),
        at("after a step", "train.py:44", 0.03),
        at("after some steps", "train.py:50", 3.0),
    )
    told = reduce_host_gap(experiment_design(spots), 10.12)
    assert told == (
        "train.py:40: 10.1 ms pass after every step before the next batch is requested "
        "(histograms()): do less there, or less often"
    )


def test_where_nobody_is_seen_to_ask_it_may_be_the_making_of_a_batch() -> None:
    spots = (at("after a step", "train.py:40", 1.0, "forward()"),)
    told = reduce_host_gap(
        experiment_design(spots, seen=dataclasses.replace(SEEN, loader=None)), 3.4
    )
    assert told.startswith(
        "train.py:40: 3.4 ms pass after every step before the model is called again (forward())"
    )
    assert "(if it makes batches: use DataLoader workers)" in told


def test_a_part_that_is_not_nearly_all_is_told() -> None:
    spots = (at("after a step", "train.py:40", 0.6), at("after a step", "train.py:44", 0.4))
    assert "requested (60% of it): do less" in reduce_host_gap(experiment_design(spots), 10.12)


@pytest.mark.parametrize("spots", [(), (at("after a step", "train.py:40", 0.004),)])
def test_where_nobody_has_looked_long_it_is_behind_the_step(spots: Spots) -> None:
    assert reduce_host_gap(experiment_design(spots), 3.0).startswith("train.py:31: 3.0 ms pass")
    assert reduce_periodic_work(experiment_design(spots), 20.0, 31.4) == (
        "train.py:31: 31 ms every 20 steps: evaluate, log and save less often, or divide it"
    )


@pytest.mark.parametrize(
    ("other_s", "said", "change"),
    [
        (0.0, "80 ms on rank 0, while the others wait, every", "divide it over the ranks"),
        (0.9, "80 ms every", "divide it"),
    ],
)
def test_what_one_rank_does_while_the_others_wait_is_to_be_divided(
    other_s: float, said: str, change: str
) -> None:
    ranks = [(at("after some steps", "train.py:50", s, "evaluate()"),) for s in (1.0, other_s)]
    told = reduce_periodic_work(experiment_design(*ranks), 50.0, 80.4)
    assert told == (f"train.py:50: {said} 50 steps (evaluate()): do that less often, or {change}")


def test_a_slow_rank_has_its_own_line() -> None:
    ranks = ((at("after a step", "train.py:40", 2.0),), (at("after a step", "train.py:44", 1.0),))
    assert reduce_rank_host_gap(experiment_design(*ranks), 1, 6.55).startswith(
        "train.py:44: rank 1 spends 6.5 ms outside of training between steps"
    )


def test_between_epochs_the_line_and_the_rank_stand_beside_the_change() -> None:
    ranks = ((at("between passes", "train.py:60", 0.5, "evaluate()"),), ())
    told = shorten_epoch_boundary(SEEN, waits=False, ranks=ranks)
    assert told == (
        "train.py:60: do less there, or less often, or not on rank 0 alone while the others wait "
        "(evaluate())"
    )
    both = (ranks[0], ranks[0])
    told = shorten_epoch_boundary(SEEN, waits=False, ranks=both)
    assert told == "train.py:60: do less there, or less often (evaluate())"
    lightning = dataclasses.replace(SEEN, trainer="lightning")
    told = shorten_epoch_boundary(lightning, waits=False, ranks=both)
    assert told.startswith("train.py:60: a larger check_val_every_n_epoch")


@pytest.mark.parametrize(
    ("loader", "change"),
    [
        (
            {"num_workers": 4},
            "train.py:7: DataLoader(..., persistent_workers=True); train.py:60 starts loader workers "
            "in every epoch",
        ),
        (
            {"num_workers": 4, "persistent_workers": True},
            "train.py:60: DataLoader(..., persistent_workers=True); this line starts workers every "
            "time",
        ),
        (
            {"num_workers": 0},
            "train.py:60: DataLoader(..., persistent_workers=True); this line starts workers every "
            "time",
        ),
    ],
)
def test_workers_that_start_in_every_epoch_are_to_stay(loader: dict[str, int], change: str) -> None:
    """Those of an evaluation are as slow to start as those of the training."""
    assert SEEN.loader is not None
    fed = dataclasses.replace(SEEN.loader, **loader)  # type: ignore[arg-type]
    ranks = ((at("between passes", "train.py:60", 0.5, STARTS_WORKERS),),)
    seen = dataclasses.replace(SEEN, loader=fed)
    assert shorten_epoch_boundary(seen, waits=False, ranks=ranks) == change
    assert split_code(split_location(change)[1])[0] == "DataLoader(..., persistent_workers=True)"


def test_one_device_has_no_others() -> None:
    told = shorten_epoch_boundary(
        SEEN, waits=False, ranks=((at("between passes", "train.py:60", 0.5),),)
    )
    assert told == "train.py:60: do less there, or less often"


def _run(*ranks: Spots, folder: str = "", number: int = 0) -> Measurement:
    return Measurement(
        id=f"run-{number}",
        workload=Workload(name="train.py", script=("train.py",)),
        plan=PLAN,
        machine=machine(),
        status="ok",
        folder=folder or None,
        ranks=tuple(
            RankSamples(rank=rank, device="cpu", host_gap_locations=spots)
            for rank, spots in enumerate(ranks)
        ),
    )


def test_where_ranks_were_adds_up_over_process_trees_of_as_many() -> None:
    first = (at("after a step", "train.py:40", 1.0, "log()"),)
    same = (at("after a step", "train.py:40", 2.0, "log()"),)
    other = (at("between passes", "train.py:60", 4.0),)
    asked = experiment_design(*gap_locations(_run(first, ())))
    runs = [
        _run(same, other, folder="tree", number=1),
        _run(same, other, folder="tree", number=2),
        _run(same, number=3),
        dataclasses.replace(_run(same, same, number=4), variant=Variant(independent=True)),
    ]
    assert with_gap_locations(asked, runs).gap_locations == (
        (at("after a step", "train.py:40", 3.0, "log()"),),
        (at("between passes", "train.py:60", 4.0),),
    )
    assert with_gap_locations(experiment_design(), runs).gap_locations == ()


def test_a_stream_has_no_sampler_that_could_be_another() -> None:
    for sampler, change in (
        ("DistributedSampler", "a sampler that goes through the data several times"),
        (ITERABLE_SAMPLER, "one iterator for several epochs, counted in steps"),
    ):
        fed = DataLoaderProfile(
            batch_size=64,
            num_workers=2,
            persistent_workers=True,
            sampler=sampler,
            created_at="a.py:7",
        )
        told = shorten_epoch_boundary(dataclasses.replace(SEEN, loader=fed), waits=True)
        assert told.startswith(f"a.py:7: {change} (every epoch waits")


@pytest.mark.parametrize("own_ms", [190.0, 220.0])
def test_a_shared_gap_is_certain_as_a_part_of_the_step_however_noisy_the_host(
    own_ms: float,
) -> None:
    """The smaller of both gaps is of one device, or of the ranks: then it shares their tree."""
    design = experiment_design()
    design = dataclasses.replace(design, plan=PLAN.edit(strategy="ddp", input="loader"))
    actual, alone = design.actual(), idle_trial(design)
    ranks = no_allreduce(design, design.cheapest_input)
    table = {
        (actual, "step"): {0: 300.0},
        (ranks, "step"): {0: 280.0},
        (ranks, "host_gap"): {0: 206.0},
        (alone, "step"): {0: 250.0},
        (alone, "host_gap"): {0: own_ms},
    }
    noise = [(trial, 0.5) for trial in (actual, alone)]
    trees = {(actual, 0): "tree", (ranks, 0): "tree"}
    fit = BootstrapFit(table, noise, process_trees=trees)

    def gap(view: MetricView) -> Samples:
        return shared_host_gap_ms(design, view)

    def step(view: MetricView) -> Samples:
        return view.step(alone if own_ms < 206.0 else actual)

    assert fit.value(gap) == pytest.approx(min(own_ms, 206.0))
    assert fit.is_significant(fit.interval(gap), gap, step)
