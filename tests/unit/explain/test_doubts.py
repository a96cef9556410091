"""What is said beside the numbers of a budget."""

from __future__ import annotations

import dataclasses

import pytest

from explaining import HOST, ladder
from nfold.explain.causes.threads import Threads
from nfold.explain.doubts import (
    APART,
    CROWDED,
    LOOKING_MS,
    NOTICED,
    TOO_EARLY,
    short,
    warnings,
    wrong,
)
from nfold.explain.measured import Measured
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.measurement import Doubt, Measurement, RankSamples, Window
from nfold.seen import Seen
from nfold.workload import Workload


@pytest.mark.parametrize(
    ("device", "seen", "step_ms", "told"),
    [
        ("cpu", Seen(), 0.2, True),
        ("cpu", Seen(), LOOKING_MS / NOTICED + 0.1, False),
        ("cpu", None, 0.2, False),
        ("cuda", Seen(), 0.2, False),
    ],
)
def test_a_step_in_which_looking_is_noticed_casts_doubt(
    device: str, seen: Seen | None, step_ms: float, *, told: bool
) -> None:
    made = ladder()
    of = dataclasses.replace(made, seen=seen, plan=made.plan.edit(device=device))
    found = short(of, step_ms)
    assert [doubt.kind for doubt in found] == ["short_steps"] * told
    assert not told or "steps of 0.2 ms are short" in found[0].text


def doubted(rung: Rung) -> Measurement:
    """A run of which a rank noted that its threads are more than its cores."""
    windows = (Window(start_s=0, seconds=0.2, steps=10, samples=80),)
    return Measurement(
        id="m",
        workload=Workload(name="train.py"),
        plan=rung.plan,
        machine=HOST,
        status="ok",
        ranks=(RankSamples(rank=0, device="cpu", windows=windows),),
        warnings=(Doubt(kind=CROWDED, text="2 threads on 1 core"),),
    )


@pytest.mark.parametrize(("threads", "told"), [(1, True), (4, False)])
def test_threads_that_have_a_row_are_no_doubt(threads: int, *, told: bool) -> None:
    """Of one device alone that has too many, where N have as many as cores, nothing else tells."""
    made = ladder(device="cpu", cores_per_device=1)
    of = dataclasses.replace(made, seen=Seen(threads=threads))
    measured = Measured()
    measured.add(made.one, 0, doubted(made.one))
    found = {doubt.kind for doubt in warnings(of, measured, measured.fit(20))}
    assert (CROWDED in found) == told


@pytest.mark.parametrize("uneven", [True, False])
def test_a_wait_that_no_run_has_is_told(*, uneven: bool) -> None:
    made = ladder()
    measured = Measured()
    measured.add(made.one, 0, doubted(made.one))
    of = dataclasses.replace(made, seen=Seen(uneven=uneven))
    found = {doubt.kind for doubt in warnings(of, measured, measured.fit(20))}
    assert ("uneven_batches" in found) == uneven


@pytest.mark.parametrize(("cores", "fewer"), [(1, False), (4, True)])
def test_a_device_of_one_core_has_none_to_give(cores: int, *, fewer: bool) -> None:
    asked = ladder(device="cpu", cores_per_device=cores)
    told = Threads().fix(asked, View({}))
    assert told.endswith("use fewer devices")
    assert ("give each fewer cores" in told) == fewer


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (None, "they differ"),
        (Seen(parallel="ddp"), "they differ"),
        (Seen(parallel="other", in_backward=True), "they differ"),
        (Seen(parallel="ddp", in_backward=True), TOO_EARLY),
    ],
)
def test_steps_before_ddp_has_sent_gradients_are_why_ranks_differ(
    seen: Seen | None, why: str
) -> None:
    assert wrong({APART: "they differ", "unsteady": "no error"}, None, seen) == (why,)
    assert wrong({"unsteady": "no error"}, "all of the data", seen) == ("all of the data",)
