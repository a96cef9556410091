"""Which of two runs trains, without processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nfold.core.interleave import ALL_SLICES, SLICES, alternating_slots
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import StartCallback
from nfold.tune.runs.alternating_runs import run_alternating

TRAINED: list[tuple[str, int]] = []


def _rank(
    name: str, folder: Path, slices: int = ALL_SLICES
) -> Callable[[StartCallback], Measurement]:
    """A run whose only rank notes its slices, and ends or fails after some of them."""

    def run(on_start: StartCallback) -> Measurement:
        own = HandoffFolder(folder / name)
        own.path.mkdir()
        on_start(own.path)
        for number in range(ALL_SLICES + 1):
            own.slices.write_done(number)
            while own.slices.read_allowed() <= number:
                time.sleep(0.001)
            if number == slices:
                break
            TRAINED.append((name, number))
        if slices < ALL_SLICES:
            raise RuntimeError(name)
        return name  # type: ignore[return-value]

    return run


@pytest.fixture(autouse=True)
def _nothing_trained() -> None:
    TRAINED.clear()


def test_slices_alternate(tmp_path: Path) -> None:
    pair = run_alternating(_rank("first", tmp_path), _rank("second", tmp_path))
    assert [*map(str, pair)] == ["first", "second"]
    assert [(name, n) for n in range(ALL_SLICES) for name in ("first", "second")] == TRAINED


@pytest.mark.parametrize("name", ["first", "second"])
def test_when_one_fails_the_other_goes_on_and_the_error_is_raised(
    tmp_path: Path, name: str
) -> None:
    slices = {"first": ALL_SLICES, "second": ALL_SLICES, name: 2}
    with pytest.raises(RuntimeError, match=name):
        run_alternating(*(_rank(one, tmp_path, slices[one]) for one in ("first", "second")))
    assert [one for one, _ in TRAINED].count(name) == 2
    assert len(TRAINED) == ALL_SLICES + 2


@pytest.mark.parametrize(("workers", "settle"), [(0, 3), (2, 12)])
def test_steps_before_a_slice_are_discarded(workers: int, settle: int) -> None:
    slots = alternating_slots(Plan(steps=60, warmup_steps=12, workers=workers))
    assert [one.variant_index for one in slots if one.variant_index is not None] == [*range(SLICES)]
    assert [one.steps for one in slots if one.variant_index is None] == [settle] * SLICES + [1]
    assert sum(one.steps for one in slots if one.variant_index is not None) == 60
