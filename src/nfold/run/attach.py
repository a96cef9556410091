"""Running inside a job that torchrun, Slurm or anything else started: join it, launch nothing."""

from __future__ import annotations

import hashlib
import os
import time

import psutil

from nfold.frameworks.base import Phase, Task
from nfold.run.handoff import HandoffFolder
from nfold.run.options import RunOptions
from nfold.run.supervise import POLL_S, TreeExit
from nfold.run.worker import run_rank


def in_external_job() -> bool:
    """Whether RANK and WORLD_SIZE say that this process is a rank of a running job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def external_rank() -> int:
    """This process's rank in the job; 0 where there is no job."""
    return int(os.environ.get("RANK", "0"))


def external_world_size() -> int:
    """The number of processes in the job; 1 where there is no job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def job_id() -> str:
    """Six hex digits that all ranks of the job agree on, and that another job does not have.

    torchrun's default run id and port are the same in every job; on one node, the process that
    started the ranks tells jobs apart.
    """
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT")
    said = [os.environ.get(name, "") for name in names]
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        starter = psutil.Process(os.getppid())
        said.append(f"{starter.pid} {starter.create_time()}")
    return hashlib.sha256("|".join(said).encode()).hexdigest()[:6]


def run_external_rank(folder: HandoffFolder, task: Task, options: RunOptions) -> TreeExit:
    """Run this process's rank of the task; rank 0 also waits for what the others measured.

    The ranks share the folder: one node, or a file system that every node sees.
    """
    if external_rank() == 0:
        folder.write_task(task)
    elif not _wait_for_task(folder, options):
        raise TimeoutError(f"rank 0 left no task in {folder.path}: do all ranks see that folder?")
    ended_well = run_rank(folder, external_rank(), external_world_size())
    if external_rank() == 0:
        return _wait_for_others(folder, options, ended_well)
    return TreeExit(exit_code=0 if ended_well else 1)


def _wait_for_task(folder: HandoffFolder, options: RunOptions) -> bool:
    deadline = time.monotonic() + options.start_timeout_s
    while not folder.has_task() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return folder.has_task()


def _wait_for_others(folder: HandoffFolder, options: RunOptions, ended_well: bool) -> TreeExit:
    deadline = time.monotonic() + options.hang_timeout_s
    waiting = set(range(1, external_world_size()))
    while waiting and time.monotonic() < deadline:
        failed = {failure.rank for failure in folder.read_failures()}
        waiting = {other for other in waiting - failed if not _finished(folder, other)}
        time.sleep(POLL_S)
    if waiting:
        beat = folder.read_heartbeat(min(waiting))
        return TreeExit(hung=(min(waiting), beat.step if beat else 0))
    return TreeExit(exit_code=0 if ended_well and not folder.read_failures() else 1)


def _finished(folder: HandoffFolder, other: int) -> bool:
    beat = folder.read_heartbeat(other)
    return beat is not None and beat.phase == Phase.FINISHED
