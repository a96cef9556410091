"""Environment variables and devices of a rank of a script. Imports no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from nfold.core.source_location import current_user_call
from nfold.engines.base import Task
from nfold.engines.rank_process import pin_to_cores
from nfold.instrument.hooks.patches import Patches

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
THREADS_VARIABLE = "OMP_NUM_THREADS"
HOST_VARIABLE, PORT_VARIABLE = "MASTER_ADDR", "MASTER_PORT"
SINGLE_RANK_PORTS = range(20000, 32000)
# Variables that torchrun sets in every rank.
TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    HOST_VARIABLE,
    PORT_VARIABLE,
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)
# host:port at which replicas, which have no common process group, can form one
RENDEZVOUS_VARIABLE = "NFOLD_MEETING"
LOOPBACK = "127.0.0.1"


class AffinityHook:
    """Records the line that last bound this process to cores, and the line of a package there."""

    def __init__(self) -> None:
        self.line: tuple[str | None, str | None] = (None, None)

    def install(self, patches: Patches) -> None:
        patches.wrap(os, "sched_setaffinity", self._set_affinity)

    def _set_affinity(self, original: Callable[..., None], pid: int, cores: Iterable[int]) -> None:
        self.line = current_user_call()
        original(pid, cores)


@contextmanager
def rank_environment(task: Task) -> Iterator[None]:
    """Set the environment of the script, and pin the process to the cores of a CPU device.

    A number of threads that the environment sets stays.
    """
    os.environ |= device_variables(task, os.environ.get(VISIBLE_DEVICES))
    if drives_all_devices(task):
        _unset(TORCHRUN_VARIABLES)
    elif has_own_world(task):
        os.environ[RENDEZVOUS_VARIABLE] = (
            f"{os.environ.get(HOST_VARIABLE)}:{os.environ.get(PORT_VARIABLE)}"
        )
        _unset(TORCHRUN_VARIABLES)
        os.environ |= single_rank_variables(_free_port())
    threads = task.variant.threads
    omp_threads = os.environ.get(THREADS_VARIABLE) if threads is None else str(threads)
    devices = _devices_per_process(task)
    pinned = task.variant.pinned
    with pin_to_cores(task.plan, device_index(task), devices) if pinned else nullcontext():
        if omp_threads is not None and devices == 1:
            os.environ[THREADS_VARIABLE] = omp_threads
        yield


def oversubscription_note(task: Task, threads: int) -> tuple[tuple[str, str], ...]:
    """Return a caveat if the script uses more threads than its CPU device has cores.

    A script may set the cores of the host divided by its ranks: too many on one device.
    """
    plan = task.plan
    cores = (plan.cores_per_device or 0) * _devices_per_process(task)
    if plan.device != "cpu" or task.variant.threads is not None or not 0 < cores < threads:
        return ()
    ranks = 1 if has_own_world(task) else task.world_size
    processes = f"each of {ranks} processes" if ranks > 1 else "a single process"
    text = (
        f"{processes} uses {threads} threads on {cores} core{'s' * (cores > 1)}; next: "
        f"torch.set_num_threads({cores}) or OMP_NUM_THREADS={cores}"
    )
    return (("many_threads", text),)


def computes_slice(task: Task) -> bool:
    """Return whether each rank gets the whole batch and computes a slice of it."""
    return task.replay_hints.slices_batches and not has_own_world(task)


def has_own_world(task: Task) -> bool:
    """Return whether the rank has a process group of its own, of size 1."""
    return task.world_size == 1 or task.variant.independent


def drives_all_devices(task: Task) -> bool:
    return task.plan.strategy == "dp"


def _devices_per_process(task: Task) -> int:
    return (task.plan.devices or 1) if drives_all_devices(task) else 1


def device_index(task: Task) -> int:
    return task.variant.device_of(task.rank, task.local_rank)


def device_variables(task: Task, visible_devices: str | None) -> dict[str, str]:
    """Return the variable with the GPUs that the script may use; nothing on CPU devices.

    A script may use all GPUs that it sees. Rank k drives the k-th of them.
    """
    if task.plan.device != "cuda":
        return {}
    count = task.plan.devices or 1
    if drives_all_devices(task):
        return {VISIBLE_DEVICES: _device_names(range(count), visible_devices)}
    if has_own_world(task):
        return {VISIBLE_DEVICES: _device_names([device_index(task)], visible_devices)}
    return {VISIBLE_DEVICES: _device_names(task.variant.devices or range(count), visible_devices)}


def single_rank_variables(port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for the only rank of a job."""
    zeros = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT")
    ones = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(zeros, "0"),
        **dict.fromkeys(ones, "1"),
        HOST_VARIABLE: LOOPBACK,
        PORT_VARIABLE: str(port),
        "TORCHELASTIC_RUN_ID": "nfold",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def _unset(names: Sequence[str]) -> None:
    for name in names:
        os.environ.pop(name, None)


def _device_names(indices: Sequence[int], visible_devices: str | None) -> str:
    names = visible_devices.split(",") if visible_devices else None
    return ",".join(names[index] if names else str(index) for index in indices)


def _free_port() -> int:
    """Return a free port. The script listens seconds later, so each process tries its own port
    first.

    The kernel assigns ports from 32768 on to other processes (ip(7)): not from this range.
    """
    for offset in range(len(SINGLE_RANK_PORTS)):
        port = SINGLE_RANK_PORTS[(os.getpid() + offset) % len(SINGLE_RANK_PORTS)]
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return port
    raise OSError(f"no port from {SINGLE_RANK_PORTS[0]} to {SINGLE_RANK_PORTS[-1]} is free")
