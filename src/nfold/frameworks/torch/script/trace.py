"""Some steps of a script under PyTorch's profiler: what no hook of ours can see.

Copies that do nothing but change the order of dimensions in memory (a permute that is written out,
cuDNN's own between channels_first and channels_last), how many kernels a step launches, how long
its device is busy. They follow on the steps that were asked for, in no window: a profiler costs
more than what it looks at.
"""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile, record_function

from nfold.seen import Traced

STEPS = 6
"""Traced, after one that warms the profiler up."""
STEP_ENDS = "nfold: a step ends"
TRANSPOSING = re.compile("nchwtonhwc|nhwctonchw|transpose", re.IGNORECASE)
"""Kernels of cuDNN's that are named for it."""
ELSEWHERE = re.compile("nccl", re.IGNORECASE)
"""Kernels in which a device waits for others."""
COPY = "aten::copy_"
ON_IMAGES = re.compile(
    "convolution|upsample|pool|batch_?norm|group_?norm|grid_?sampl", re.IGNORECASE
)
"""Operators that take images in either order, and write them out in the other one where an operator
before them left them so."""
MATRIX = 2
"""Dimensions of what a product may want the other way round."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
NEXT_US = 5.0
"""A kernel that begins so soon after the one before had been launched by then."""
LARGEST_READ = 2**28
"""Bytes of a trace that is read: half a million operations, for which Python takes 1.5 GB."""
Event = Mapping[str, Any]
Taken = tuple[float, float]
"""When the host began it, and how long it took, in microseconds."""


class Tracing:
    """The steps after the last one, where they were asked for."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._profile: profile | None = None
        self._left = 1 + STEPS

    @property
    def on(self) -> bool:
        """Whether steps are traced now."""
        return self._profile is not None

    def begin(self, *, cuda: bool) -> bool:
        """From the next step on; False where nobody asked for it, and under a profiler of the
        script's own: there is but one.
        """
        if not self._wanted or profiler._is_profiler_enabled:
            return False
        on_device = [ProfilerActivity.CUDA] if cuda else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device], record_shapes=True)
        self._profile.start()
        _step_ends()
        return True

    def stepped(self) -> bool:
        """One more; whether it was the last."""
        _step_ends()
        self._left -= 1
        return self._left == 0

    def found(self) -> Traced | None:
        """What the traced steps showed, told once; None where there were none."""
        if self._profile is None:
            return None
        stopped, self._profile = self._profile, None
        stopped.stop()
        return read(_events(stopped), cuda=ProfilerActivity.CUDA in stopped.activities)


def _step_ends() -> None:
    with record_function(STEP_ENDS):
        pass


def _events(stopped: profile) -> list[Event]:
    """What the profiler exports: the only place where it tells strides. Nothing of too many."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        stopped.export_chrome_trace(str(file))
        if file.stat().st_size > LARGEST_READ:
            return []
        told: list[Event] = json.loads(file.read_text())["traceEvents"]
    return [event for event in told if "dur" in event]


def read(events: Sequence[Event], *, cuda: bool) -> Traced | None:
    """Facts of the steps between marks, the first left out.

    None of fewer than three marks, and of a GPU that did not tell its kernels.
    """
    marks = sorted(float(e["ts"]) for e in events if e["name"] == STEP_ENDS and _on_host(e))
    steps = list(pairwise(marks[1:]))
    kernels = [e for e in events if e.get("cat") in ON_DEVICE]
    if not steps or (cuda and not kernels):
        return None
    operations = {_number(e): e for e in events if e.get("cat") == "cpu_op"}
    reordering: list[Taken]
    transposing: list[Taken] = []
    if kernels:
        told = [(e, operations.get(_number(e), e)) for e in kernels]
        apart_us = _apart_us(kernels)
        reordering = [(float(op["ts"]), e["dur"] + apart_us) for e, op in told if _reorders(op)]
        transposing = [(float(op["ts"]), e["dur"]) for e, op in told if _transposes(e)]
    else:
        reordering = [(float(e["ts"]), e["dur"]) for e in operations.values() if _reorders(e)]
    inside_operators = _within(reordering, operations.values())
    own = [e for e in kernels if not ELSEWHERE.search(e["name"])]
    begin, end = marks[1], marks[-1]
    inside = [e for e in own if begin <= float(operations.get(_number(e), e)["ts"]) < end]
    return Traced(
        steps=len(steps),
        reordering_ms=tuple(_between(reordering, *step) for step in steps),
        in_operators_ms=tuple(_between(inside_operators, *step) for step in steps),
        transposing_ms=_between(transposing, begin, end) / len(steps),
        launches=len(inside) / len(steps),
        busy_ms=_union(inside) / 1e3 / len(steps) if kernels else None,
    )


def _on_host(event: Event) -> bool:
    return event.get("cat") == "user_annotation"


def _number(event: Event) -> Any:
    """What a kernel shares with the operation that launched it."""
    return event.get("args", {}).get("External id")


def _within(found: Iterable[Taken], operations: Iterable[Event]) -> list[Taken]:
    """Those that began while an operator on images, forward or backward, was computed."""
    spans = sorted(
        (float(e["ts"]), float(e["ts"]) + e["dur"])
        for e in operations
        if ON_IMAGES.search(e["name"])
    )
    begins = [begin for begin, _ in spans]
    ends = list(accumulate((end for _, end in spans), max))
    last = [(one, bisect_right(begins, one[0])) for one in found]
    return [one for one, place in last if place and one[0] < ends[place - 1]]


def _between(found: Sequence[Taken], begin: float, end: float) -> float:
    """Milliseconds of what begins in between, of pairs of its begin and its length."""
    return sum(taken for at, taken in found if begin <= at < end) / 1e3


def _transposes(event: Event) -> bool:
    """Whether it is a kernel of cuDNN's own that changes nothing but the order of dimensions."""
    return event.get("cat") == "kernel" and bool(TRANSPOSING.search(event["name"]))


def _reorders(operation: Event) -> bool:
    """Whether it is a copy after which nothing but the order of dimensions is another."""
    told = operation.get("args", {})
    sizes, strides = told.get("Input Dims", ()), told.get("Input Strides", ())
    if operation["name"] != COPY or len(sizes) < 2 or len(strides) < 2 or sizes[0] != sizes[1]:
        return False
    orders = [order_of(*pair) for pair in zip(sizes[:2], strides[:2], strict=True)]
    return None not in orders and orders[0] != orders[1]


def order_of(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Its dimensions from the outermost to the innermost; None of a matrix, or with gaps."""
    several = [place for place, size in enumerate(sizes) if size > 1]
    if len(several) <= MATRIX:
        return None
    order = sorted(several, key=lambda place: -strides[place])
    dense = 1
    for place in reversed(order):
        if strides[place] != dense:
            return None
        dense *= sizes[place]
    return tuple(order)


def _apart_us(kernels: Iterable[Event]) -> float:
    """Between a kernel and the next one that waits for it, in the middle: without one of them the
    device has that time too (1.4 µs on an H200, beside copies of 19 µs).
    """
    gaps = [
        after[0] - before[1]
        for spans in _by_device(kernels)
        for before, after in pairwise(spans)
        if 0 <= after[0] - before[1] < NEXT_US
    ]
    return median(gaps) if gaps else 0.0


def _union(events: Iterable[Event]) -> float:
    """Microseconds in which any of these runs, added up over devices."""
    total = 0.0
    for spans in _by_device(events):
        until = 0.0
        for begin, end in spans:
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
    return total


def _by_device(events: Iterable[Event]) -> list[list[tuple[float, float]]]:
    """When each began and ended in microseconds, in their order, device by device."""
    found: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        begin, device = float(event["ts"]), event.get("args", {}).get("device")
        found.setdefault(device, []).append((begin, begin + event["dur"]))
    return [sorted(spans) for spans in found.values()]
