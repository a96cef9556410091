"""Ranks that a script would start by ``torch.multiprocessing.spawn``: those that there are already.

Every rank of ours runs the script to that call, and there calls the function itself, with its own
index. The process group that the function makes is that of our ranks, whatever address and size
the script has in it: a run on one device has a world of one.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import Any

import torch.distributed as dist
from torch import multiprocessing
from torch.distributed import distributed_c10d
from torch.utils.data import DistributedSampler

from nfold.frameworks.base import Task
from nfold.frameworks.torch.script.environment import TORCHRUN_VARIABLES, drives_all_devices
from nfold.frameworks.torch.script.patches import Patches

SPAWN_FUNCTIONS = ("spawn", "start_processes")
RENDEZVOUS_ARGUMENTS = ("init_method", "rank", "world_size", "store")
"""Of ``init_process_group``: where ranks meet, and which of how many this one is."""


def install_spawn_hooks(task: Task, patches: Patches) -> None:
    """Put it in the place of what starts ranks; one process that drives all devices has none."""
    if drives_all_devices(task):
        return
    ranks = SpawnedRanks()
    for owner in (multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        for name in SPAWN_FUNCTIONS:
            patches.put(owner, name, ranks.wrap_spawn)
    for owner in (dist, distributed_c10d):
        patches.put(owner, "init_process_group", ranks.wrap_init_process_group)
    patches.put(DistributedSampler, "__init__", ranks.wrap_sampler_init)


class FinishedProcesses:
    """What ``spawn`` returns to a script that waits for its ranks itself."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    def join(self, *_: Any, **__: Any) -> bool:
        """All of them are through."""
        return True

    def pids(self) -> list[int]:
        """There are none."""
        return []


class SpawnedRanks:
    """This rank in the place of those that the script starts; until it does nothing is changed."""

    def __init__(self) -> None:
        self._torchrun_variables = {
            name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ
        }
        self._started = False

    def wrap_spawn(self, usual: Any) -> Any:
        """``spawn`` and ``start_processes``: the function is called here, once."""

        @functools.wraps(usual)
        def start(
            fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
        ) -> Any:
            self._started = True
            fn(int(self._torchrun_variables["LOCAL_RANK"]), *args)
            return None if join else FinishedProcesses()

        return start

    def wrap_init_process_group(self, usual: Any) -> Any:
        """``init_process_group``: the script's own place in its world does not count."""
        signature = inspect.signature(usual)

        @functools.wraps(usual)
        def join(*args: Any, **kwargs: Any) -> Any:
            if not self._started:
                return usual(*args, **kwargs)
            os.environ |= self._torchrun_variables
            told = signature.bind(*args, **kwargs)
            for name in RENDEZVOUS_ARGUMENTS:
                told.arguments.pop(name, None)
            return usual(*told.args, **told.kwargs)

        return join

    def wrap_sampler_init(self, usual: Any) -> Any:
        """DistributedSampler: into as many parts as there are ranks."""

        @functools.wraps(usual)
        def divide(
            sampler: Any, dataset: Any, num_replicas: Any = None, rank: Any = None, **more: Any
        ) -> None:
            if self._started and num_replicas is not None:
                num_replicas, rank = (
                    int(self._torchrun_variables["WORLD_SIZE"]),
                    int(self._torchrun_variables["RANK"]),
                )
            usual(sampler, dataset, num_replicas, rank, **more)

        return divide
