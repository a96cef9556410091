"""Some steps of a script under PyTorch's profiler: what no hook of ours can see.

Copies that do nothing but change the order of dimensions in memory (a permute that is written out,
cuDNN's own between channels_first and channels_last), how many kernels a step launches, how long
its device is busy. They follow on the steps that were asked for, in no window: a profiler costs
more than what it looks at.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
import traceback
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate, islice, pairwise, takewhile
from operator import itemgetter
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile, record_function

from nfold.core.measurement import HostGapKind, HostGapLocation
from nfold.core.script_profile import TraceSummary
from nfold.core.source_location import find_user_frame, frame_line, is_user_code, path_in_package

TRACED_STEPS = 6
"""Traced, after one that warms the profiler up."""
STEP_END_MARK = "nfold: a step ends"
TRANSPOSE_KERNELS = re.compile("nchwtonhwc|nhwctonchw|transpose", re.IGNORECASE)
"""Kernels of cuDNN's that are named for it."""
COMMUNICATION_KERNELS = re.compile("nccl", re.IGNORECASE)
"""Kernels in which a device waits for others."""
COPY_OPERATOR = "aten::copy_"
IMAGE_OPERATORS = re.compile(
    "convolution|upsample|pool|batch_?norm|group_?norm|grid_?sampl", re.IGNORECASE
)
"""Operators that take images in either order, and write them out in the other one where an operator
before them left them so."""
MATRIX_DIMENSIONS = 2
"""Dimensions of what a product may want the other way round."""
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_LAUNCH_GAP_US = 5.0
"""A kernel that begins so soon after the one before had been launched by then."""
MAX_TRACE_BYTES = 2**28
"""Bytes of a trace that is read: half a million operations, for which Python takes 1.5 GB."""
TraceEvent = Mapping[str, Any]
TimedSpan = tuple[float, float]
"""When the host began it, and how long it took, in microseconds."""


class ProfilerTrace:
    """The steps after the last one, where they were asked for."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._profile: profile | None = None
        self._remaining_steps = 1 + TRACED_STEPS

    @property
    def is_active(self) -> bool:
        """Whether steps are traced now."""
        return self._profile is not None

    def begin(self, *, cuda: bool) -> bool:
        """From the next step on; False where nobody asked for it, and under a profiler of the
        script's own: there is but one.
        """
        if not self._enabled or profiler._is_profiler_enabled:
            return False
        on_device = [ProfilerActivity.CUDA] if cuda else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device], record_shapes=True)
        self._profile.start()
        _mark_step_end()
        return True

    def on_step(self) -> bool:
        """One more; whether it was the last."""
        _mark_step_end()
        self._remaining_steps -= 1
        return self._remaining_steps == 0

    def take_summary(self) -> TraceSummary | None:
        """What the traced steps showed, told once; None where there were none."""
        if self._profile is None:
            return None
        stopped, self._profile = self._profile, None
        stopped.stop()
        return summarize(_load_events(stopped), cuda=ProfilerActivity.CUDA in stopped.activities)


def _mark_step_end() -> None:
    with record_function(STEP_END_MARK):
        pass


def _load_events(profiler_run: profile) -> list[TraceEvent]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler_run.export_chrome_trace(str(file))
        if file.stat().st_size > MAX_TRACE_BYTES:
            return []
        told: list[TraceEvent] = json.loads(file.read_text())["traceEvents"]
    return [event for event in told if "dur" in event]


def summarize(events: Sequence[TraceEvent], *, cuda: bool) -> TraceSummary | None:
    """Facts of the steps between marks, the first left out.

    None of fewer than three marks, and of a GPU that did not tell its kernels.
    """
    marks = sorted(
        float(e["ts"]) for e in events if e["name"] == STEP_END_MARK and _is_user_annotation(e)
    )
    steps = list(pairwise(marks[1:]))
    kernels = [e for e in events if e.get("cat") in DEVICE_CATEGORIES]
    if not steps or (cuda and not kernels):
        return None
    operations = {_external_id(e): e for e in events if e.get("cat") == "cpu_op"}
    reordering: list[TimedSpan]
    transposing: list[TimedSpan] = []
    if kernels:
        told = [(e, operations.get(_external_id(e), e)) for e in kernels]
        apart_us = _launch_gap_us(kernels)
        reordering = [
            (float(op["ts"]), e["dur"] + apart_us) for e, op in told if _is_layout_copy(op)
        ]
        transposing = [(float(op["ts"]), e["dur"]) for e, op in told if _is_cudnn_transpose(e)]
    else:
        reordering = [(float(e["ts"]), e["dur"]) for e in operations.values() if _is_layout_copy(e)]
    inside_operators = _inside_image_operators(reordering, operations.values())
    own = [e for e in kernels if not COMMUNICATION_KERNELS.search(e["name"])]
    begin, end = marks[1], marks[-1]
    inside = [e for e in own if begin <= float(operations.get(_external_id(e), e)["ts"]) < end]
    return TraceSummary(
        steps=len(steps),
        layout_copy_ms=tuple(_milliseconds_in(reordering, *step) for step in steps),
        operator_layout_copy_ms=tuple(_milliseconds_in(inside_operators, *step) for step in steps),
        cudnn_transpose_ms=_milliseconds_in(transposing, begin, end) / len(steps),
        launches_per_step=len(inside) / len(steps),
        device_busy_ms=_busy_us(inside) / 1e3 / len(steps) if kernels else None,
    )


def _is_user_annotation(event: TraceEvent) -> bool:
    return event.get("cat") == "user_annotation"


def _external_id(event: TraceEvent) -> Any:
    return event.get("args", {}).get("External id")


def _inside_image_operators(
    found: Iterable[TimedSpan], operations: Iterable[TraceEvent]
) -> list[TimedSpan]:
    spans = sorted(
        (float(e["ts"]), float(e["ts"]) + e["dur"])
        for e in operations
        if IMAGE_OPERATORS.search(e["name"])
    )
    begins = [begin for begin, _ in spans]
    ends = list(accumulate((end for _, end in spans), max))
    last = [(one, bisect_right(begins, one[0])) for one in found]
    return [one for one, place in last if place and one[0] < ends[place - 1]]


def _milliseconds_in(found: Sequence[TimedSpan], begin: float, end: float) -> float:
    return sum(taken for at, taken in found if begin <= at < end) / 1e3


def _is_cudnn_transpose(event: TraceEvent) -> bool:
    return event.get("cat") == "kernel" and bool(TRANSPOSE_KERNELS.search(event["name"]))


def _is_layout_copy(operation: TraceEvent) -> bool:
    told = operation.get("args", {})
    sizes, strides = told.get("Input Dims", ()), told.get("Input Strides", ())
    if (
        operation["name"] != COPY_OPERATOR
        or len(sizes) < 2
        or len(strides) < 2
        or sizes[0] != sizes[1]
    ):
        return False
    orders = [dimension_order(*pair) for pair in zip(sizes[:2], strides[:2], strict=True)]
    return None not in orders and orders[0] != orders[1]


def dimension_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Its dimensions from the outermost to the innermost; None of a matrix, or with gaps."""
    several = [place for place, size in enumerate(sizes) if size > 1]
    if len(several) <= MATRIX_DIMENSIONS:
        return None
    order = sorted(several, key=lambda place: -strides[place])
    dense = 1
    for place in reversed(order):
        if strides[place] != dense:
            return None
        dense *= sizes[place]
    return tuple(order)


def _launch_gap_us(kernels: Iterable[TraceEvent]) -> float:
    """Between a kernel and the next one that waits for it, in the middle: without one of them the
    device has that time too (1.4 µs on an H200, beside copies of 19 µs).
    """
    gaps = [
        after[0] - before[1]
        for spans in _by_device(kernels)
        for before, after in pairwise(spans)
        if 0 <= after[0] - before[1] < MAX_LAUNCH_GAP_US
    ]
    return median(gaps) if gaps else 0.0


def _busy_us(events: Iterable[TraceEvent]) -> float:
    total = 0.0
    for spans in _by_device(events):
        until = 0.0
        for begin, end in spans:
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
    return total


def _by_device(events: Iterable[TraceEvent]) -> list[list[tuple[float, float]]]:
    found: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        begin, device = float(event["ts"]), event.get("args", {}).get("device")
        found.setdefault(device, []).append((begin, begin + event["dur"]))
    return [sorted(spans) for spans in found.values()]


# Which lines of a script its host is at while it makes no step.
#
# Another thread looks at the stack of the one that trains, every few milliseconds and only then. A
# line that is seen there counts for the time since the look before: a sampling profiler (S. L.
# Graham, P. B. Kessler, M. K. McKusick, gprof: a call graph execution profiler, 1982). Nothing stands
# between the script and what it calls.

FINE_INTERVAL_S, COARSE_INTERVAL_S = 0.003, 0.02
"""From one look to the next: in steps that are not timed, and in those that are, which must take
no longer for it.
"""
LONG_GAP_FACTOR = 2.0
"""A pause that is more than so many times as long as the usual one comes after some steps only."""
MAX_SAMPLED_LINES = 4
"""Lines that are kept of each kind of pause."""
SAMPLER_THREAD_NAME = "nfold: whereabouts"
COLLECTIVE_MODULE = "torch.distributed.distributed_c10d"
"""Who is in there waits for other ranks: that is no work of its own."""
SampledLine = tuple[str, str | None]


class StackSampler:
    """Looks at the thread that made it, from ``start`` to ``stop``, between ``open`` and ``close``.

    ``timed`` says whether the steps are timed that are made now.
    """

    def __init__(self, is_timed: Callable[[], bool]) -> None:
        self._is_timed = is_timed
        self._thread = threading.get_ident()
        self._stop_event = threading.Event()
        self._loop_codes: dict[int, CodeType] = {}
        self._gap_start_s: float | None = None
        self._gap_samples = defaultdict[SampledLine, float](float)
        self._step_gaps: list[tuple[float, Mapping[SampledLine, float]]] = []
        self._epoch_gaps = defaultdict[SampledLine, float](float)

    def start(self) -> None:
        """From now on; the loop that trains is what has been called here."""
        codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
        self._loop_codes = {id(code): code for code in codes if is_user_code(code.co_filename)}
        threading.Thread(target=self._sample, name=SAMPLER_THREAD_NAME, daemon=True).start()

    def stop(self) -> None:
        """Look no more; a pause that is open is nobody's."""
        self._stop_event.set()
        self._gap_start_s = None

    def begin_gap(self) -> None:
        """A pause begins, unless it has."""
        if self._gap_start_s is None and not self._stop_event.is_set():
            self._gap_start_s = time.monotonic()

    def end_gap(self, *, at_epoch_boundary: bool) -> None:
        """It is over, if there is one; else it was after a step."""
        if self._gap_start_s is None:
            return
        seconds, self._gap_start_s = time.monotonic() - self._gap_start_s, None
        seen: Mapping[SampledLine, float] = {}
        if self._gap_samples:
            seen, self._gap_samples = self._gap_samples, defaultdict(float)
        if at_epoch_boundary:
            _add_seconds(self._epoch_gaps, seen)
        else:
            self._step_gaps.append((seconds, seen))

    @property
    def sampled_lines(self) -> tuple[HostGapLocation, ...]:
        """Where the pauses were spent that are over; of each kind the longest first."""
        usual, longer = (
            defaultdict[SampledLine, float](float),
            defaultdict[SampledLine, float](float),
        )
        usual_s = median(seconds for seconds, _ in self._step_gaps) if self._step_gaps else 0.0
        for seconds, seen in self._step_gaps:
            _add_seconds(longer if seconds > LONG_GAP_FACTOR * usual_s else usual, seen)
        return (
            *_most_sampled("after a step", usual),
            *_most_sampled("after some steps", longer),
            *_most_sampled("between passes", self._epoch_gaps),
        )

    def _sample(self) -> None:
        before = time.monotonic()
        while not self._stop_event.wait(COARSE_INTERVAL_S if self._is_timed() else FINE_INTERVAL_S):
            now, began_at = time.monotonic(), self._gap_start_s
            if began_at is not None:
                spot = sampled_line(sys._current_frames().get(self._thread), self._loop_codes)
                if spot is not None:
                    self._gap_samples[spot] += now - max(before, began_at)
            before = now


def sampled_line(frame: FrameType | None, loop_codes: Mapping[int, CodeType]) -> SampledLine | None:
    """The line of the loop, or what a package has called there, and what it calls.

    None where that is a collective, or no code of the user's.
    """
    if frame is None:
        return None
    own, calls = find_user_frame(frame)
    if own is None or _is_in_collective(frame, own):
        return None
    inner = ""
    for caller, _ in islice(traceback.walk_stack(own), 1, None):
        if id(own.f_code) in loop_codes:
            break
        if is_user_code(caller.f_code.co_filename):
            inner = own.f_code.co_name if own.f_code.co_name.isidentifier() else inner
            own, calls = caller, f"{inner}()" if inner else calls
        elif path_in_package(caller.f_code.co_filename):
            break
    return frame_line(own), calls


def _is_in_collective(frame: FrameType, own: FrameType) -> bool:
    within = takewhile(lambda pair: pair[0] is not own, traceback.walk_stack(frame))
    return any(one.f_globals.get("__name__") == COLLECTIVE_MODULE for one, _ in within)


def _add_seconds(to: dict[SampledLine, float], samples: Mapping[SampledLine, float]) -> None:
    for spot, seconds in samples.items():
        to[spot] += seconds


def _most_sampled(when: HostGapKind, spots: Mapping[SampledLine, float]) -> list[HostGapLocation]:
    most = nlargest(MAX_SAMPLED_LINES, spots.items(), key=itemgetter(1))
    return [
        HostGapLocation(kind=when, location=w, callee=c, seconds=round(s, 4)) for (w, c), s in most
    ]
