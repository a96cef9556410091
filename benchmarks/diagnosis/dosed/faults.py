"""Costs of a known size, put into a script from outside (rota.py).

Every key is a cause, every value its dose in milliseconds a step. What is counted in something
else (all-reduces, bytes, permutes) is timed in this process first, so that a dose is
milliseconds here and now, unless an earlier process has settled it (settled.py). On a GPU a dose
of device time keeps the device busy, not the host. ``undivided-work`` and ``threads`` are switches,
``host-syncs`` and ``memory`` are counts: what they cost is measured by running the script without
them.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from ballast import Ballast
from busy import busy, spin
from calibrate import count_for, empty_bytes, repeat, timed
from exchanges import link, nothing, synchronization
from rota import EVERY, doses
from settled import settled
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler, Sampler

SLOW_RANK = 1
SHORTEST_MS = 1.0
"""Of a sleep."""
PIECE_BYTES = 1 << 22
"""Of pageable memory, some tenths of a millisecond."""
PERMUTED = {"cpu": (16, 64, 8, 8), "cuda": (64, 64, 32, 32)}
"""The tensor that is permuted: 256 KiB on a CPU, 16 MiB on a GPU."""


class SlowData(Dataset[Any]):
    """A data set that takes so many milliseconds more for each sample."""

    def __init__(self, data: Any, sample_ms: float) -> None:
        self._data = data
        self._sample_ms = sample_ms

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        spin(self._sample_ms)
        return self._data[index]


class Disk(Dataset[Any]):
    """A data set whose samples come at so many bytes a millisecond, and no core is busy meanwhile.

    A token bucket without credit: what nobody asked for in time is not there later. Short waits
    are saved up, because a sleep is late by some tenths of a millisecond.
    """

    def __init__(self, data: Any, bytes_per_ms: float) -> None:
        self._data = data
        self._bytes_per_ms = bytes_per_ms
        self._due_ms = 0.0

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        sample = self._data[index]
        self._due_ms += sample_bytes(sample) / self._bytes_per_ms
        if self._due_ms >= SHORTEST_MS:
            begin = time.perf_counter()
            time.sleep(self._due_ms / 1e3)
            self._due_ms -= (time.perf_counter() - begin) * 1e3
        return sample


def sample_bytes(sample: Any) -> int:
    """Of its tensors."""
    return sum(part.nbytes for part in sample if isinstance(part, Tensor))


def data(given: Any, batch: int) -> Dataset[Any]:
    """The data set, slower for a batch of one device: by ``input`` milliseconds of a busy core,
    by ``storage`` milliseconds of waiting for a disk of the speed that takes.
    """
    asked = doses()
    if "storage" in asked:
        given = Disk(given, sample_bytes(given[0]) * batch / asked["storage"])
    return SlowData(given, asked["input"] / batch) if "input" in asked else given


def sampler(given: Any) -> Sampler[int]:
    """A rank's part of a data set; all of it, in the same order, under ``undivided-work``."""
    if "undivided-work" in doses() or not dist.is_initialized():
        return DistributedSampler(given, num_replicas=1, rank=0)
    return DistributedSampler(given)


def stay(workers: int) -> bool:
    """Whether workers live from epoch to epoch: their start is the dose of ``epoch-boundary``."""
    return workers > 0 and "epoch-boundary" not in doses()


def start_worker(batches: int) -> Callable[[int], None] | None:
    """A worker's start that is late by ``epoch-boundary`` for each of an epoch's batches."""
    dose = doses().get("epoch-boundary", 0.0)
    if not dose:
        return None
    return lambda _: time.sleep(dose * batches / 1e3)


def between(batches: int, workers: int) -> Callable[[], None]:
    """What comes before every pass: a pause of rank 0 under ``pass-0``, and of all ranks under
    ``epoch-boundary`` where no workers start late.
    """
    dose = 0.0 if workers else doses().get("epoch-boundary", 0.0)
    dose += doses().get("pass-0", 0.0) if _is_first() else 0.0
    return lambda: time.sleep(dose * batches / 1e3)


def after_steps(device: torch.device) -> Callable[[], None]:
    """What is called after every step, and does nothing after most: an evaluation, in short.

    A dose every k steps comes as k of it at once. On a GPU its device is busy with it, and the
    host waits for what comes of it; not under ``host-work``, which only the host has.
    """
    made = 0

    def after_step() -> None:
        nonlocal made
        made += 1
        for cause, dose in doses().items():
            if cause == "host-work":
                time.sleep(dose / 1e3)
            every = EVERY.get(cause)
            if every and made % every == 0 and (_is_first() or "all" in cause):
                _evaluate(dose * every, device)

    return after_step


def _is_first() -> bool:
    """Whether this is rank 0; one device alone is."""
    return int(os.environ.get("RANK", "0")) == 0


def _evaluate(dose_ms: float, device: torch.device) -> None:
    if device.type == "cpu":
        time.sleep(dose_ms / 1e3)
        return
    busy(dose_ms, device)
    torch.cuda.synchronize(device)


def threads() -> None:
    """Under ``threads`` every rank computes with as many threads as there are cores."""
    if "threads" in doses():
        torch.set_num_threads(os.cpu_count() or 1)


def plant(module: nn.Module) -> nn.Module:
    """Everything that costs something in a step, before the forward pass of every step."""
    steps = Steps()
    module.register_forward_pre_hook(lambda made, given: steps(made, given[0]))
    return module


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A batch on the device; with it ``copies`` milliseconds of pageable memory.

    What is on the device already brings nothing along.
    """
    dose = doses().get("copies", 0.0)
    if dose and tensor.device.type != device.type:
        _carry(dose, device)
    return tensor.to(device, non_blocking=True)


def _carry(dose_ms: float, device: torch.device) -> None:
    """Copy piece after piece of pageable memory, for so long.

    So many bytes would take longer in one process than in another, by the core and the memory that
    they start from: 18 ms by the script's own clock were 31 where it was explained. The first piece
    waits for what the device was given before.
    """
    piece = _piece()
    piece.to(device)
    end = time.perf_counter() + dose_ms / 1e3
    while time.perf_counter() < end:
        piece.to(device)


@cache
def _piece() -> Tensor:
    return empty_bytes(PIECE_BYTES)


class Steps:
    """The faults of every step of a rank; each is calibrated when it comes first, on its device."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, float, torch.device], Callable[[], None]] = {}

    def __call__(self, module: nn.Module, given: Tensor) -> None:
        if not module.training:
            return
        for cause, dose in doses().items():
            if cause in MADE:
                self._act(cause, dose, given.device)

    def _act(self, cause: str, dose: float, device: torch.device) -> None:
        asked = (cause, dose, device)
        if asked not in self._made:
            self._made[asked] = MADE[cause](dose, device)
        self._made[asked]()


def _imbalance(dose_ms: float, device: torch.device, slow: int = SLOW_RANK) -> Callable[[], None]:
    """One rank is slow; under nn.DataParallel the device of that number."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ["RANK"]) if ranks > 1 else (device.index or 0)
    return (lambda: busy(dose_ms, device)) if rank == slow else nothing


def _layout(dose_ms: float, device: torch.device) -> Callable[[], None]:
    """So many permutes, each written out."""
    tensor = torch.zeros(PERMUTED[device.type], device=device)

    def permute() -> None:
        tensor.permute(0, 2, 3, 1).contiguous()

    count = settled("layout", dose_ms, lambda: count_for(dose_ms, timed(permute, device)))
    return lambda: repeat(permute, count)


def _host_syncs(dose: float, device: torch.device) -> Callable[[], None]:
    """So many readings of a value on the device."""
    tensor = torch.zeros((), device=device)
    return lambda: repeat(tensor.item, round(dose))


MADE: dict[str, Callable[[float, torch.device], Callable[[], None]]] = {
    "imbalance": _imbalance,
    "imbalance-0": functools.partial(_imbalance, slow=0),
    "synchronization": synchronization,
    "link": link,
    "layout": _layout,
    "host-syncs": _host_syncs,
    "memory": Ballast,
}
