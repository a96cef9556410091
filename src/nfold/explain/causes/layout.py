"""C12: transposes around convolutions. One device with either order of axes; a script is traced."""

from __future__ import annotations

from statistics import fmean
from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause
from nfold.explain.fit import View
from nfold.explain.ladder import Ladder, Rung
from nfold.stats import Interval


class Layout(Cause):
    """The same on one device as on N, so a loss of one device's own."""

    id: ClassVar[str] = "layout"

    def silent(self, ladder: Ladder) -> str | None:
        """A script's are seen in a trace; of a workload, transposes are kernels of a GPU."""
        if ladder.seen is not None:
            return "no step of the script was traced" if ladder.seen.traced is None else None
        return None if ladder.plan.device == "cuda" else "CPU devices transpose nothing for cuDNN"

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Both layouts; a script keeps its own."""
        if ladder.seen is not None:
            return (ladder.alone("real"),)
        return (ladder.alone(ladder.bare), ladder.alone(ladder.bare, layout=other(ladder)))

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What goes with the other one; of a script, with copies that only change the order."""
        told = self.told(ladder)
        if told is not None:
            return told.value
        mine, others = (view.step(rung) for rung in self.single_rungs(ladder))
        return mine - others

    def told(self, ladder: Ladder) -> Interval | None:
        """Of a script: the mean over traced steps, and the least and most of any."""
        if ladder.seen is None or ladder.seen.traced is None:
            return None
        each = [ms / ladder.split for ms in ladder.seen.traced.reordering_ms]
        return Interval(fmean(each), min(each), max(each))

    def fix(self, ladder: Ladder, view: View) -> str:
        """The other layout."""
        if ladder.seen is not None:
            return lines.reordering(ladder.seen)
        return f"--layout {other(ladder)}"

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """The other layout on N devices."""
        if ladder.seen is not None:
            return {}
        return {f"--layout {other(ladder)}": ladder.edited(layout=other(ladder))}


def other(ladder: Ladder) -> str:
    """The layout that the plan has not."""
    return "channels_first" if ladder.plan.layout == "channels_last" else "channels_last"
