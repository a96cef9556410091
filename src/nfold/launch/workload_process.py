"""One rank of a workload: ``python -m nfold.launch.workload_process FOLDER``.

RANK, LOCAL_RANK and WORLD_SIZE are set as by torchrun. Only the standard library is imported before
the first heartbeat.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

from nfold.core.child_process import die_with_parent, name_process
from nfold.core.errors import MachineUnfit
from nfold.core.fingerprint import module_file
from nfold.core.measurement import Caveat, RankSamples
from nfold.core.script_profile import ScriptProfile
from nfold.core.source_location import error_location
from nfold.engines.base import Observer, Phase, Task, get_framework
from nfold.launch.handoff import HandoffFolder, HeartbeatRecord, HeartbeatWriter
from nfold.launch.rank_lifecycle import (
    build_failure,
    exit_after_handlers,
    exit_without_cleanup,
    kill_children,
    redirect_output,
    stacks_on_signal,
    stopped_children,
)
from nfold.launch.rank_terminal import open_terminal, provide_terminal_size
from nfold.sandbox import clean_up, enter_view, guard_view
from nfold.sandbox import enter_sandbox as enter_sandbox_folder
from nfold.sandbox.overlay import ENTERED, PER_RANK, SHARED, STATE_VARIABLE


def enter_sandbox(task: Task, folder: HandoffFolder) -> Task:
    """Enter the sandbox of a script's run; returns the task with the script's path there.

    Ranks share a sandbox as they share the working directory; independent ranks have their own.
    """
    if not task.workload.script:
        return task
    name = f"-{task.rank}" if task.variant.independent else ""
    if os.environ.get(STATE_VARIABLE) in (SHARED, PER_RANK):
        enter_view(folder.sandbox, name)
    if os.environ.get(STATE_VARIABLE) == ENTERED:
        guard_view(folder.sandbox)
        return task
    module, original_folder = task.workload.module, os.getcwd()
    sandbox = enter_sandbox_folder(folder.sandbox, name)
    path, *arguments = task.workload.script
    if module is None:
        path = sandbox.prepare_script(path)
    elif (file := module_file(module, original_folder)) is not None:
        sandbox.prepare_script(file)
    workload = dataclasses.replace(task.workload, script=(path, *arguments))
    return dataclasses.replace(task, workload=workload)


def settle_sandbox(folder: HandoffFolder) -> list[Caveat]:
    """Restore files and delete the sandbox; returns what was written and what is not restored.

    Raises MachineUnfit if the script was not allowed to change a file.
    """
    report = clean_up(folder.sandbox)
    if report.refusal is not None:
        raise MachineUnfit(report.refusal)
    written = [Caveat(kind="would_have_written", text=str(report))] if report.files else []
    return written + [Caveat(kind="not_undone", text=text) for text in report.restore_errors]


RANK_NAME = "nfold rank"  # beginning of the name of its process
IDLE_TIMEOUT_S = 3.0
IDLE_POLL_S = 0.1
IDLE_CORE_SHARE = 0.2  # CPU times have a resolution of 10 ms


def wait_for_idle_children(
    limit_s: float = IDLE_TIMEOUT_S, meanwhile: Callable[[], None] = lambda: None
) -> float:
    """Wait until the child processes use almost no CPU time, at most ``limit_s`` seconds.

    Calls ``meanwhile`` after each poll. Returns the seconds waited.
    """
    workers = psutil.Process().children(recursive=True)
    begin = time.perf_counter()
    at, used = begin, _used_s(workers)
    while workers and at - begin < limit_s:
        time.sleep(IDLE_POLL_S)
        meanwhile()
        before, at = at, time.perf_counter()
        used_before, used = used, _used_s(workers)
        if used - used_before <= IDLE_CORE_SHARE * (at - before) and not any(
            map(_is_runnable, workers)  # a busy host may leave it no core
        ):
            break
    return at - begin


def _is_runnable(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_RUNNING)
    return False


def _used_s(processes: list[psutil.Process]) -> float:
    found = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
    return found


SAVE_EVERY_S = 1.0
MAX_EPOCH_SHARE = 0.01  # of an epoch: time to write the samples at its end
AWAIT_TIMEOUT_S = 120.0  # for independent ranks, and for the samples of all ranks
AWAIT_POLL_S = 0.02
SLICE_POLL_S = 0.005


class FolderObserver(Observer):
    """Writes heartbeats and, at most once a second, samples to the folder of the measurement.

    Samples are also written at the end of an epoch, if this takes at most 1 % of the epoch.
    """

    def __init__(self, folder: HandoffFolder, rank: int, world_size: int = 1) -> None:
        self._folder = folder
        self._is_first = rank == 0
        self._others = frozenset(range(world_size)) - {rank}
        self._heart = HeartbeatWriter(folder.reports.heartbeat_file(rank), os.getpid())
        self._saved = self._epoch_saved = time.monotonic()
        self._took_s = 0.0
        self._unwritten: RankSamples | None = None
        self.step = 0

    def beat(self, phase: Phase, step: int, total: int = 0) -> None:
        self.step = step
        self._heart.beat(phase, step, total, time.monotonic_ns())

    def save(self, samples: RankSamples, *, epoch_ended: bool = False) -> None:
        now, self._unwritten = time.monotonic(), samples
        rare = epoch_ended and now - self._epoch_saved >= self._took_s / MAX_EPOCH_SHARE
        if rare or now - self._saved >= SAVE_EVERY_S:
            self.flush_samples()
            self._saved = time.monotonic()
            self._took_s = self._saved - now
            self._epoch_saved = self._saved if epoch_ended else self._epoch_saved

    def flush_samples(self) -> None:
        """Write the last samples, if they are not written yet."""
        if self._unwritten is not None:
            self._folder.reports.write_samples(self._unwritten)
            self._unwritten = None

    def save_profile(self, profile: ScriptProfile) -> None:
        self._folder.reports.write_profile(profile)

    def wait_for_other_ranks(self, step: int) -> None:
        self._await(
            lambda beat: beat.step >= step or beat.phase == Phase.FINISHED,
            meanwhile=lambda: self.beat(Phase.STEPPING, self.step),
        )

    def wait_for_slice(self, number: int) -> None:
        slices = self._folder.slices
        if self._is_first:
            slices.write_done(number)
        with stopped_children():  # else loader workers would load batches meanwhile
            while slices.read_allowed() <= number:
                self.beat(Phase.STEPPING, self.step)
                time.sleep(SLICE_POLL_S)

    def wait_for_idle_children(self) -> None:
        wait_for_idle_children(meanwhile=lambda: self.beat(Phase.STEPPING, self.step))

    def exit_process(self, samples: RankSamples) -> NoReturn:
        """Write the samples, wait for those of all other ranks, and exit without cleanup.

        An early exit would make ranks fail that still communicate with this one.
        """
        self._folder.reports.write_samples(samples)
        self.beat(Phase.FINISHED, self.step)
        self._await(lambda beat: beat.phase == Phase.FINISHED)
        kill_children()
        exit_without_cleanup(0)

    def _await(
        self, come: Callable[[HeartbeatRecord], bool], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        deadline = time.monotonic() + AWAIT_TIMEOUT_S
        while time.monotonic() < deadline:
            beats = {rank: self._folder.reports.read_heartbeat(rank) for rank in self._others}
            if all(beat is not None and come(beat) for beat in beats.values()):
                return
            meanwhile()
            time.sleep(AWAIT_POLL_S)

    def close(self) -> None:
        self._heart.close()


def main() -> None:
    die_with_parent()
    folder = HandoffFolder(Path(sys.argv[1]).absolute())
    rank = int(os.environ["RANK"])
    name_process(f"{RANK_NAME} {rank}")
    redirect_output(folder.rank_log(rank))
    open_terminal()
    provide_terminal_size()
    with stacks_on_signal(folder.stack_file(rank)):
        ended_well = run_rank(folder, rank, int(os.environ["WORLD_SIZE"]))
    if ended_well:
        exit_after_handlers()
    exit_without_cleanup(1)


def run_rank(folder: HandoffFolder, rank: int, world_size: int) -> bool:
    """Run one rank in this process; returns False if it failed, after writing its RankFailure."""
    observer = FolderObserver(folder, rank, world_size)
    try:
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        task = folder.read_task(rank=rank, local_rank=local_rank, world_size=world_size)
        task = enter_sandbox(task, folder)
        folder.reports.write_samples(get_framework(task.plan.framework).run_rank(task, observer))
        observer.beat(Phase.FINISHED, observer.step)
    except Exception as error:
        # First, as the run may be ended while the traceback reads source files.
        folder.reports.write_failure(
            build_failure(error, rank, observer.step, error_location(error))
        )
        traceback.print_exc()
        observer.flush_samples()
        return False
    finally:
        observer.close()
    return True


if __name__ == "__main__":
    main()
