"""What a script has autograd look for in every backward: numbers that are none."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any

import torch
from torch.fx import traceback as stacks

from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.tally import EventCounter
from nfold.place import is_user_code


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
        """``torch.autograd``'s ``set_detect_anomaly`` and ``detect_anomaly`` call it."""
        self._original = usual

        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            self._script_setting = (mode, check_nan)
            self._apply(mode, check_nan)

        return set_anomaly_enabled

    def _wrap_and_record(self, usual: Any) -> Any:
        """That it is switched on, with the line."""

        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            if mode:
                self._events.record_location("anomaly")
                self._enabled_in_step |= self._events.enabled
            usual(mode, check_nan)

        return set_anomaly_enabled

    def _apply(self, mode: bool, check_nan: bool) -> None:
        self._original(mode and self._variant.current.anomaly_detection, check_nan)

    def _wrap_format_stack(self, usual: Any) -> Any:
        """What autograd calls for the stack of an operator: the script's part of it."""
        main = threading.main_thread().ident

        def format_stack() -> list[str]:
            if threading.get_ident() != main or stacks.has_preserved_node_meta():
                found: list[str] = usual()
                return found
            caller = sys._getframe(1)
            limit = sum(1 for _ in traceback.walk_stack(caller)) - self._outer_frames
            return traceback.format_list(traceback.extract_stack(caller, limit=max(1, limit)))

        return format_stack
