"""What goes into the folder comes out, whole or not at all."""

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from made import task
from nfold.api import HeartbeatObserver
from nfold.core.measurement import Epoch, RankSamples
from nfold.core.script_profile import ScriptProfile
from nfold.core.serialization import deserialize
from nfold.core.workload import Workload
from nfold.engines.base import Observer, Phase
from nfold.launch.handoff import HandoffFolder, HeartbeatRecord, HeartbeatWriter, RankFailure
from nfold.launch.launch_spec import ProcessSpec, RankGroup, RunOptions
from nfold.launch.supervisor import Supervisor
from nfold.launch.workload_process import FolderObserver


def test_a_task_comes_out_as_it_went_in(tmp_path: Path) -> None:
    folder = HandoffFolder(tmp_path / "measurement")
    asked = task(rank=1, world_size=2, workload="wide_resnet:depth=10,width=1")
    assert not folder.has_task()
    folder.write_task(asked)
    assert folder.read_task(rank=1, local_rank=1, world_size=2) == asked


def test_where_training_is_kept_reaches_the_rank(tmp_path: Path) -> None:
    asked = dataclasses.replace(task(), checkpoint="kept/run-1", checkpoint_every=3)
    folder = HandoffFolder(tmp_path)
    folder.write_task(asked)
    assert folder.read_task(rank=0, local_rank=0, world_size=1) == asked


def test_secret_arguments_reach_ranks_and_are_removed(tmp_path: Path) -> None:
    script = Workload(name="train.py", script=("train.py", "--api-token", "s3cret"))
    folder, asked = HandoffFolder(tmp_path), dataclasses.replace(task(), workload=script)
    folder.write_task(asked)
    group = RankGroup(processes=2, command=("python", "train.py", "--key=s3cret"))
    folder.agent.write_group(group)
    text = "unrecognized arguments: --api-token s3cret"
    folder.reports.write_failure(RankFailure(rank=0, status="crashed", text=text))
    private = [file for file in tmp_path.iterdir() if "s3cret" in file.read_text()]
    assert {file.name for file in private} == {"arguments.json", "group.json"}
    assert {file.stat().st_mode & 0o777 for file in private} == {0o600}
    assert folder.read_task(rank=0, local_rank=0, world_size=1) == asked
    assert deserialize(RankGroup, folder.agent.read_group()) == group
    folder.remove_secrets()
    assert not any("s3cret" in file.read_text() for file in tmp_path.iterdir())
    assert folder.agent.read_group()["command"] == ["python", "train.py", "--key=***"]


def test_a_task_without_secrets_is_one_file(tmp_path: Path) -> None:
    script = Workload(name="train.py", script=("train.py", "--lr", "0.1"))
    HandoffFolder(tmp_path).write_task(dataclasses.replace(task(), workload=script))
    assert [file.name for file in tmp_path.iterdir()] == ["task.json"]


def test_finished_epochs_are_seen_from_outside(tmp_path: Path) -> None:
    folder, epoch = HandoffFolder(tmp_path), Epoch(seconds=1.0, samples=2, train_loss=0.5)
    assert folder.reports.read_epochs() == ()
    assert folder.reports.samples_mtime_ns() == 0
    folder.reports.write_samples(RankSamples(rank=0, device="cpu", epochs=(epoch, epoch)))
    assert folder.reports.read_epochs() == (epoch, epoch)
    assert folder.reports.samples_mtime_ns() > 0


def test_a_beat_is_seen_at_once_from_outside(tmp_path: Path) -> None:
    folder = HandoffFolder(tmp_path)
    assert folder.reports.read_heartbeat(0) is None
    heart = HeartbeatWriter(folder.reports.heartbeat_file(0), pid=123)
    first = folder.reports.read_heartbeat(0)
    assert first is not None
    assert (first.pid, first.phase, first.step) == (123, Phase.STARTING, 0)
    heart.beat(Phase.STEPPING, 7, 100, 42)
    second = folder.reports.read_heartbeat(0)
    assert second is not None
    assert (second.phase, second.step, second.total) == (Phase.STEPPING, 7, 100)
    assert second.monotonic_ns == 42
    heart.close()


@pytest.mark.parametrize("make", [FolderObserver, HeartbeatObserver])
def test_beats_carry_the_monotonic_clock_of_the_supervisor(
    tmp_path: Path, make: Callable[[HandoffFolder, int], Observer]
) -> None:
    folder, begin = HandoffFolder(tmp_path), time.monotonic_ns()
    observer = make(folder, 0)
    first = folder.reports.read_heartbeat(0)
    observer.beat(Phase.STEPPING, 1)
    second = folder.reports.read_heartbeat(0)
    assert first is not None
    assert second is not None
    assert begin <= first.monotonic_ns <= second.monotonic_ns <= time.monotonic_ns()


def test_silence_is_measured_on_the_monotonic_clock(tmp_path: Path) -> None:
    spec = ProcessSpec(command=(), environment={}, processes=1)
    supervisor = Supervisor(HandoffFolder(tmp_path), spec, RunOptions(results=tmp_path))
    beat = HeartbeatRecord(1, Phase.STEPPING, 1, 2, time.monotonic_ns() - 2 * 10**9)
    assert 2 <= supervisor._silence_s(beat) < 60


def test_samples_are_ordered_by_rank_and_replaced_whole(tmp_path: Path) -> None:
    folder = HandoffFolder(tmp_path)
    for rank in (10, 2):
        folder.reports.write_samples(RankSamples(rank=rank, device="cpu"))
    folder.reports.write_samples(RankSamples(rank=2, device="cpu", first_step_ms=1.5))
    found = folder.reports.read_samples()
    assert [samples.rank for samples in found] == [2, 10]
    assert found[0].first_step_ms == 1.5
    assert not list(tmp_path.glob(".*"))


def test_what_another_version_saw_of_a_script_is_nothing(tmp_path: Path) -> None:
    folder, seen = HandoffFolder(tmp_path), ScriptProfile(steps=40, rank=1)
    folder.reports.write_profile(seen)
    assert folder.reports.read_profiles() == (seen,)
    file = tmp_path / "seen-1.json"
    file.write_text(file.read_text().replace('"steps"', '"steps_then"'))
    assert folder.reports.read_profiles() == ()


def test_the_earliest_failure_comes_first(tmp_path: Path) -> None:
    folder = HandoffFolder(tmp_path)
    folder.reports.write_failure(
        RankFailure(rank=0, status="crashed", text="later", monotonic_ns=2)
    )
    folder.reports.write_failure(RankFailure(rank=1, status="oom", text="first", monotonic_ns=1))
    assert [failure.text for failure in folder.reports.read_failures()] == ["first", "later"]


def test_exit_codes(tmp_path: Path) -> None:
    folder = HandoffFolder(tmp_path)
    assert folder.agent.read_exit_codes() == {}
    folder.agent.write_exit_codes({0: -15, 1: -9})
    assert folder.agent.read_exit_codes() == {0: -15, 1: -9}


def test_a_reader_never_sees_half_a_beat(tmp_path: Path) -> None:
    """Every field that a reader sees is one that was written, at any moment."""
    folder = HandoffFolder(tmp_path)
    heart = HeartbeatWriter(folder.reports.heartbeat_file(0), pid=123)
    heart.beat(Phase.STEPPING, 1, 1000, 1)
    done = threading.Event()

    def write() -> None:
        step = 1
        while not done.is_set():
            step += 1
            heart.beat(Phase.STEPPING, step, 1000, step)

    writer = threading.Thread(target=write)
    writer.start()
    beats = [folder.reports.read_heartbeat(0) for _ in range(5000)]
    done.set()
    writer.join()
    heart.close()
    assert all(beat is not None for beat in beats)
    assert {(beat.pid, beat.phase, beat.total) for beat in beats if beat} == {
        (123, Phase.STEPPING, 1000)
    }
    assert all(beat.monotonic_ns >= 1 and beat.step >= 1 for beat in beats if beat)
