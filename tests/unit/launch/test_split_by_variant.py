"""A measurement of each of the experiments that took turns."""

from __future__ import annotations

from typing import Any

import pytest

from made import machine, plan
from nfold.core.measurement import FailureCause, Measurement, RankSamples, Window, cell_id
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.launch.workload_run import split_by_variant

TURNS = (Variant(), Variant(input="replayed"))
PLAN = plan(devices=2, device="cpu")


def _rank(number: int, checksum: str = "a") -> RankSamples:
    turns = (0, 1, 1, 0)
    windows = [Window(start_s=k, seconds=0.1, steps=1 + t, samples=8) for k, t in enumerate(turns)]
    return RankSamples(
        rank=number,
        device="cpu",
        windows=tuple(windows),
        slots=turns,
        step_ms=(1.0, 2.0, 2.1, 2.2, 2.3, 1.1),
        sample_hashes=((8, f"{number + 1:016x}"),),
        parameter_checksum=checksum,
    )


def _whole(*ranks: RankSamples, **changes: Any) -> Measurement:
    said = {"plan": PLAN, "status": "ok", "repeat": 3, "folder": "measurements/x", **changes}
    return Measurement(
        id="0123456789-3-abcdef",
        workload=Workload(name="digits"),
        machine=machine(),
        ranks=ranks,
        **said,
    )


def test_each_has_its_own_windows_and_is_the_answer_to_its_own_question() -> None:
    whole = _whole(_rank(0), _rank(1))
    real, replayed = split_by_variant(whole, TURNS)
    assert [w.start_s for w in real.ranks[1].windows] == [0, 3]
    assert real.ranks[0].step_ms == (1.0, 1.1)
    assert replayed.ranks[0].step_ms == (2.0, 2.1, 2.2, 2.3)
    assert (real.variant, replayed.variant) == (None, TURNS[1])
    for one, left_out in zip((real, replayed), TURNS, strict=True):
        cell = cell_id(whole.workload, whole.plan, left_out or None, whole.machine)
        assert one.cell == cell
        assert one.id == f"{cell}-3-abcdef"
        assert one.folder == whole.folder


def test_training_is_doubted_only_where_nothing_is_left_out() -> None:
    real, replayed = split_by_variant(_whole(_rank(0), _rank(1, "b")), TURNS)
    assert "parameters_differ" in [doubt.kind for doubt in real.warnings]
    assert "parameters_differ" not in [doubt.kind for doubt in replayed.warnings]


NO = FailureCause(text="no")


@pytest.mark.parametrize("ranks", [(), (_rank(0),)])
def test_where_the_run_failed_each_has_failed(ranks: Any) -> None:
    """Also where one rank had all its turns: what it waited for is unknown."""
    found = split_by_variant(_whole(*ranks, status="crashed", cause=NO), TURNS)
    assert [(one.status, one.cause) for one in found] == [("crashed", NO)] * 2


def test_what_had_a_whole_turn_before_the_run_failed_is_known() -> None:
    """Of 12 steps in four cycles one cycle has 3: the second turn has 4 of them, the first 2."""
    whole = _whole(_rank(0), _rank(1, "b"), status="oom", cause=NO, plan=PLAN.edit(steps=12))
    real, replayed = split_by_variant(whole, TURNS)
    assert (real.status, replayed.status) == ("oom", "ok")
    assert real.cause == replayed.cause == NO
    assert "parameters_differ" not in [doubt.kind for doubt in real.warnings]
