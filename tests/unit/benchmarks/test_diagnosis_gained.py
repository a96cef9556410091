"""What a change gains by the clocks of the scripts themselves, in turns."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import clocked
import gained
import pytest
import repaired

from repeated import repeated

SCRIPT = """
import time, torch
from torch.utils.data import DataLoader
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], 0.1)
weight.grad = torch.zeros(1)
while True:
    for _ in DataLoader(torch.arange(4)):
        time.sleep({step_s})
        optimizer.step()
"""


def _clock(timed_s: float, told: list[dict[str, float]]) -> clocked.Clock:
    """A clock for which a step takes 1 s and what comes before a pass 2."""
    return clocked.Clock(3, timed_s, told.append, now=map(float, itertools.count()).__next__)


def test_whole_passes_count_where_there_are_enough() -> None:
    told: list[dict[str, float]] = []
    clock = _clock(42, told)
    while not told:
        clock.begin()
        for _ in range(4):
            clock.step()
    assert told == [{"steps_per_s": 4 / 5, "steps": 32, "passes": 8}]
    clock.step()
    assert len(told) == 1


def test_all_steps_count_where_passes_are_long() -> None:
    told: list[dict[str, float]] = []
    clock = _clock(10, told)
    while not told:
        clock.step()
    assert told == [{"steps_per_s": 1.0, "steps": 10, "passes": 0}]


def _script(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.slow
@repeated
def test_a_script_that_waits_a_quarter_as_long_gains_fourfold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOCKED_SETTLE_S", "0.1")
    slow, fast = (
        _script(tmp_path, f"{step_s}.py", SCRIPT.format(step_s=step_s)) for step_s in (0.2, 0.05)
    )
    times = gained.Clocked(devices="1", seconds=1.5, alone=True)
    assert 2 < times.gain(0, [slow], [fast]) < 8


def test_a_script_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    failing = _script(tmp_path, "failing.py", "raise ValueError('no picture')")
    with pytest.raises(RuntimeError, match="no picture"):
        gained.Clocked(devices="1", alone=True).step_ms([failing])


def test_turns_stand_before_and_after_the_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def gain(_: gained.Clocked, number: int, *scripts: Any) -> float:
        order.append(f"turn {number}")
        assert [Path(path).name for path, *_ in scripts] == ["single.py", "single_fixed.py"]
        return 3.0 + number

    def explained(*_: Any) -> dict[str, Any]:
        order.append("explained")
        return {}

    told = repaired.Verdict(
        script="single", devices="1", tool="nfold", named=("input",), said="", before=1.0,
        predicted=4.2,
    )  # fmt: skip
    monkeypatch.setattr(gained.Clocked, "gain", gain)
    monkeypatch.setattr(repaired, "_explained", explained)
    monkeypatch.setattr(repaired, "verdict", lambda *_: told)
    asked = argparse.Namespace(
        tool="nfold", turns=3, on="1", python="python", argument=[], fixed_argument=None, budget=""
    )
    found = repaired.judge("single", asked)
    assert order == ["turn 0", "explained", "turn 1", "turn 2"]
    assert (found.gains, found.achieved, found.promised) == ((3.0, 4.0, 5.0), 4.0, 4.2)
    assert "| 4.20 | 3.00, 4.00, 5.00 |" in repaired.table([found])[-1]

    def failing(*_: Any) -> float:
        raise RuntimeError("it said nothing")

    monkeypatch.setattr(gained.Clocked, "gain", failing)
    assert repaired.judge("single", asked) == told, "what was explained is not lost"
    with pytest.raises(RuntimeError, match="no --turns"):
        repaired.judge("dataparallel", asked)
