"""What a person sees while a workload is trained."""

from __future__ import annotations

import io
from pathlib import Path

from nfold.cli.progress import EpochProgress, StepTimer, format_epoch
from nfold.cli.terminal import LiveScreen, PlainScreen
from nfold.core.measurement import Epoch, RankSamples
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RunProgress

EPOCH = Epoch(seconds=3.21, samples=10, train_loss=0.5119, accuracy=0.84208)


def _at(step: int) -> RunProgress:
    return RunProgress(phase="stepping", step=step, total=100, samples_per_s=1234.0)


def test_the_line_of_an_epoch() -> None:
    assert format_epoch(3, 10, EPOCH) == "epoch 3/10: loss 0.512, accuracy 0.8421, 3.2 s"


def test_every_epoch_is_told_once_also_those_that_nobody_saw_ending(tmp_path: Path) -> None:
    stream, folder = io.StringIO(), HandoffFolder(tmp_path)
    with PlainScreen(stream) as screen:
        lines = EpochProgress(screen, 4, before=1)
        lines.started(tmp_path)
        lines.progress(_at(1))
        folder.reports.write_samples(RankSamples(rank=0, device="cpu", epochs=(EPOCH,) * 2))
        lines.progress(_at(2))
        lines.progress(_at(3))
        lines.finished((EPOCH,) * 4)
        lines.finished(())
    told = [line.split(":")[0] for line in stream.getvalue().splitlines()]
    assert told == ["epoch 2/4", "epoch 3/4", "epoch 4/4"]


def test_time_left_follows_the_steps_that_were_seen() -> None:
    now = [10.0]
    pace = StepTimer(lambda: now[0])
    assert pace.remaining_s(_at(0)) is None
    assert pace.remaining_s(_at(40)) is None
    now[0] = 14.0
    assert pace.remaining_s(_at(60)) == 8.0
    assert pace.remaining_s(RunProgress(phase="finished", step=100, total=0)) == 0


def test_on_a_terminal_the_lines_stay_above_the_live_one(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with LiveScreen(stream) as screen:
        lines = EpochProgress(screen, 2)
        lines.started(tmp_path)
        lines.progress(_at(10))
        lines.finished((EPOCH,))
    assert "epoch 1/2: loss 0.512" in stream.getvalue()
    assert "1,234 images/s" in stream.getvalue()
