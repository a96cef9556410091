"""A rank's reports: at most once a second, but at once where an epoch has ended."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

import pytest

from nfold.core.measurement import Epoch, RankSamples
from nfold.core.script_profile import ScriptProfile
from nfold.engines.base import Phase
from nfold.launch import workload_process
from nfold.launch.handoff import HandoffFolder, RankReports

EPOCH = Epoch(seconds=1.0, samples=2, train_loss=0.5)


class Clock:
    """Monotonic seconds that a test sets; writing the samples takes ``writing_s``."""

    def __init__(self) -> None:
        self.now, self.writing_s = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(1e9 * self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(workload_process, "time", made)
    written = RankReports.write_samples

    def slowly(reports: RankReports, samples: RankSamples) -> None:
        written(reports, samples)
        made.now += made.writing_s

    monkeypatch.setattr(RankReports, "write_samples", slowly)
    return made


def _samples(epochs: int) -> RankSamples:
    return RankSamples(rank=0, device="cpu", epochs=(EPOCH,) * epochs)


def test_an_epoch_is_told_at_once_and_a_window_once_a_second(tmp_path: Path, clock: Clock) -> None:
    folder, observer = (
        HandoffFolder(tmp_path),
        workload_process.FolderObserver(HandoffFolder(tmp_path), rank=0),
    )
    observer.save(_samples(1))
    assert folder.reports.read_epochs() == ()
    observer.save(_samples(2), epoch_ended=True)
    assert len(folder.reports.read_epochs()) == 2
    clock.now += 1
    observer.save(_samples(3))
    assert len(folder.reports.read_epochs()) == 3
    observer.close()


def test_writing_takes_at_most_a_hundredth_of_short_epochs(tmp_path: Path, clock: Clock) -> None:
    folder, observer = (
        HandoffFolder(tmp_path),
        workload_process.FolderObserver(HandoffFolder(tmp_path), rank=0),
    )
    clock.writing_s = 0.005
    observer.save(_samples(1), epoch_ended=True)
    clock.now += 0.4
    observer.save(_samples(2), epoch_ended=True)
    assert len(folder.reports.read_epochs()) == 1
    clock.now += 0.2
    observer.save(_samples(3), epoch_ended=True)
    assert len(folder.reports.read_epochs()) == 3
    observer.close()


def test_a_rank_waits_for_the_others_steps_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_process, "AWAIT_TIMEOUT_S", 0.2)
    folder = HandoffFolder(tmp_path)
    first, second = (workload_process.FolderObserver(folder, rank, 2) for rank in (0, 1))
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", lambda _s: waited.append(time.monotonic()))
    first.wait_for_other_ranks(3)
    assert waited
    waited.clear()
    second.beat(Phase.STEPPING, 3)
    first.wait_for_other_ranks(3)
    second.beat(Phase.FINISHED, 1)
    first.wait_for_other_ranks(3)
    assert not waited
    first.save_profile(ScriptProfile(rank=0, steps=3))
    assert folder.reports.read_profiles() == (ScriptProfile(rank=0, steps=3),)
    first.close()
    second.close()


def test_a_failure_is_reported_before_its_traceback_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may be ended while a traceback reads source files."""
    folder, reported = HandoffFolder(tmp_path), list[str]()

    def print_traceback() -> None:
        reported.extend(failure.status for failure in folder.reports.read_failures())

    monkeypatch.setattr(traceback, "print_exc", print_traceback)
    monkeypatch.setenv("LOCAL_RANK", "no number")
    assert not workload_process.run_rank(folder, rank=0, world_size=1)
    assert reported == ["crashed"]
