"""PyTorch's profiler over some steps, and a stack sampler for the time between steps.

The trace shows what hooks cannot: copies that only change the order of dimensions (of a permute, or
of cuDNN between channels_first and channels_last), kernel launches, and device time. The traced
steps come after the measured ones, because a profiler slows them down.
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

from torch.profiler import ProfilerActivity, profile, record_function

from nfold.core.measurement import STARTS_WORKERS, HostGapKind, HostGapLocation
from nfold.core.script_profile import TraceSummary
from nfold.core.source_location import find_user_frame, frame_line, is_user_code, path_in_package
from nfold.instrument import torch_private

TRACED_STEPS = 6  # after one step that warms the profiler up
STEP_END_MARK = "nfold: a step ends"
TRANSPOSE_KERNELS = re.compile("nchwtonhwc|nhwctonchw|transpose", re.IGNORECASE)  # kernels of cuDNN
COMMUNICATION_KERNELS = re.compile("nccl", re.IGNORECASE)  # kernels that wait for other devices
COPY_OPERATOR = "aten::copy_"
# Operators that accept images in either order, and copy those in the other order.
IMAGE_OPERATORS = re.compile(
    "convolution|upsample|pool|batch_?norm|group_?norm|grid_?sampl", re.IGNORECASE
)
MATRIX_DIMENSIONS = 2  # matrix products may need a transposed operand
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_LAUNCH_GAP_US = 5.0  # a kernel that begins earlier had been launched before
MAX_TRACE_BYTES = 2**28  # half a million events, which take 1.5 GB in Python
TraceEvent = Mapping[str, Any]
TimedSpan = tuple[float, float]  # begin on the host and duration, in µs


class ProfilerTrace:
    """Traces some steps after the last measured step, if enabled."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._profile: profile | None = None
        self._remaining_steps = 1 + TRACED_STEPS

    @property
    def is_active(self) -> bool:
        return self._profile is not None

    def begin(self, *, cuda: bool) -> bool:
        """Begin tracing; return False if disabled or if the script runs a profiler itself."""
        if not self._enabled or torch_private.is_profiling():
            return False
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()
        _mark_step_end()
        return True

    def on_step(self) -> bool:
        """Count a traced step; return whether it was the last."""
        _mark_step_end()
        self._remaining_steps -= 1
        return self._remaining_steps == 0

    def take_summary(self) -> TraceSummary | None:
        """Stop the profiler and return the summary of the traced steps, None if there are none."""
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
        events: list[TraceEvent] = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if "dur" in event]


def summarize(events: Sequence[TraceEvent], *, cuda: bool) -> TraceSummary | None:
    """Summarize the steps between marks, without the first.

    Returns None for fewer than three marks, or if a GPU has reported no kernels.
    """
    annotations = (e for e in events if e.get("cat") == "user_annotation")
    marks = sorted(float(e["ts"]) for e in annotations if e["name"] == STEP_END_MARK)
    steps = list(pairwise(marks[1:]))
    kernels = [e for e in events if e.get("cat") in DEVICE_CATEGORIES]
    if not steps or (cuda and not kernels):
        return None
    operations = {_external_id(e): e for e in events if e.get("cat") == "cpu_op"}
    gap_us = _launch_gap_us(kernels)
    # Each kernel with its operator; without a GPU the operators themselves.
    launched = [(e, operations.get(_external_id(e), e)) for e in kernels]
    timed = launched or [(e, e) for e in operations.values()]
    copies = [(float(op["ts"]), e["dur"] + gap_us) for e, op in timed if _is_layout_copy(op)]
    transposes = [
        (float(op["ts"]), e["dur"])
        for e, op in launched
        if e.get("cat") == "kernel" and TRANSPOSE_KERNELS.search(e["name"])
    ]
    operator_copies = _inside_image_operators(copies, operations.values())
    begin, end = marks[1], marks[-1]
    computing = [
        e
        for e, op in launched
        if begin <= float(op["ts"]) < end and not COMMUNICATION_KERNELS.search(e["name"])
    ]
    return TraceSummary(
        steps=len(steps),
        layout_copy_ms=tuple(_milliseconds_in(copies, *step) for step in steps),
        operator_layout_copy_ms=tuple(_milliseconds_in(operator_copies, *step) for step in steps),
        cudnn_transpose_ms=_milliseconds_in(transposes, begin, end) / len(steps),
        launches_per_step=len(computing) / len(steps),
        device_busy_ms=_busy_us(computing) / 1e3 / len(steps) if kernels else None,
    )


def _external_id(event: TraceEvent) -> Any:
    return event.get("args", {}).get("External id")


def _inside_image_operators(
    copies: Iterable[TimedSpan], operations: Iterable[TraceEvent]
) -> list[TimedSpan]:
    spans = sorted(
        (float(e["ts"]), float(e["ts"]) + e["dur"])
        for e in operations
        if IMAGE_OPERATORS.search(e["name"])
    )
    begins = [begin for begin, _ in spans]
    ends = list(accumulate((end for _, end in spans), max))
    begun = [(copy, bisect_right(begins, copy[0])) for copy in copies]
    return [copy for copy, count in begun if count and copy[0] < ends[count - 1]]


def _milliseconds_in(spans: Sequence[TimedSpan], begin: float, end: float) -> float:
    return sum(duration for start, duration in spans if begin <= start < end) / 1e3


def _is_layout_copy(operation: TraceEvent) -> bool:
    args = operation.get("args", {})
    sizes, strides = args.get("Input Dims", ()), args.get("Input Strides", ())
    if operation["name"] != COPY_OPERATOR or min(len(sizes), len(strides)) < 2:
        return False
    if sizes[0] != sizes[1]:
        return False
    orders = [dimension_order(*pair) for pair in zip(sizes[:2], strides[:2], strict=True)]
    return changes_format(*orders)


def changes_format(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> bool:
    """Return whether another dimension becomes the innermost.

    The heads of an attention change places with its tokens without that.
    """
    return before is not None and after is not None and before[-1] != after[-1]


def dimension_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions from the outermost to the innermost; None for a matrix or gaps."""
    dimensions = [dim for dim, size in enumerate(sizes) if size > 1]
    if len(dimensions) <= MATRIX_DIMENSIONS:
        return None
    order = sorted(dimensions, key=lambda dim: -strides[dim])
    dense = 1
    for dim in reversed(order):
        if strides[dim] != dense:
            return None
        dense *= sizes[dim]
    return tuple(order)


def _launch_gap_us(kernels: Iterable[TraceEvent]) -> float:
    """Return the median gap between a kernel and the next kernel that waits for it.

    Without a copy the device also saves its gap: 1.4 µs on an H200, for copies of 19 µs.
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
        busy_until = 0.0
        for begin, end in spans:
            total += max(0.0, end - max(begin, busy_until))
            busy_until = max(busy_until, end)
    return total


def _by_device(events: Iterable[TraceEvent]) -> list[list[tuple[float, float]]]:
    spans = defaultdict[Any, list[tuple[float, float]]](list)
    for event in events:
        begin = float(event["ts"])
        spans[event.get("args", {}).get("device")].append((begin, begin + event["dur"]))
    return [sorted(device_spans) for device_spans in spans.values()]


FINE_INTERVAL_S = 0.003  # in steps that are not timed
COARSE_INTERVAL_S = 0.02  # in timed steps, which sampling must not slow down
LONG_GAP_FACTOR = 2.0  # a gap longer than so many medians follows some steps only
MAX_SAMPLED_LINES = 4  # of each kind of gap
SAMPLER_THREAD_NAME = "nfold: stack sampler"
COLLECTIVE_MODULE = "torch.distributed.distributed_c10d"  # code in it waits for other ranks
SampledLine = tuple[str, str | None]


class StackSampler:
    """Samples the stack of the thread that constructed it, during host gaps.

    Another thread reads the stack every few milliseconds. A sampled line counts with the time since
    the sample before: a sampling profiler (S. L. Graham, P. B. Kessler, M. K. McKusick, gprof: a
    call graph execution profiler, 1982). Calls of the script are not wrapped.
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
        """Start sampling; user code in the current stack is the training loop."""
        codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
        self._loop_codes = {id(code): code for code in codes if is_user_code(code.co_filename)}
        threading.Thread(target=self._sample, name=SAMPLER_THREAD_NAME, daemon=True).start()

    def stop(self) -> None:
        self._stop_event.set()
        self._gap_start_s = None

    def begin_gap(self) -> None:
        if self._gap_start_s is None and not self._stop_event.is_set():
            self._gap_start_s = time.monotonic()

    def end_gap(self, *, at_epoch_boundary: bool) -> None:
        if self._gap_start_s is None:
            return
        seconds, self._gap_start_s = time.monotonic() - self._gap_start_s, None
        samples: Mapping[SampledLine, float] = {}
        if self._gap_samples:
            samples, self._gap_samples = self._gap_samples, defaultdict(float)
        if at_epoch_boundary:
            _add_seconds(self._epoch_gaps, samples)
        else:
            self._step_gaps.append((seconds, samples))

    @property
    def sampled_lines(self) -> tuple[HostGapLocation, ...]:
        """The lines with the most time in each kind of host gap, the longest first."""
        every, some = defaultdict[SampledLine, float](float), defaultdict[SampledLine, float](float)
        median_s = median(seconds for seconds, _ in self._step_gaps) if self._step_gaps else 0.0
        for seconds, samples in self._step_gaps:
            _add_seconds(some if seconds > LONG_GAP_FACTOR * median_s else every, samples)
        return (
            *_most_sampled("after a step", every),
            *_most_sampled("after some steps", some),
            *_most_sampled("between passes", self._epoch_gaps),
        )

    def _sample(self) -> None:
        before = time.monotonic()
        while not self._stop_event.wait(COARSE_INTERVAL_S if self._is_timed() else FINE_INTERVAL_S):
            now, gap_start_s = time.monotonic(), self._gap_start_s
            if gap_start_s is not None:
                line = sampled_line(sys._current_frames().get(self._thread), self._loop_codes)
                if line is not None:
                    self._gap_samples[line] += now - max(before, gap_start_s)
            before = now


def sampled_line(frame: FrameType | None, loop_codes: Mapping[int, CodeType]) -> SampledLine | None:
    """Return the line of the training loop, or called there by a package, and its callee.

    None inside a collective, which waits for other ranks, and outside user code.
    """
    if frame is None:
        return None
    user_frame, callee = find_user_frame(frame)
    stack = takewhile(lambda pair: pair[0] is not user_frame, traceback.walk_stack(frame))
    inner = [called for called, _ in stack]
    modules = {called.f_globals.get("__name__") for called in inner}
    if user_frame is None or COLLECTIVE_MODULE in modules:
        return None
    starts_workers = any(called.f_code in torch_private.WORKER_STARTS for called in inner)
    name = ""
    for caller, _ in islice(traceback.walk_stack(user_frame), 1, None):
        code = user_frame.f_code
        if id(code) in loop_codes:
            break
        if is_user_code(caller.f_code.co_filename):
            name = code.co_name if code.co_name.isidentifier() else name
            user_frame, callee = caller, f"{name}()" if name else callee
        elif path_in_package(caller.f_code.co_filename):
            break
    return frame_line(user_frame), STARTS_WORKERS if starts_workers else callee


def _add_seconds(to: dict[SampledLine, float], samples: Mapping[SampledLine, float]) -> None:
    for line, seconds in samples.items():
        to[line] += seconds


def _most_sampled(kind: HostGapKind, lines: Mapping[SampledLine, float]) -> list[HostGapLocation]:
    most = nlargest(MAX_SAMPLED_LINES, lines.items(), key=itemgetter(1))
    return [
        HostGapLocation(kind=kind, location=line, callee=callee, seconds=round(seconds, 4))
        for (line, callee), seconds in most
    ]
