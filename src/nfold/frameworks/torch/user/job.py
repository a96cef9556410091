"""The job that this process belongs to: torchrun's, nfold run's, or none."""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from nfold.errors import DevicesMissing
from nfold.frameworks.torch.user.rest import wait_for_idle_threads


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank of a job, and the device that it drives."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0


def join_job(device_type: str | None) -> Job:
    """Join the job that ``RANK`` and ``WORLD_SIZE`` name; without them, be alone.

    ``kind`` is ``cuda``, ``cpu`` or None for GPUs where there are any. A process group that
    exists already is used as it is. Raises DevicesMissing where this rank has no GPU.
    """
    rank, world_size = (int(os.environ.get(n, d)) for n, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    device = _open_device(
        device_type or ("cuda" if torch.cuda.is_available() else "cpu"), local_rank
    )
    if world_size > 1 and not dist.is_initialized():
        cuda = device.type == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
        _leave_at_exit()
    return Job(rank=rank, local_rank=local_rank, world_size=world_size, device=device)


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
    """When the script ends well, leave the process group of GPUs; let gloo's threads rest.

    A group of gloo's ends with its process: leaving it joins its threads only where nothing else,
    such as a DistributedDataParallel, refers to it (docs/decisions/process-launch.md). Not after an error: the others
    may be waiting in a collective, and leaving would wait for them. Ending the process lets them
    fail at once.
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
