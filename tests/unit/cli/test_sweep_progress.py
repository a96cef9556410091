"""What a person sees while a sweep runs."""

from __future__ import annotations

import io

import pytest

from made import machine
from measured import measurement
from nfold.bench.grid import build_grids, parse_axes
from nfold.bench.sweep import CellRun
from nfold.cli.progress import (
    RemainingTime,
    SweepProgress,
    describe_cell,
    describe_measurement,
    describe_progress,
    format_short_duration,
)
from nfold.cli.terminal import LiveScreen, PlainScreen
from nfold.core.measurement import FailureCause
from nfold.core.plan import Plan
from nfold.launch.launch_spec import RunProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _turn(repeat: int = 0) -> CellRun:
    axes = parse_axes("digits", {"devices": "1,2"}, common=Plan())
    return CellRun(cell=build_grids([axes], machine(), lambda *_: None).cells[1], repeat=repeat)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (8.4, "8 s"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_short_duration(seconds) == text


def test_a_cell_is_called_by_what_varies_and_its_repeat() -> None:
    assert describe_cell(_turn()) == "digits · 2 devices"
    assert describe_cell(_turn(repeat=1)) == "digits · 2 devices · repeat 2"


def test_time_left_is_the_estimate_until_a_run_has_ended() -> None:
    clock = Clock()
    left = RemainingTime([10.0, 30.0], clock)
    assert left.estimate_s() == 40
    clock.now += 4
    assert left.estimate_s() == 36


def test_time_left_is_set_right_by_how_long_runs_took() -> None:
    clock = Clock()
    left = RemainingTime([10.0, 30.0, 0.0], clock)
    clock.now += 20
    left.record_finished()
    assert left.estimate_s() == 60
    clock.now += 25
    assert left.estimate_s() == 35
    clock.now += 100
    assert left.estimate_s() == 0


def test_time_left_without_estimates_is_nothing() -> None:
    left = RemainingTime([0.0, 0.0], Clock())
    left.record_finished()
    assert left.estimate_s() == 0


def test_an_outcome_is_a_rate_or_a_cause() -> None:
    assert "images/s" in describe_measurement(measurement(workload="digits", rate=12_000))
    failed = measurement(
        workload="digits", status="oom", cause=FailureCause(text="no \x1b[2J memory"), ranks=()
    )
    assert describe_measurement(failed) == "oom: no \\x1b[2J memory"


def test_a_finished_cell_is_one_plain_line() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlainScreen(stream) as screen:
        events = SweepProgress(screen, RemainingTime([10.0, 30.0], clock))
        events.cell_started(_turn())
        events.progress(RunProgress(phase="stepping", step=1, total=2))
        clock.now += 10
        failed = measurement(
            workload="digits", status="hung", cause=FailureCause(text="planted"), ranks=()
        )
        events.cell_finished(_turn(), failed)
    line = stream.getvalue()
    assert line == "[1/2] digits · 2 devices: hung: planted (1:00, 30 s left)\n"


def test_a_glance_leaves_out_what_is_not_known() -> None:
    assert describe_progress(RunProgress(phase="starting", step=0, total=0)) == "starting"
    assert describe_progress(RunProgress(phase="stepping", step=7, total=0)) == "stepping · step 7"
    full = RunProgress(phase="stepping", step=7, total=9, samples_per_s=41_200.4, device_load=97.3)
    assert describe_progress(full) == "stepping · step 7/9 · 41,200 images/s · device load 97 %"


def test_a_terminal_has_a_live_line_that_goes_away_and_leaves_the_cursor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with LiveScreen(stream) as screen:
        events = SweepProgress(screen, RemainingTime([10.0], Clock()))
        events.cell_started(_turn())
        events.progress(RunProgress(phase="stepping", step=7, total=9, samples_per_s=41_200.0))
        events.cell_finished(_turn(), measurement(workload="digits", status="oom", ranks=()))
    shown = stream.getvalue()
    assert "1/1 cells · 10 s left · digits · 2 devices" in shown
    assert "step 7/9 · 41,200 images/s" in shown
    assert "[1/1] digits · 2 devices: oom" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
