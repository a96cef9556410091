"""Every way to convolve on one GPU, beside a plain copy of the same bytes.

    python benchmarks/conv2d_kernel.py [--wide]

Microseconds per call, each from one replay of a CUDA graph of 20 calls (the least of 5 replays):
``cold`` over images that take turns and do not fit into the L2 cache together, ``warm`` over the
same images again and again, ``chain`` with each call convolving the results of the one before.
GB/s are those of ``cold``, one read and one write counted; the ratio is to the copy's time.
``--wide`` times more cuts of the kernel for the first problem.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nfold.workloads.conv2d import triton_kernel
from nfold.workloads.conv2d.problem import TOLERANCES
from nfold.workloads.conv2d.torch import ConvMethod, candidates, capture_graph

CALLS = 20
REPLAYS = 5
CACHES = 4
"""The images that take turns are together this many times the L2 cache."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    images: int
    size: int
    channels: int
    filter: int

    def __str__(self) -> str:
        square = f"{self.size} × {self.size} × {self.channels}"
        return f"{self.images} images of {square}, filter {self.filter}"


SHAPES = (
    Shape(images=840, size=100, channels=1, filter=3),
    Shape(images=210, size=100, channels=1, filter=3),
    Shape(images=84, size=400, channels=1, filter=3),
    Shape(images=840, size=100, channels=1, filter=5),
    Shape(images=840, size=100, channels=1, filter=10),
    Shape(images=84, size=100, channels=10, filter=3),
)
WIDE = tuple(
    triton_kernel.KernelConfig(rows=rows, outs=1, warps=warps)
    for rows, warps in itertools.product((4, 5, 10, 20, 25, 50), (1, 2, 4, 8, 16))
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--wide", action="store_true")
    wide = parser.parse_args().wide
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", flush=True)
    began = time.monotonic()
    with torch.cuda.stream(torch.cuda.Stream()):
        for place, shape in enumerate(SHAPES):
            measure(shape, WIDE if wide and place == 0 else ())
    print(f"\n{time.monotonic() - began:.0f} s")


def measure(shape: Shape, more: tuple[triton_kernel.KernelConfig, ...]) -> None:
    """Print a table: the copy, cuDNN, and every variant each compared with cuDNN."""
    sets = list(rotation(shape))
    filters = torch.randn(shape.channels, shape.channels, shape.filter, shape.filter).cuda()
    filters /= filters.abs().sum(dim=(1, 2, 3), keepdim=True)
    moved = 2 * sets[0][0].nbytes
    print(f"\n{shape}: {moved / 1e6:.1f} MB, {len(sets)} sets\n{'':44}    cold    warm   chain")
    floor = show("copy", copy, filters, sets, moved, None)
    ways = candidates(sets[0][0], filters)
    ways |= {each.name: triton_kernel.launcher(each) for each in more}
    images, out = sets[0]
    expected = ways["cuDNN"](images, filters, out).clone()
    for name, method in ways.items():
        try:
            gap = (method(images, filters, out) - expected).abs().max().item()
        except Exception as error:
            print(f"{name:44} {type(error).__name__}: {error}", flush=True)
            continue
        show(name, method, filters, sets, moved, floor)
        if not gap < TOLERANCES["fp32"] * expected.abs().max().item():
            print(f"{'':44} WRONG by {gap:.3g}")


def rotation(shape: Shape) -> Iterator[tuple[Tensor, Tensor]]:
    """Sets of images and results."""
    images = torch.rand(shape.images, shape.channels, shape.size, shape.size, device="cuda")
    cache = torch.cuda.get_device_properties(images.device).L2_cache_size
    for _ in range(max(2, -(-CACHES * cache // (2 * images.nbytes)))):
        yield images.clone(), torch.empty_like(images)


def copy(images: Tensor, filters: Tensor, out: Tensor, *, backwards: bool = False) -> Tensor:
    return out.copy_(images)


def show(
    name: str,
    method: ConvMethod,
    filters: Tensor,
    sets: list[tuple[Tensor, Tensor]],
    moved: int,
    floor: float | None,
) -> float:
    """Print a row; the seconds per call with a cold cache."""
    turns = list(itertools.islice(itertools.cycle(sets), CALLS))
    cold = seconds(partial(over, method, filters, turns))
    warm = seconds(partial(over, method, filters, [sets[0]] * CALLS))
    chain = seconds(partial(chained, method, filters, sets[0][0], sets[1]))
    times = "".join(f"{1e6 * each:8.2f}" for each in (cold, warm, chain))
    ratio = "" if floor is None else f", {cold / floor:.2f} × copy"
    print(f"{name:44}{times} µs  {moved / cold / 1e9:5.0f} GB/s{ratio}", flush=True)
    return cold


def over(method: ConvMethod, filters: Tensor, turns: list[tuple[Tensor, Tensor]]) -> Tensor:
    for images, out in turns[:-1]:
        method(images, filters, out)
    images, out = turns[-1]
    return method(images, filters, out)


def chained(
    method: ConvMethod, filters: Tensor, images: Tensor, buffers: tuple[Tensor, Tensor]
) -> Tensor:
    out, spare = buffers
    for number in range(CALLS):
        images = method(images, filters, out, backwards=number % 2 == 1)
        out, spare = spare, out
    return images


def seconds(calls: Callable[[], Tensor]) -> float:
    """Per call, the least of a few replays."""
    calls()
    graph, _ = capture_graph(calls)
    least = float("inf")
    for _ in range(1 + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / 1e3)
    return least / CALLS


if __name__ == "__main__":
    main()
