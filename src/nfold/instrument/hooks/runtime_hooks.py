"""What happens in the steps of a warm-up, counted, with the lines of the user's code it is on."""

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
from nfold.core.source_location import current_user_call, is_user_code
from nfold.engines.interleaver import ActiveVariant
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.input.batch_tensors import record_source
from nfold.instrument.profilers import dimension_order

MAX_LOCATIONS = 8


class EventCounter:
    """Events by kind. Nothing is counted before the first step or after the warm-up."""

    def __init__(self) -> None:
        self.enabled = False
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._locations: dict[str, Counter[tuple[str, str | None]]] = {}

    def count(self, event: str, name: str, byte_count: int = 0) -> None:
        """One event called ``name``; its line counts under ``kind``."""
        if not self.enabled:
            return
        self.counts[name] += 1
        self.bytes[name] += byte_count
        self.record_location(event)

    def record_location(self, event: str) -> None:
        """Note the line of the user's code that is run now, also before the first step."""
        self.record_line(event, *current_user_call())

    def record_line(self, event: str, line: str | None, package_line: str | None = None) -> None:
        """Note a line that is known, if it is."""
        if line is not None:
            self._locations.setdefault(event, Counter())[line, package_line] += self.enabled

    def source_locations(self, steps: int) -> Iterator[tuple[str, tuple[SourceLocation, ...]]]:
        """Lines by kind, the most frequent first, over so many steps."""
        for kind, counter in self._locations.items():
            most = [
                SourceLocation(line=where, package_line=inside, per_step=count / max(1, steps))
                for (where, inside), count in counter.most_common(MAX_LOCATIONS)
            ]
            yield kind, tuple(most)


# Copies to a device or into another order, and waits for a device, as a script asks for them
# through a tensor's methods.

COUNTED_READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")
"""What brings a tensor's values to the host: it waits until the device has them."""
CONVERSIONS = ("float", "long", "half", "bfloat16", "pin_memory", "contiguous")
"""What else makes one tensor of another, between a batch and the model."""
RESHAPES = ("reshape", "flatten")
"""What copies a tensor whose order of dimensions does not allow a view."""
COPY, PINNED, HOST_SYNC = "copy", "copy of pinned memory", "host_sync"


def install_tensor_hooks(
    patches: Patches, events: EventCounter, on_transfer: Callable[[Tensor], None]
) -> None:
    """Count copies and reads of every tensor; only for the warm-up, because calls are frequent.

    ``moved`` is told of each that goes from the host to a device.
    """
    for name in ("to", "cuda", *CONVERSIONS):
        patches.put(Tensor, name, lambda usual: _wrap_conversion(usual, events, on_transfer))
    for name in RESHAPES:
        patches.put(Tensor, name, lambda usual: _wrap_reshape(usual, events))
    for name in COUNTED_READS:
        patches.put(Tensor, name, lambda usual: _wrap_counted_read(usual, events))
    patches.put(torch.cuda, "synchronize", lambda usual: _wrap_synchronize(usual, events))


def _wrap_conversion(
    usual: Any, events: EventCounter, on_transfer: Callable[[Tensor], None]
) -> Any:
    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        target = usual(tensor, *args, **kwargs)
        if events.enabled:
            if record_copy(events, tensor, target):
                on_transfer(tensor)
            _record_layout_copy(events, tensor, target, sys._getframe(1))
            record_source(tensor, target)
        return target

    return move


def _wrap_reshape(usual: Any, events: EventCounter) -> Any:
    def shape(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        shaped = usual(tensor, *args, **kwargs)
        if events.enabled:
            _record_layout_copy(events, tensor, shaped, sys._getframe(1))
        return shaped

    return shape


def _record_layout_copy(
    events: EventCounter, source: Tensor, target: Tensor, caller: FrameType
) -> None:
    """Note the line that wrote dimensions in another order, or called what of PyTorch's did.

    Not of what a compiler looks at, whose numbers are symbols.
    """
    if target is source or type(target) is not Tensor or is_sparse(source) or is_sparse(target):
        return
    if not _changes_dimension_order(source, target):
        return
    where, inside = current_user_call()
    if reading_frame(caller) is None:
        inside = f"{caller.f_globals['__name__'].replace('.', '/')}.py:{caller.f_lineno}"
    events.record_line(f"order on {target.device.type}", where, inside)


def _changes_dimension_order(source: Tensor, target: Tensor) -> bool:
    """Whether it is a copy on one device in another order of dimensions.

    Into another shape, of a tensor whose order is not that of its shape.
    """
    base = source if source._base is None else source._base
    if source.device != target.device or target._base is base:
        return False
    before = dimension_order(source.shape, source.stride())
    if source.shape != target.shape:
        return before is not None and not source.is_contiguous()
    after = dimension_order(target.shape, target.stride())
    return before is not None and after is not None and before != after


def record_copy(events: EventCounter, source: Tensor, target: Tensor) -> bool:
    """Note the way between host and device, where there was one; whether it was to a device."""
    on_device, was_on_device = target.device.type != "cpu", source.device.type != "cpu"
    to_device = on_device and not was_on_device
    if to_device:
        events.count(COPY, PINNED if source.is_pinned() else COPY, tensor_bytes(source))
    elif was_on_device and not on_device:
        events.count(HOST_SYNC, HOST_SYNC)
    return to_device


def _wrap_synchronize(usual: Any, events: EventCounter) -> Any:
    def synchronize(*args: Any, **kwargs: Any) -> None:
        if not is_nfold_frame(sys._getframe(1)):
            events.count(HOST_SYNC, HOST_SYNC)
        usual(*args, **kwargs)

    return synchronize


def _wrap_counted_read(usual: Any, events: EventCounter) -> Any:
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if events.enabled and tensor.device.type != "cpu":
            events.count(HOST_SYNC, HOST_SYNC)
        return usual(tensor, *args, **kwargs)

    return read


def is_sparse(tensor: Tensor | None) -> bool:
    """Whether it is one, in any of PyTorch's layouts."""
    return tensor is not None and tensor.layout is not torch.strided and not tensor.is_nested


def tensor_bytes(tensor: Tensor) -> int:
    """Its bytes; of coordinates, those of its values and their indices."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes


REPLACED_READS = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu")
PASS_THROUGH_MODULES = ("torch._tensor", "nfold.instrument.hooks.runtime_hooks")
"""Modules that read for somebody else: PyTorch's that writes a tensor as text, ours that counts."""


class HostReads:
    """Remembers what every line of code read; from ``begin`` on, gives that back.

    PyTorch's own reads stay real: GradScaler decides by one whether to step. What a script only
    waits for, ``torch.cuda.synchronize()``, it no longer does.

    Whole numbers may be sizes: each is the one of the same batch, where ``batch`` tells which of
    the first ones is given again.
    """

    def __init__(
        self, variant: ActiveVariant, batch_index: Callable[[], int | None] = lambda: None
    ) -> None:
        self._variant = variant
        self._batch_index = batch_index
        self._values: dict[tuple[object, ...], Any] = {}
        self._past_warm_up = False

    def install(self, patches: Patches) -> None:
        """Stand in for every way to read a tensor."""
        for name in REPLACED_READS:
            patches.put(Tensor, name, functools.partial(self._wrap_read, name))
        patches.put(torch.cuda, "synchronize", self._wrap_synchronize)

    def end_warm_up(self) -> None:
        """The warm-up is over: wait for nothing any more, where that was asked for."""
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
            of = None if tensor.is_floating_point() else self._batch_index()
            return self.last_value(
                (frame.f_code, frame.f_lasti, name, tensor.shape, of), original, tensor
            )

        return read

    def _wrap_synchronize(self, usual: Any) -> Any:
        def synchronize(*args: Any, **kwargs: Any) -> None:
            if not self._is_active or is_nfold_frame(sys._getframe(1)):
                usual(*args, **kwargs)

        return synchronize

    def last_value(self, key: tuple[object, ...], original: Any, tensor: Tensor) -> Any:
        """What was read there last; really, before ``begin`` and where nothing was read so far."""
        if not self._is_active or key not in self._values:
            self._values[key] = original(tensor)
        found = self._values[key]
        return found.clone() if isinstance(found, Tensor) else copy.deepcopy(found)


def reading_frame(frame: FrameType | None) -> FrameType | None:
    """Whose line reads a tensor; None where PyTorch does by itself, and not to print it."""
    while frame is not None and _module_name(frame) in PASS_THROUGH_MODULES:
        frame = frame.f_back
    return None if frame is None or _module_name(frame).startswith("torch.") else frame


def is_nfold_frame(frame: FrameType) -> bool:
    """Whether it is nfold that waits, at the ends of a window."""
    return _module_name(frame).startswith("nfold.")


def _module_name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class AnomalyDetectionHook:
    """Stands where autograd's anomaly detection is switched on and off; off where it is left out.

    With it every operator of a forward keeps its stack, and what each of a backward computes is
    read by the host: on a GPU that waits for it. Frames in which nfold runs the script are left out
    of those stacks: with them all of it cost a third more.
    """

    def __init__(self, variant: ActiveVariant, events: EventCounter) -> None:
        self._variant = variant
        self._events = events
        self._original: Any = torch.set_anomaly_enabled
        self._script_setting: tuple[bool, bool] | None = None
        self._enabled_in_step = False
        self._outer_frames = 0

    @property
    def enabled(self) -> bool:
        """Whether it is on now, or was in a step of the warm-up."""
        return self._enabled_in_step or torch.is_anomaly_enabled()

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Put it in its place."""
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))][::-1]
        own = (place for place, f in enumerate(frames) if is_user_code(f.f_code.co_filename))
        self._outer_frames = next(own, 0)
        patches.put(torch, "set_anomaly_enabled", self._wrap_set_anomaly_enabled)
        patches.put(stacks, "format_stack", self._wrap_format_stack)
        warm_up.put(torch, "set_anomaly_enabled", self._wrap_and_record)

    def switch_variant(self) -> None:
        """What is left out has changed."""
        if self._script_setting is not None:
            self._apply(*self._script_setting)

    def _wrap_set_anomaly_enabled(self, usual: Any) -> Any:
        self._original = usual

        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            self._script_setting = (mode, check_nan)
            self._apply(mode, check_nan)

        return set_anomaly_enabled

    def _wrap_and_record(self, usual: Any) -> Any:
        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            if mode:
                self._events.record_location("anomaly")
                self._enabled_in_step |= self._events.enabled
            usual(mode, check_nan)

        return set_anomaly_enabled

    def _apply(self, mode: bool, check_nan: bool) -> None:
        self._original(mode and self._variant.current.anomaly_detection, check_nan)

    def _wrap_format_stack(self, usual: Any) -> Any:
        main = threading.main_thread().ident

        def format_stack() -> list[str]:
            if threading.get_ident() != main or stacks.has_preserved_node_meta():
                found: list[str] = usual()
                return found
            caller = sys._getframe(1)
            limit = sum(1 for _ in traceback.walk_stack(caller)) - self._outer_frames
            return traceback.format_list(traceback.extract_stack(caller, limit=max(1, limit)))

        return format_stack


class ThreadCountHook:
    """Stands where the number is set: noted with its line, and kept where an experiment says so."""

    def __init__(self, variant: ActiveVariant, events: EventCounter) -> None:
        self._variant = variant
        self._events = events

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Put everything in its place."""
        threads = self._variant.current.threads
        if threads is not None:
            torch.set_num_threads(threads)
            patches.put(torch, "set_num_threads", lambda _usual: lambda _asked: None)
        warm_up.put(torch, "set_num_threads", self._wrap_set_num_threads)

    def switch_variant(self, script_threads: int) -> None:
        """What is left out has changed; ``own`` is the script's number."""
        threads = self._variant.current.threads or script_threads
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def _wrap_set_num_threads(self, usual: Any) -> Any:
        def set_num_threads(count: int) -> None:
            self._events.record_location("threads")
            usual(count)

        return set_num_threads
