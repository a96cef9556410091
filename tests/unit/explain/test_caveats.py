"""What is said beside the numbers of a budget."""

from __future__ import annotations

import dataclasses

import pytest

from explaining import HOST, experiment_design
from nfold.core.measurement import NO_GRADIENT_EXCHANGE, Caveat, Measurement, RankSamples, Window
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, SourceLocation
from nfold.core.workload import Workload
from nfold.explain.advice.caveats import (
    AVERAGED_RARELY,
    FROZEN_WHEN_WRAPPED,
    MANY_THREADS,
    NOTICEABLE_FRACTION,
    OPTIMIZER_IN_BACKWARD,
    OVERHEAD_MS,
    PAST_WRAPPER,
    collect_caveats,
    find_training_errors,
    short_step_caveats,
)
from nfold.explain.causes.host_processes import THREADS
from nfold.explain.design import Trial
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.trials import TrialResults
from nfold.launch.training_checks import (
    OUT_OF_STEP,
    PARAMETERS_DIFFER,
    PART_NOT_EXCHANGED,
    REPEATED_SAMPLES,
    SAME_ORDER,
)


@pytest.mark.parametrize(
    ("device", "seen", "step_ms", "told"),
    [
        ("cpu", ScriptProfile(), 0.2, True),
        ("cpu", ScriptProfile(), OVERHEAD_MS / NOTICEABLE_FRACTION + 0.1, False),
        ("cpu", None, 0.2, False),
        ("cuda", ScriptProfile(), 0.2, False),
    ],
)
def test_a_step_in_which_looking_is_noticed_casts_doubt(
    device: str, seen: ScriptProfile | None, step_ms: float, *, told: bool
) -> None:
    made = experiment_design()
    of = dataclasses.replace(made, profile=seen, plan=made.plan.edit(device=device))
    found = short_step_caveats(of, step_ms)
    assert [doubt.kind for doubt in found] == ["short_steps"] * told
    assert not told or "steps of 0.2 ms are short" in found[0].text


def doubted(rung: Trial) -> Measurement:
    """A run of which a rank noted that its threads are more than its cores."""
    windows = (Window(start_s=0, seconds=0.2, steps=10, samples=80),)
    return Measurement(
        id="m",
        workload=Workload(name="train.py"),
        plan=rung.plan,
        machine=HOST,
        status="ok",
        ranks=(RankSamples(rank=0, device="cpu", windows=windows),),
        warnings=(Caveat(kind=MANY_THREADS, text="2 threads on 1 core"),),
    )


@pytest.mark.parametrize(("threads", "told"), [(1, True), (4, False)])
def test_threads_that_have_a_row_are_no_doubt(threads: int, *, told: bool) -> None:
    """Of one device alone that has too many, where N have as many as cores, nothing else tells."""
    made = experiment_design(device="cpu", cores_per_device=1)
    of = dataclasses.replace(made, profile=ScriptProfile(threads=threads))
    measured = TrialResults()
    measured.add(made.baseline, 0, doubted(made.baseline))
    found = {doubt.kind for doubt in collect_caveats(of, measured, measured.fit(20))}
    assert (MANY_THREADS in found) == told


@pytest.mark.parametrize("uneven", [True, False])
def test_a_wait_that_no_run_has_is_told(*, uneven: bool) -> None:
    made = experiment_design()
    measured = TrialResults()
    measured.add(made.baseline, 0, doubted(made.baseline))
    of = dataclasses.replace(made, profile=ScriptProfile(uses_join=uneven))
    found = {doubt.kind for doubt in collect_caveats(of, measured, measured.fit(20))}
    assert ("uneven_batches" in found) == uneven


@pytest.mark.parametrize(("cores", "fewer"), [(1, False), (4, True)])
def test_a_device_of_one_core_has_none_to_give(cores: int, *, fewer: bool) -> None:
    asked = experiment_design(device="cpu", cores_per_device=cores)
    told = THREADS.fix(asked, MetricView({}))
    assert told.endswith("use fewer devices")
    assert ("give each fewer cores" in told) == fewer


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (
            ScriptProfile(),
            f"{NO_GRADIENT_EXCHANGE}; next: wrap the model in DistributedDataParallel",
        ),
        (ScriptProfile(parallel="ddp"), NO_GRADIENT_EXCHANGE),
        (
            ScriptProfile(
                parallel="ddp",
                source_locations={"past_wrapper": (SourceLocation(line="train.py:7"),)},
            ),
            PAST_WRAPPER.format("train.py:7"),
        ),
        (ScriptProfile(parallel="ddp", steps_in_backward=True), OPTIMIZER_IN_BACKWARD),
        (ScriptProfile(parallel="none", process_group=True), AVERAGED_RARELY.format("")),
        (ScriptProfile(parallel="ddp", comm_hook="post_localSGD"), AVERAGED_RARELY.format("")),
        (
            ScriptProfile(
                parallel="other",
                process_group=True,
                source_locations={"collective": (SourceLocation(line="train.py:40"),)},
            ),
            AVERAGED_RARELY.format(" (train.py:40)"),
        ),
    ],
)
def test_why_gradients_are_not_exchanged(seen: ScriptProfile, why: str) -> None:
    assert find_training_errors(
        {PARAMETERS_DIFFER: NO_GRADIENT_EXCHANGE, "unsteady": "no error"}, None, seen
    ) == (why,)
    assert find_training_errors({"unsteady": "no error"}, "all of the data", seen) == (
        "all of the data",
    )


@pytest.mark.parametrize(("line", "place"), [("train.py:8", " (train.py:8)"), (None, "")])
def test_parameters_that_were_frozen_when_wrapped_have_the_line_of_the_wrapper(
    line: str | None, place: str
) -> None:
    seen = ScriptProfile(parallel="ddp")
    if line is not None:
        wrapper = (SourceLocation(line=line),)
        seen = dataclasses.replace(seen, source_locations={"wrapper": wrapper})
    text = f"gradients of backbone {PART_NOT_EXCHANGED} their parameters differ"
    (error,) = find_training_errors({PARAMETERS_DIFFER: text}, None, seen)
    assert error == f"{text}{FROZEN_WHEN_WRAPPED.format(place)}"
    by_hand = dataclasses.replace(seen, parallel="other")
    assert find_training_errors({PARAMETERS_DIFFER: text}, None, by_hand) == (text,)


def test_a_loader_without_a_length_may_be_why_ranks_are_out_of_step() -> None:
    shards = DataLoaderProfile(created_at="train.py:9")
    (found,) = find_training_errors({OUT_OF_STEP: "apart"}, None, ScriptProfile(loader=shards))
    assert found == (
        "apart; the DataLoader of train.py:9 has no length: ranks may have unequal numbers of batches"
    )
    known = dataclasses.replace(shards, batches_per_epoch=100)
    for loader in (known, None):
        found_by = find_training_errors({OUT_OF_STEP: "apart"}, None, ScriptProfile(loader=loader))
        assert found_by == ("apart",)


def test_counted_passes_of_ranks_that_are_out_of_step() -> None:
    shards = DataLoaderProfile(created_at="train.py:9")

    def found(*batches: int) -> tuple[str, ...]:
        seen = ScriptProfile(loader=shards, pass_batches=batches)
        return find_training_errors({OUT_OF_STEP: "apart"}, None, seen)

    named = "120 batches on rank 0 and 102 batches on rank 1"
    assert found(120, 102) == (f"apart; a pass over the DataLoader of train.py:9 has {named}",)
    assert found(102, 102) == ("apart",)


def test_training_errors_name_the_line_and_the_next_step() -> None:
    loader = DataLoaderProfile(num_workers=2, created_at="train.py:9")
    seen = ScriptProfile(parallel="ddp", loader=loader)
    texts = {REPEATED_SAMPLES: "twice", SAME_ORDER: "one order", PARAMETERS_DIFFER: "initial"}
    parameters, repeated, order = find_training_errors(texts, None, seen)
    assert parameters == "initial"
    assert repeated.startswith("train.py:9: each of the 2 loader workers")
    assert "get_worker_info" in repeated
    assert order == "train.py:9: one order"
