"""The way of conv2d's images to GPUs and back, by the number of chunks; a process a GPU.

    python benchmarks/conv2d_ways.py

Microseconds, medians of 60 calls that begin together: copies alone, with the convolution between
them, and for comparison the upload alone. The images are divided over 1, 2, 4, ... GPUs.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

import torch

from nfold.core.plan import Plan
from nfold.workloads.conv2d.problem import ConvTask
from nfold.workloads.conv2d.torch import TorchCudaDevice, TorchHostBuffers, to_tensor

IMAGES = 840
PARAMETERS = {"size": 100, "channels": 1, "filter": 3, "copy_only": 0}
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
WARM_UP, CALLS = 10, 60


def main() -> None:
    context = multiprocessing.get_context("spawn")
    gpus = torch.cuda.device_count()
    for world in (2**power for power in range(gpus.bit_length())):
        barrier, found = context.Barrier(world), context.Queue()
        asked = [(rank, IMAGES // world, barrier, found) for rank in range(world)]
        processes = [context.Process(target=rank_main, args=each) for each in asked]
        for process in processes:
            process.start()
        for rank, line in sorted(found.get(timeout=120) for _ in processes):
            print(f"{world} GPUs, {IMAGES // world} images each, rank {rank}: {line}", flush=True)
        for process in processes:
            process.join()


def rank_main(rank: int, images: int, barrier: Barrier, found: Queue[tuple[int, str]]) -> None:
    """Time everything on one GPU, together with the other ranks."""
    torch.cuda.set_device(rank)
    found.put((rank, " · ".join(timings(rank, images, barrier))))


def timings(rank: int, images: int, barrier: Barrier) -> Iterator[str]:
    """``8 chunks: copies 299, end to end 307`` for every number of chunks; the upload alone."""
    plan = Plan(batch=images, precision="fp32", layout="channels_first")
    task = ConvTask(
        parameters=PARAMETERS,
        plan=plan,
        rank=0,  # of a problem of its own: each rank convolves ``images`` images
        world_size=1,
        devices=[torch.device("cuda", rank)],
        barrier=lambda: None,
        beat=lambda done, planned: None,
    )
    made = to_tensor(task.problem.make_images(range(images)), plan)
    host = TorchHostBuffers(images=made, results=torch.empty_like(made)).pinned()

    def lane_of(count: int) -> TorchCudaDevice:
        lane = TorchCudaDevice(task, 0, host)
        edges = [place * images // count for place in range(count + 1)]
        lane.__dict__["_chunks"] = [slice(*pair) for pair in itertools.pairwise(edges)]
        return lane

    for count in COUNTS:
        lane = lane_of(count)
        copies, whole = (
            seconds(lane, barrier, partial(there_and_back, lane, host, copy_only))
            for copy_only in (True, False)
        )
        yield f"{count} chunks: copies {1e6 * copies:.0f}, end to end {1e6 * whole:.0f}"
    lane = lane_of(1)
    yield f"upload alone {1e6 * seconds(lane, barrier, partial(lane.upload, host)):.0f}"


def there_and_back(lane: TorchCudaDevice, host: TorchHostBuffers, copy_only: bool) -> None:
    for step in lane.round_trip(host, copy_only):
        step()


def seconds(lane: TorchCudaDevice, barrier: Barrier, call: Callable[[], None]) -> float:
    """The median of calls that all ranks begin together, each to its end."""
    times = []
    with lane.work():
        for _ in range(WARM_UP + CALLS):
            barrier.wait()
            start = time.perf_counter()
            call()
            lane.finish()
            times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


if __name__ == "__main__":
    main()
