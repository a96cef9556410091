"""What a script has autograd look for in every backward: numbers that are none."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any

import torch
from torch.fx import traceback as stacks

from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.tally import Tally
from nfold.place import is_the_users


class Anomalies:
    """Stands where autograd's anomaly detection is switched on and off; off where it is left out.

    With it every operator of a forward keeps its stack, and what each of a backward computes is
    read by the host: on a GPU that waits for it. Frames in which nfold runs the script are left out
    of those stacks: with them all of it cost a third more.
    """

    def __init__(self, left_out: LeftOut, tally: Tally) -> None:
        self._left_out = left_out
        self._tally = tally
        self._usual: Any = torch.set_anomaly_enabled
        self._asked: tuple[bool, bool] | None = None
        self._in_a_step = False
        self._below = 0

    @property
    def on(self) -> bool:
        """Whether it is on now, or was in a step of the warm-up."""
        return self._in_a_step or torch.is_anomaly_enabled()

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Put it in its place."""
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))][::-1]
        own = (place for place, f in enumerate(frames) if is_the_users(f.f_code.co_filename))
        self._below = next(own, 0)
        patches.put(torch, "set_anomaly_enabled", self._setting)
        patches.put(stacks, "format_stack", self._formatting)
        warm_up.put(torch, "set_anomaly_enabled", self._noting)

    def turn(self) -> None:
        """What is left out has changed."""
        if self._asked is not None:
            self._set(*self._asked)

    def _setting(self, usual: Any) -> Any:
        """``torch.autograd``'s ``set_detect_anomaly`` and ``detect_anomaly`` call it."""
        self._usual = usual

        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            self._asked = (mode, check_nan)
            self._set(mode, check_nan)

        return set_anomaly_enabled

    def _noting(self, usual: Any) -> Any:
        """That it is switched on, with the line."""

        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            if mode:
                self._tally.place("anomaly")
                self._in_a_step |= self._tally.on
            usual(mode, check_nan)

        return set_anomaly_enabled

    def _set(self, mode: bool, check_nan: bool) -> None:
        self._usual(mode and self._left_out.now.anomaly_detection, check_nan)

    def _formatting(self, usual: Any) -> Any:
        """What autograd calls for the stack of an operator: the script's part of it."""
        main = threading.main_thread().ident

        def format_stack() -> list[str]:
            if threading.get_ident() != main or stacks.has_preserved_node_meta():
                found: list[str] = usual()
                return found
            caller = sys._getframe(1)
            limit = sum(1 for _ in traceback.walk_stack(caller)) - self._below
            return traceback.format_list(traceback.extract_stack(caller, limit=max(1, limit)))

        return format_stack
