"""A script as it is, under its own clock: steps a second, with what lies between epochs.

    torchrun --nproc-per-node 4 benchmarks/diagnosis/clocked.py scripts/cifar_ddp.py --epochs 1000

Nothing of nfold is in it. Rank 0 notes when an optimizer has stepped and when a pass over a
DataLoader begins; after CLOCKED_SETTLE_S (4) and then CLOCKED_S seconds (10) it prints the clock as
JSON, or writes it to CLOCKED_FILE, and who started the script may stop it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FEWEST_PASSES = 4
"""From this many on, only whole ones count: a part of one may be its quick or its slow part."""


@dataclass
class Clock:
    """Steps and passes of one process; ``tell`` gets what the clock says, once."""

    settle_s: float
    timed_s: float
    tell: Callable[[dict[str, float]], None]
    now: Callable[[], float] = time.perf_counter
    _first: float | None = None
    _steps: list[float] = field(default_factory=list)
    _passes: list[tuple[float, int]] = field(default_factory=list)
    _told: bool = False

    def step(self, *_: Any) -> None:
        """An optimizer has stepped."""
        now = self.now()
        self._first = now if self._first is None else self._first
        if now - self._first < self.settle_s or self._told:
            return
        self._steps.append(now)
        if now - self._steps[0] >= self.timed_s:
            self._told = True
            self.tell(self.said())

    def begin(self) -> None:
        """A pass over a DataLoader begins."""
        if self._steps:
            self._passes.append((self.now(), len(self._steps)))

    def said(self) -> dict[str, float]:
        """Steps a second, and over how many steps and passes."""
        passes = len(self._passes) - 1
        if passes < FEWEST_PASSES:
            began, ended, steps = self._steps[0], self._steps[-1], len(self._steps) - 1
            return {"steps_per_s": steps / (ended - began), "steps": steps, "passes": 0}
        (began, first), (ended, last) = self._passes[0], self._passes[-1]
        steps = last - first
        return {"steps_per_s": steps / (ended - began), "steps": steps, "passes": passes}


def _tell(said: dict[str, float]) -> None:
    file = os.environ.get("CLOCKED_FILE")
    if file is None:
        print(json.dumps(said), flush=True)
        return
    whole = Path(f"{file}.part")
    whole.write_text(json.dumps(said))
    whole.replace(file)


def _watch(clock: Clock) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data import DataLoader

    register_optimizer_step_post_hook(clock.step)
    begin: Callable[[DataLoader[Any]], Iterator[Any]] = DataLoader.__iter__

    def watched(self: DataLoader[Any]) -> Iterator[Any]:
        clock.begin()
        return begin(self)

    DataLoader.__iter__ = watched  # type: ignore[method-assign,assignment]


def main() -> None:
    """Run the script in this process."""
    if os.environ.get("RANK", "0") == "0":
        settle_s, timed_s = (
            float(os.environ.get(name, usual))
            for name, usual in (("CLOCKED_SETTLE_S", "4"), ("CLOCKED_S", "10"))
        )
        _watch(Clock(settle_s, timed_s, _tell))
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
