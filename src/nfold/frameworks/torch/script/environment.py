"""What a rank of a script finds in its environment: its world, its devices. Imports no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

from nfold.frameworks.base import Task
from nfold.frameworks.cores import claimed_cores

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
HOST, PORT = "MASTER_ADDR", "MASTER_PORT"
PORTS = range(20000, 32000)
"""Of which a rank that is alone in its world takes one."""
WORLD = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    HOST,
    PORT,
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)
"""What torchrun sets in every rank."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where PyTorch reads how its allocator works; the first that is there counts."""
EXPANDABLE = "expandable_segments"
MEETING = "NFOLD_MEETING"
"""Where copies of a script that know nothing of each other could meet: host and port."""
LOOPBACK = "127.0.0.1"


@contextmanager
def entered(task: Task) -> Iterator[None]:
    """The environment of this rank's script, and its cores where its devices are CPUs.

    The threads that the environment asks for already stay what they are.
    """
    os.environ |= environment(task, os.environ.get(VISIBLE))
    if task.left_out.expandable_segments:
        os.environ |= expandable(os.environ)
    if one_process(task):
        _forget(WORLD)
    elif alone(task):
        os.environ[MEETING] = f"{os.environ.get(HOST)}:{os.environ.get(PORT)}"
        _forget(WORLD)
        os.environ |= own_world(_free_port())
    threads = task.left_out.threads
    asked = os.environ.get(THREADS) if threads is None else str(threads)
    devices = _driven(task)
    pinned = task.left_out.pinned
    with claimed_cores(task.plan, device_index(task), devices) if pinned else nullcontext():
        if asked is not None and devices == 1:
            os.environ[THREADS] = asked
        yield


def crowded(task: Task, threads: int) -> tuple[tuple[str, str], ...]:
    """A note of a script that computes with more ``threads`` than its CPU devices have cores.

    It may set as many as the host's cores divided by its ranks: on one device that is more.
    """
    plan = task.plan
    cores = (plan.cores_per_device or 0) * _driven(task)
    if plan.device != "cpu" or task.left_out.threads is not None or not 0 < cores < threads:
        return ()
    ranks = 1 if alone(task) else task.world_size
    processes = f"each of {ranks} processes" if ranks > 1 else "a process by itself"
    text = (
        f"{processes} computes with {threads} threads on {cores} core{'s' * (cores > 1)}; next: "
        f"torch.set_num_threads({cores}) or OMP_NUM_THREADS={cores}"
    )
    return (("many_threads", text),)


def slices(task: Task) -> bool:
    """Whether this rank computes a part of batches that others get whole, too."""
    return task.learnt.slices and not alone(task)


def alone(task: Task) -> bool:
    """Whether this rank is the only one of its world."""
    return task.world_size == 1 or task.left_out.independent


def one_process(task: Task) -> bool:
    """Whether one process drives all devices, as ``python script`` would start it."""
    return task.plan.strategy == "dp"


def _driven(task: Task) -> int:
    """The devices that this process drives."""
    return (task.plan.devices or 1) if one_process(task) else 1


def device_index(task: Task) -> int:
    """Which of the plan's devices this rank drives."""
    left_out = task.left_out
    return left_out.device_of(task.rank, task.local_rank)


def environment(task: Task, visible: str | None) -> dict[str, str]:
    """Which GPUs the script sees, given those that this process sees; nothing on CPU devices.

    Exactly those of the plan: a script may use all that it sees. Rank k drives the k-th of them.
    """
    if task.plan.device != "cuda":
        return {}
    count = task.plan.devices or 1
    if one_process(task):
        return {VISIBLE: _named(range(count), visible)}
    if alone(task):
        return {VISIBLE: _named([device_index(task)], visible)}
    return {VISIBLE: _named(task.left_out.devices or range(count), visible)}


def expandable(environment: Mapping[str, str]) -> dict[str, str]:
    """The allocator's settings as they are, with segments that grow."""
    name = next((name for name in ALLOCATOR if name in environment), ALLOCATOR[0])
    said = [one.strip() for one in environment.get(name, "").split(",")]
    kept = [one for one in said if one and not one.startswith(EXPANDABLE)]
    return {name: ",".join([*kept, f"{EXPANDABLE}:True"])}


def own_world(port: int) -> dict[str, str]:
    """What torchrun would set for the only rank of a job."""
    zeros = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT")
    ones = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(zeros, "0"),
        **dict.fromkeys(ones, "1"),
        HOST: LOOPBACK,
        PORT: str(port),
        "TORCHELASTIC_RUN_ID": "nfold",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def _forget(names: Sequence[str]) -> None:
    for name in names:
        os.environ.pop(name, None)


def _named(indices: Sequence[int], visible: str | None) -> str:
    """GPUs by index among the visible ones, in CUDA's own form."""
    names = visible.split(",") if visible else None
    return ",".join(names[index] if names else str(index) for index in indices)


def _free_port() -> int:
    """One that nobody listens on, a process its own; the script comes to listen seconds later.

    So it is none of those that the kernel gives to whoever asks for any (from 32768 on, ip(7)).
    """
    for more in range(len(PORTS)):
        port = PORTS[(os.getpid() + more) % len(PORTS)]
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return port
    raise OSError(f"no port from {PORTS[0]} to {PORTS[-1]} is free")
