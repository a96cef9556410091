"""Lines over the steps of a training: whole windows of all ranks, each told once."""

from __future__ import annotations

import io
from pathlib import Path

from nfold.cli.progress import CompletedWindow, StepProgress, completed_windows, format_steps
from nfold.cli.terminal import PlainScreen
from nfold.core.measurement import RankSamples, Window
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RunProgress

NOW = RunProgress(phase="stepping", step=1, total=10)


def _rank(rank: int, seconds: float, windows: int = 3) -> RankSamples:
    """Ten steps of warm-up with a loss and no window, then windows of ten steps."""
    return RankSamples(
        rank=rank,
        device=f"cpu:{rank}",
        windows=tuple(
            Window(start_s=float(k), seconds=seconds, steps=10, samples=320) for k in range(windows)
        ),
        losses=tuple((10 * k, 2.0 / k) for k in range(1, windows + 2)),
    )


def test_a_window_is_as_long_as_on_its_slowest_rank_and_holds_all_samples() -> None:
    found = completed_windows((_rank(0, 1.0), _rank(1, 2.0, windows=2)))
    assert [(w.step, w.steps, w.samples, w.seconds) for w in found] == [
        (20, 10, 640, 2.0),
        (30, 10, 640, 2.0),
    ]
    assert found[0].loss == 1.0


def test_ranks_without_a_window_have_none() -> None:
    assert completed_windows(()) == []
    assert completed_windows((_rank(0, 1.0), _rank(1, 1.0, windows=0))) == []


def test_a_line_joins_windows_weighting_losses_by_steps() -> None:
    windows = [CompletedWindow(10, 10, 640, 2.0, 1.0), CompletedWindow(40, 30, 1920, 6.0, 0.2)]
    assert format_steps(windows) == "step 40, loss 0.4, 320.0 images/s, 0.2 s/batch"


def test_lines_come_from_the_files_of_the_ranks_each_window_once(tmp_path: Path) -> None:
    stream, folder = io.StringIO(), HandoffFolder(tmp_path)
    with PlainScreen(stream) as screen:
        lines = StepProgress(screen, 20)
        lines.started(tmp_path)
        lines.progress(NOW)
        folder.reports.write_samples(_rank(0, 1.0, windows=1))
        lines.progress(NOW)
        assert stream.getvalue() == ""
        folder.reports.write_samples(_rank(0, 1.0, windows=2))
        lines.progress(NOW)
        lines.progress(NOW)
        assert stream.getvalue().startswith("step 30, loss ")
        lines.finished((_rank(0, 1.0, windows=3),))
    told = [line.split(",")[0] for line in stream.getvalue().splitlines()]
    assert told == ["step 30", "step 40"]


def test_nobody_who_did_not_ask_gets_a_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    HandoffFolder(tmp_path).reports.write_samples(_rank(0, 1.0))
    with PlainScreen(stream) as screen:
        lines = StepProgress(screen, 0)
        lines.started(tmp_path)
        lines.progress(NOW)
        lines.finished((_rank(0, 1.0),))
    assert stream.getvalue() == ""
