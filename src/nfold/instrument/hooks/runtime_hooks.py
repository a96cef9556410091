"""Hooks of tensors and the runtime: copies, host reads, anomaly detection, threads.

The warm-up counts these events with their lines of user code.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback as stacks

from nfold.core.script_profile import SourceLocation
from nfold.core.source_location import current_user_call, find_user_frame, frame_line, is_user_code
from nfold.engines.interleaver import ActiveVariant
from nfold.instrument import torch_private
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.pinned_copies import passes_non_blocking
from nfold.instrument.input.batch_tensors import record_source
from nfold.instrument.profilers import changes_format, dimension_order

MAX_LOCATIONS = 8


class EventCounter:
    """Counts events by name, and their source locations by kind, while ``enabled``."""

    def __init__(self) -> None:
        self.enabled = False
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._locations: dict[str, Counter[tuple[str, str | None]]] = {}

    def count(self, event: str, name: str, byte_count: int = 0) -> None:
        """Count an event ``name``, its bytes, and the current user line as an ``event``."""
        if not self.enabled:
            return
        self.counts[name] += 1
        self.bytes[name] += byte_count
        self.record_location(event)

    def record_location(self, event: str) -> None:
        """Record the current line of user code, with a count of 0 before the first step."""
        self.record_line(event, *current_user_call())

    def record_line(self, event: str, line: str | None, package_line: str | None = None) -> None:
        if line is not None:
            self._locations.setdefault(event, Counter())[line, package_line] += self.enabled

    def source_locations(self, steps: int) -> Iterator[tuple[str, tuple[SourceLocation, ...]]]:
        """Yield each kind of event with its most frequent locations."""
        for kind, counter in self._locations.items():
            yield (
                kind,
                tuple(
                    SourceLocation(line=line, package_line=package, per_step=n / max(1, steps))
                    for (line, package), n in counter.most_common(MAX_LOCATIONS)
                ),
            )


# copy values to the host: it waits for the device
COUNTED_READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")
CONVERSIONS = ("float", "long", "half", "bfloat16", "pin_memory", "contiguous")  # other copies
RESHAPES = ("reshape", "flatten")  # copy a tensor whose strides do not allow a view
COPY, HOST_SYNC = "copy", "host_sync"
PINNED, WAITING = "copy of pinned memory", "blocking copy of pinned memory"
COPIES = (COPY, PINNED, WAITING)


def install_tensor_hooks(
    patches: Patches, events: EventCounter, on_transfer: Callable[[Tensor], None]
) -> None:
    """Count copies and host reads of every tensor. Only for the warm-up: the calls are frequent.

    ``on_transfer`` is called with each tensor that is copied from the host to a device.
    """
    for name in ("to", "cuda", *CONVERSIONS):
        patches.put(Tensor, name, lambda original: _wrap_copy(original, events, on_transfer))
    for name in RESHAPES:
        patches.put(Tensor, name, lambda original: _wrap_copy(original, events))
    for name in COUNTED_READS:
        patches.put(Tensor, name, lambda original: _wrap_counted_read(original, events))
    patches.put(torch.cuda, "synchronize", lambda original: _wrap_synchronize(original, events))


def _wrap_copy(
    original: Any, events: EventCounter, on_transfer: Callable[[Tensor], None] | None = None
) -> Any:
    def copy_tensor(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        target = original(tensor, *args, **kwargs)
        if events.enabled:
            waits = not passes_non_blocking(args, kwargs)
            if on_transfer is not None and record_copy(events, tensor, target, waits=waits):
                on_transfer(tensor)
            _record_layout_copy(events, tensor, target, sys._getframe(1))
            if on_transfer is not None:
                record_source(tensor, target)
        return target

    return copy_tensor


def _record_layout_copy(
    events: EventCounter, source: Tensor, target: Tensor, caller: FrameType
) -> None:
    """Record the user line of a copy into another order of dimensions.

    If PyTorch or another library makes the copy, its line becomes ``package_line``: users cannot
    change it.
    """
    # A compiler traces with subclasses, whose sizes are symbols.
    if target is source or type(target) is not Tensor or is_sparse(source) or is_sparse(target):
        return
    if not _changes_dimension_order(source, target):
        return
    package_line = None
    if reading_frame(caller) is None:
        package_line = f"{_module_name(caller).replace('.', '/')}.py:{caller.f_lineno}"
    frame: FrameType | None = caller
    while frame is not None:
        user_frame, library_line = find_user_frame(frame)
        package_line = package_line or library_line
        if user_frame is None:
            return
        # Paths are not enough: PyTorch may be built in any folder, and generates code in /tmp.
        if not _module_name(user_frame).startswith("torch."):
            event = f"order on {target.device.type}"
            events.record_line(event, frame_line(user_frame), package_line)
            return
        frame = user_frame.f_back


def _changes_dimension_order(source: Tensor, target: Tensor) -> bool:
    base, target_base = torch_private.base(source), torch_private.base(target)
    if source.device != target.device or target_base is (source if base is None else base):
        return False
    before = dimension_order(source.shape, source.stride())
    if source.shape != target.shape:
        return before is not None and before[-1] != max(before)
    return changes_format(before, dimension_order(target.shape, target.stride()))


def record_copy(
    events: EventCounter, source: Tensor, target: Tensor, *, waits: bool = True
) -> bool:
    """Count a copy between host and device, which ``waits`` for it; return whether to a device."""
    on_device, was_on_device = target.device.type != "cpu", source.device.type != "cpu"
    to_device = on_device and not was_on_device
    if to_device:
        pinned = WAITING if waits else PINNED
        events.count(COPY, pinned if source.is_pinned() else COPY, tensor_bytes(source))
    elif was_on_device and not on_device:
        events.count(HOST_SYNC, HOST_SYNC)
    return to_device


def _wrap_synchronize(original: Any, events: EventCounter) -> Any:
    def synchronize(*args: Any, **kwargs: Any) -> None:
        if not is_nfold_frame(sys._getframe(1)):
            events.count(HOST_SYNC, HOST_SYNC)
        original(*args, **kwargs)

    return synchronize


def _wrap_counted_read(original: Any, events: EventCounter) -> Any:
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if events.enabled and tensor.device.type != "cpu":
            events.count(HOST_SYNC, HOST_SYNC)
        return original(tensor, *args, **kwargs)

    return read


def is_sparse(tensor: Tensor | None) -> bool:
    """Return whether the tensor has one of PyTorch's sparse layouts."""
    return tensor is not None and tensor.layout is not torch.strided and not tensor.is_nested


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; of a COO tensor, of its values and indices."""
    if tensor.layout is torch.sparse_coo:
        return torch_private.coo_bytes(tensor)
    return tensor.nbytes


REPLACED_READS = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu")
# Modules that read for their caller: printing a tensor, and these hooks.
PASS_THROUGH_MODULES = ("torch._tensor", __name__)


class HostReads:
    """Replaces host reads: after the warm-up each line of code gets the value that it read last.

    Reads by PyTorch and nfold stay real: GradScaler decides by one whether to step, and nfold compares
    losses. ``torch.cuda.synchronize()`` does nothing. An integer may be a size: its value is
    remembered for each replayed batch (``batch_index``).
    """

    def __init__(
        self, variant: ActiveVariant, batch_index: Callable[[], int | None] = lambda: None
    ) -> None:
        self._variant = variant
        self._batch_index = batch_index
        self._values: dict[tuple[object, ...], Any] = {}
        self._past_warm_up = False

    def install(self, patches: Patches) -> None:
        for name in REPLACED_READS:
            patches.put(Tensor, name, functools.partial(self._wrap_read, name))
        patches.put(torch.cuda, "synchronize", self._wrap_synchronize)

    def end_warm_up(self) -> None:
        self._past_warm_up = True

    @property
    def _is_active(self) -> bool:
        return self._past_warm_up and not self._variant.current.host_syncs

    def _wrap_read(self, name: str, original: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu":
                return original(tensor, *args, **kwargs)
            frame = reading_frame(sys._getframe(1))
            if frame is None:
                return original(tensor, *args, **kwargs)
            batch = None if tensor.is_floating_point() else self._batch_index()
            key = (frame.f_code, frame.f_lasti, name, tensor.shape, batch)
            return self.last_value(key, original, tensor)

        return read

    def _wrap_synchronize(self, original: Any) -> Any:
        def synchronize(*args: Any, **kwargs: Any) -> None:
            if not self._is_active or is_nfold_frame(sys._getframe(1)):
                original(*args, **kwargs)

        return synchronize

    def last_value(self, key: tuple[object, ...], original: Any, tensor: Tensor) -> Any:
        """Return the last value read at ``key``; read the tensor if inactive or new."""
        if not self._is_active or key not in self._values:
            self._values[key] = original(tensor)
        value = self._values[key]
        return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def reading_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside the pass-through modules; None if PyTorch or nfold reads."""
    while frame is not None and _module_name(frame) in PASS_THROUGH_MODULES:
        frame = frame.f_back
    if frame is None or is_nfold_frame(frame) or _module_name(frame).startswith("torch."):
        return None
    return frame


def is_nfold_frame(frame: FrameType) -> bool:
    return _module_name(frame).startswith("nfold.")


def _module_name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class AnomalyDetectionHook:
    """Records when autograd's anomaly detection is enabled, and disables it in some variants.

    With it each operator of a forward stores its stack, and the host reads the result of each
    backward operator. Frames outside the script are removed from these stacks: with them anomaly
    detection cost a third more.
    """

    def __init__(self, variant: ActiveVariant, events: EventCounter) -> None:
        self._variant = variant
        self._events = events
        self._original: Any = torch.set_anomaly_enabled
        self._script_setting: tuple[bool, bool] | None = None
        self._enabled_in_step = False
        self.was_requested = False  # whether the script has ever enabled it
        self._outer_frames = 0

    @property
    def enabled(self) -> bool:
        return self._enabled_in_step or torch.is_anomaly_enabled()

    def install(self, patches: Patches, warm_up: Patches) -> None:
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))][::-1]
        user = (depth for depth, f in enumerate(frames) if is_user_code(f.f_code.co_filename))
        self._outer_frames = next(user, 0)
        patches.put(torch, "set_anomaly_enabled", self._wrap_set_anomaly_enabled)
        patches.put(stacks, "format_stack", self._wrap_format_stack)
        warm_up.wrap(torch, "set_anomaly_enabled", self._record_anomaly_setting)

    def switch_variant(self) -> None:
        if self._script_setting is not None:
            self._apply(*self._script_setting)

    def _wrap_set_anomaly_enabled(self, original: Any) -> Any:
        self._original = original

        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            self._script_setting = (mode, check_nan)
            self.was_requested |= mode
            self._apply(mode, check_nan)

        return set_anomaly_enabled

    def _record_anomaly_setting(self, original: Any, mode: bool, check_nan: bool = True) -> None:
        if mode:
            self._events.record_location("anomaly")
            self._enabled_in_step |= self._events.enabled
        original(mode, check_nan)

    def _apply(self, mode: bool, check_nan: bool) -> None:
        self._original(mode and self._variant.current.anomaly_detection, check_nan)

    def _wrap_format_stack(self, original: Any) -> Any:
        main = threading.main_thread().ident

        def format_stack() -> list[str]:
            if threading.get_ident() != main or stacks.has_preserved_node_meta():
                lines: list[str] = original()
                return lines
            caller = sys._getframe(1)
            limit = sum(1 for _ in traceback.walk_stack(caller)) - self._outer_frames
            return traceback.format_list(traceback.extract_stack(caller, limit=max(1, limit)))

        return format_stack


class ThreadCountHook:
    """Records calls of ``torch.set_num_threads``; a variant may fix the number."""

    def __init__(self, variant: ActiveVariant, events: EventCounter) -> None:
        self._variant = variant
        self._events = events

    def install(self, patches: Patches, warm_up: Patches) -> None:
        threads = self._variant.current.threads
        if threads is not None:
            patches.put(torch, "set_num_threads", lambda _original: lambda _count: None)
        warm_up.wrap(torch, "set_num_threads", self._set_num_threads)

    def _set_num_threads(self, original: Any, count: int) -> None:
        self._events.record_location("threads")
        original(count)
