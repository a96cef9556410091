"""What a rank of a script finds in its environment: its world, its devices. Imports no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

from nfold.engines.base import Task
from nfold.engines.rank_process import pin_to_cores

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
THREADS_VARIABLE = "OMP_NUM_THREADS"
HOST_VARIABLE, PORT_VARIABLE = "MASTER_ADDR", "MASTER_PORT"
SINGLE_RANK_PORTS = range(20000, 32000)
"""Of which a rank that is alone in its world takes one."""
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
"""What torchrun sets in every rank."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where PyTorch reads how its allocator works; the first that is there counts."""
EXPANDABLE = "expandable_segments"
RENDEZVOUS_VARIABLE = "NFOLD_MEETING"
"""Where copies of a script that know nothing of each other could meet: host and port."""
LOOPBACK = "127.0.0.1"


@contextmanager
def rank_environment(task: Task) -> Iterator[None]:
    """The environment of this rank's script, and its cores where its devices are CPUs.

    The threads that the environment asks for already stay what they are.
    """
    os.environ |= device_variables(task, os.environ.get(VISIBLE_DEVICES))
    if task.variant.expandable_segments:
        os.environ |= with_expandable_segments(os.environ)
    if drives_all_devices(task):
        _unset(TORCHRUN_VARIABLES)
    elif has_own_world(task):
        os.environ[RENDEZVOUS_VARIABLE] = (
            f"{os.environ.get(HOST_VARIABLE)}:{os.environ.get(PORT_VARIABLE)}"
        )
        _unset(TORCHRUN_VARIABLES)
        os.environ |= single_rank_variables(_free_port())
    threads = task.variant.threads
    asked = os.environ.get(THREADS_VARIABLE) if threads is None else str(threads)
    devices = _devices_per_process(task)
    pinned = task.variant.pinned
    with pin_to_cores(task.plan, device_index(task), devices) if pinned else nullcontext():
        if asked is not None and devices == 1:
            os.environ[THREADS_VARIABLE] = asked
        yield


def oversubscription_note(task: Task, threads: int) -> tuple[tuple[str, str], ...]:
    """A note of a script that computes with more ``threads`` than its CPU devices have cores.

    It may set as many as the host's cores divided by its ranks: on one device that is more.
    """
    plan = task.plan
    cores = (plan.cores_per_device or 0) * _devices_per_process(task)
    if plan.device != "cpu" or task.variant.threads is not None or not 0 < cores < threads:
        return ()
    ranks = 1 if has_own_world(task) else task.world_size
    processes = f"each of {ranks} processes" if ranks > 1 else "a process by itself"
    text = (
        f"{processes} computes with {threads} threads on {cores} core{'s' * (cores > 1)}; next: "
        f"torch.set_num_threads({cores}) or OMP_NUM_THREADS={cores}"
    )
    return (("many_threads", text),)


def computes_slice(task: Task) -> bool:
    """Whether this rank computes a part of batches that others get whole, too."""
    return task.replay_hints.slices_batches and not has_own_world(task)


def has_own_world(task: Task) -> bool:
    """Whether this rank is the only one of its world."""
    return task.world_size == 1 or task.variant.independent


def drives_all_devices(task: Task) -> bool:
    """Whether one process drives all devices, as ``python script`` would start it."""
    return task.plan.strategy == "dp"


def _devices_per_process(task: Task) -> int:
    return (task.plan.devices or 1) if drives_all_devices(task) else 1


def device_index(task: Task) -> int:
    """Which of the plan's devices this rank drives."""
    left_out = task.variant
    return left_out.device_of(task.rank, task.local_rank)


def device_variables(task: Task, visible_devices: str | None) -> dict[str, str]:
    """Which GPUs the script sees, given those that this process sees; nothing on CPU devices.

    Exactly those of the plan: a script may use all that it sees. Rank k drives the k-th of them.
    """
    if task.plan.device != "cuda":
        return {}
    count = task.plan.devices or 1
    if drives_all_devices(task):
        return {VISIBLE_DEVICES: _device_names(range(count), visible_devices)}
    if has_own_world(task):
        return {VISIBLE_DEVICES: _device_names([device_index(task)], visible_devices)}
    return {VISIBLE_DEVICES: _device_names(task.variant.devices or range(count), visible_devices)}


def with_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """The allocator's settings as they are, with segments that grow."""
    name = next(
        (name for name in ALLOCATOR_VARIABLES if name in environment), ALLOCATOR_VARIABLES[0]
    )
    said = [one.strip() for one in environment.get(name, "").split(",")]
    kept = [one for one in said if one and not one.startswith(EXPANDABLE)]
    return {name: ",".join([*kept, f"{EXPANDABLE}:True"])}


def single_rank_variables(port: int) -> dict[str, str]:
    """What torchrun would set for the only rank of a job."""
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
    """One that nobody listens on, a process its own; the script comes to listen seconds later.

    So it is none of those that the kernel gives to whoever asks for any (from 32768 on, ip(7)).
    """
    for more in range(len(SINGLE_RANK_PORTS)):
        port = SINGLE_RANK_PORTS[(os.getpid() + more) % len(SINGLE_RANK_PORTS)]
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return port
    raise OSError(f"no port from {SINGLE_RANK_PORTS[0]} to {SINGLE_RANK_PORTS[-1]} is free")
