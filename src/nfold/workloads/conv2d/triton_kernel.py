"""The convolution as a Triton kernel with one read and one write of device memory.

A thread computes one column of ``rows`` results. It loads each value of its input column once and
adds it to up to ``filter`` sums in registers; values of neighbouring columns come from the L1
cache. Columns are numbered over all images, so that no thread is idle if the width is not a
multiple of the block. Sums are fp32, never tf32.

Needs Triton; ``torch.py`` works without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

WARP = 32
MAX_UNROLLED = 5  # filters up to this width are unrolled: more loads in flight
MAX_FILTER = 16  # a thread's registers; wider filters use cuDNN
INDEX_LIMIT = 2**31  # offsets are 32 bits


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Result rows and channels per thread, and warps per block."""

    rows: int
    outs: int
    warps: int

    @property
    def name(self) -> str:
        channels = "" if self.outs == 1 else f" × {self.outs} channels"
        return f"Triton, {self.rows} rows{channels} a thread, {self.warps} warps"


def kernel_configs(channels: int) -> tuple[KernelConfig, ...]:
    few, many = _divisor(channels, 5), _divisor(channels, 10)
    one = ((10, 1, 4), (10, 1, 8), (5, 1, 8), (20, 1, 4))
    several = ((10, few, 4), (5, few, 4), (5, many, 4), (10, _divisor(channels, 2), 4))
    configs = dict.fromkeys(one if channels == 1 else several)
    return tuple(KernelConfig(rows=rows, outs=outs, warps=warps) for rows, outs, warps in configs)


def _divisor(number: int, limit: int) -> int:
    return max(n for n in range(1, min(number, limit) + 1) if number % n == 0)


def supports(images: Tensor, filters: Tensor) -> bool:
    contiguous = images.is_contiguous() and filters.is_contiguous()
    return contiguous and images.numel() < INDEX_LIMIT and filters.shape[-1] <= MAX_FILTER


def launcher(config: KernelConfig) -> Callable[..., Tensor]:
    """Return a function that correlates images [n, c, h, w] with filters [c out, c, k, k] into out.

    ``backwards`` starts with the last images, which a previous convolution left in the L2 cache.
    """

    def launch(images: Tensor, filters: Tensor, out: Tensor, *, backwards: bool = False) -> Tensor:
        count, channels, height, width = images.shape
        outs, size = filters.shape[0], filters.shape[-1]
        columns, block = count * width, WARP * config.warps
        tiles = triton.cdiv(height, config.rows) * (outs // config.outs)
        correlate[(tiles * triton.cdiv(columns, block),)](
            images,
            filters,
            out,
            columns,
            height=height,
            width=width,
            channels=channels,
            outs=outs,
            size=size,
            rows=config.rows,
            own=config.outs,
            block=block,
            unroll=size <= MAX_UNROLLED,
            backwards=backwards,
            num_warps=config.warps,
        )
        return out

    return launch


@triton.jit(
    do_not_specialize=["columns"],
    do_not_specialize_on_alignment=["images", "filters", "out"],
)
def correlate(
    images: tl.tensor,
    filters: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    outs: tl.constexpr,
    size: tl.constexpr,
    rows: tl.constexpr,
    own: tl.constexpr,
    block: tl.constexpr,
    unroll: tl.constexpr,
    backwards: tl.constexpr,
) -> None:
    """Compute ``rows`` × ``own`` results in each of ``block`` columns.

    Programs that share input rows are adjacent, so that the rows are in the L2 cache.
    """
    groups: tl.constexpr = outs // own
    tiles: tl.constexpr = (height + rows - 1) // rows
    program = tl.program_id(0)
    if backwards:
        program = tl.num_programs(0) - 1 - program
    out_channel = program % groups * own
    row = program // groups % tiles * rows
    lane = program // (groups * tiles) * block + tl.arange(0, block)
    image, column, mine = lane // width, lane % width, lane < columns
    place = row * width + column
    source = images + (image * (channels * height * width) + place - size // 2 * (width + 1))
    taps = filters + out_channel * (channels * size * size)
    sums = accumulate(
        source, taps, mine, row, column, height, width, channels, size, rows, own, block, unroll
    )
    target = out + (image * (outs * height * width) + out_channel * (height * width) + place)
    store(target, sums, mine, row, height, width, rows, own)


@triton.jit
def accumulate(
    source: tl.tensor,
    taps: tl.tensor,
    mine: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    size: tl.constexpr,
    rows: tl.constexpr,
    own: tl.constexpr,
    block: tl.constexpr,
    unroll: tl.constexpr,
) -> tl.tuple:
    """Compute all sums of a thread, by channel and filter column."""
    sums = ()
    for _ in tl.static_range(rows * own):
        sums = sums + (tl.zeros([block], tl.float32),)
    for _channel in range(channels):
        if unroll:
            for j in tl.static_range(size):
                values = load(source + j, mine, row, column + j, height, width, size, rows)
                sums = add(sums, values, taps + j, channels, size, rows, own)
        else:
            for j in range(size):
                values = load(source + j, mine, row, column + j, height, width, size, rows)
                sums = add(sums, values, taps + j, channels, size, rows, own)
        source += height * width
        taps += size * size
    return sums


@triton.jit
def load(
    source: tl.tensor,
    mine: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
    rows: tl.constexpr,
) -> tl.tuple:
    """Load the values under one filter column for all rows; zeros outside of the image.

    ``column`` counts from the padding's left edge. If ``rows`` divides the height, the rows of
    results are inside the image and need no test.
    """
    before: tl.constexpr = size // 2
    inside = mine & (column >= before) & (column < width + before)
    values = ()
    for r in tl.static_range(rows + size - 1):
        if height % rows == 0 and r >= before and r < before + rows:
            value = tl.load(source + r * width, mask=inside, other=0.0)
        else:
            y = row + (r - before)
            value = tl.load(source + r * width, mask=inside & (y >= 0) & (y < height), other=0.0)
        values = values + (value.to(tl.float32),)
    return values


@triton.jit
def add(
    sums: tl.tuple,
    values: tl.tuple,
    taps: tl.tensor,
    channels: tl.constexpr,
    size: tl.constexpr,
    rows: tl.constexpr,
    own: tl.constexpr,
) -> tl.tuple:
    more = ()
    for o in tl.static_range(own):
        column = ()
        for i in tl.static_range(size):
            tap = tl.load(taps + (o * channels * size * size + i * size))
            column = column + (tap.to(tl.float32),)
        for q in tl.static_range(rows):
            total = sums[o * rows + q]
            for i in tl.static_range(size):
                total += values[q + i] * column[i]
            more = more + (total,)
    return more


@triton.jit
def store(
    target: tl.tensor,
    sums: tl.tuple,
    mine: tl.tensor,
    row: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    own: tl.constexpr,
) -> None:
    kind = target.dtype.element_ty
    for o in tl.static_range(own):
        for q in tl.static_range(rows):
            place = target + (o * height * width + q * width)
            if height % rows == 0:
                tl.store(place, sums[o * rows + q].to(kind), mask=mine)
            else:
                tl.store(place, sums[o * rows + q].to(kind), mask=mine & (row + q < height))
