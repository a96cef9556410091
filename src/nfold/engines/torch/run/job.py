"""The job that a script's process belongs to, its plan, and its end."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from nfold.core.errors import DevicesMissing, MachineUnfit, UsageError
from nfold.core.plan import Plan
from nfold.engines.plan_rules import first_broken_rule
from nfold.engines.torch.communication.data_parallel import join_process_group
from nfold.engines.torch.torch_rules import script_rules

THREADS_FOLDER = Path("/proc/self/task")
POLL_S = 0.002
MAX_WAIT_S = 1.0
QUIET_POLLS = 2
LAUNCH_ADVICE = "next: nfold run SCRIPT, or unset RANK and WORLD_SIZE for one device"


def wait_for_idle_threads(max_wait_s: float = MAX_WAIT_S) -> bool:
    """Sleep until no other thread of this process has run between two polls.

    A gloo thread that frees a tensor made in Python needs the GIL; requesting it while Python ends
    aborts the process (PyTorch 2.13; docs/decisions/process-launch.md). Returns False if threads are
    busy after ``max_wait_s`` seconds, or cannot be inspected (not Linux).
    """
    until = time.monotonic() + max_wait_s
    before, quiet = _thread_activity(), 0
    while quiet < QUIET_POLLS and time.monotonic() < until:
        time.sleep(POLL_S)
        now = _thread_activity()
        quiet = quiet + 1 if now is not None and now == before else 0
        before = now
    return quiet == QUIET_POLLS


def _thread_activity() -> dict[str, str] | None:
    own = str(threading.get_native_id())
    activity = {}
    if not THREADS_FOLDER.exists():
        return None
    for task in THREADS_FOLDER.iterdir():
        if task.name == own:
            continue
        state, ran = _read_text(task / "stat"), _read_text(task / "schedstat")
        if state.rpartition(")")[2].split()[:1] in (["R"], ["D"]):
            return None
        activity[task.name] = ran
    return activity


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Job:
    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def join_job(device_type: str | None) -> Job:
    """Join the job that ``RANK`` and ``WORLD_SIZE`` describe; without them, a job of one rank.

    ``device_type`` is ``cuda``, ``cpu`` or None: GPUs if there are any. Uses an existing process
    group. Raises DevicesMissing if this rank has no GPU, MachineUnfit if a variable names no rank.
    """
    rank, world_size = _read_variable("RANK", 0), _read_variable("WORLD_SIZE", 1)
    if rank >= world_size:
        raise MachineUnfit(
            f"RANK={rank} in the environment: allowed are ranks below WORLD_SIZE={world_size}; "
            f"{LAUNCH_ADVICE}"
        )
    local_rank = _read_variable("LOCAL_RANK", rank)
    device = _open_device(
        device_type or ("cuda" if torch.cuda.is_available() else "cpu"), local_rank
    )
    if world_size > 1 and not dist.is_initialized():
        join_process_group(device)
        _leave_at_exit()
    return Job(rank=rank, local_rank=local_rank, world_size=world_size, device=device)


def _read_variable(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise MachineUnfit(
            f"{name}={value!r} in the environment: allowed are whole numbers from 0; {LAUNCH_ADVICE}"
        )
    return int(value)


def _open_device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise DevicesMissing(
            f"rank {local_rank} of this node needs a GPU of its own, {count} exist here; "
            f"next: --nproc-per-node {max(1, count)}"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _leave_at_exit() -> None:
    """Destroy a process group of GPUs when the script ends without an error; let gloo's threads end.

    A gloo group ends with its process: destroying it joins its threads only if nothing else, such as
    a DistributedDataParallel, refers to it (docs/decisions/process-launch.md). After an error other
    ranks may wait in a collective, and destroying the group would wait for them: ending the process
    lets them fail at once.
    """
    failed: list[bool] = []
    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        failed.append(True)
        return before(kind, error, trace)

    def leave() -> None:
        if failed or not dist.is_initialized():
            return
        if dist.get_backend() == "gloo":
            wait_for_idle_threads()
        else:
            dist.destroy_process_group()

    sys.excepthook = note
    atexit.register(leave)


def complete_run_plan(plan: Plan, job: Job, *, is_automatic: bool = False) -> Plan:
    """Return the plan with all fields that act in a script set. Raises UsageError.

    Fields that change numbers (bf16, compression) keep their defaults. ``is_automatic`` leaves
    ``step`` open, to be chosen in the first steps; not for fp16, whose loss scale the host reads,
    and not beside a search for the micro-batches or a sharded optimizer.
    """
    plan = plan.edit(device=job.device.type)
    if reason := first_broken_rule(script_rules(plan, job.world_size)):
        raise UsageError(reason)
    precision = plan.precision or "fp32"
    is_open = precision != "fp16" and (plan.memory, plan.optimizer_state) == ("fixed", "whole")
    tensor_cores = plan.device == "cuda" and precision != "fp32"
    return plan.edit(
        devices=job.world_size,
        precision=precision,
        layout=plan.layout or ("channels_last" if tensor_cores else "channels_first"),
        step=plan.step or (None if is_automatic and is_open else "eager"),
        workers=plan.workers or 0,
    )
