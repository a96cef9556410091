"""C12: transposes around convolutions: one device with either order of axes.

Of a script, copies that only change the order are seen in a trace: without them so much is won.
Transposes of cuDNN's own are only a reason to try: what the other order wins or loses in all other
kernels, and what of it a slow host hides, is measured.
"""

from __future__ import annotations

from itertools import zip_longest
from statistics import fmean
from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.finding import FLOOR
from nfold.stats import Interval


class Layout(Cause):
    """The same on one device as on N, so a loss of one device's own."""

    id: ClassVar[str] = "layout"
    on_device: ClassVar[bool] = True

    def silent(self, ladder: Ladder) -> str | None:
        """A script's are seen in a trace; of a workload, transposes are kernels of a GPU."""
        if ladder.seen is not None:
            return "no step of the script was traced" if ladder.seen.traced is None else None
        return None if ladder.plan.device == "cuda" else "CPU devices transpose nothing for cuDNN"

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Both layouts; of a script, where its own is transposed."""
        mine = ladder.alone(ladder.bare)
        if ladder.seen is None:
            return (mine, ladder.alone(ladder.bare, layout=other(ladder)))
        if _transposed(ladder):
            return (mine, ladder.alone_with(ladder.bare, channels_last=True))
        return (ladder.alone("real"),)

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What goes with the other one; of a script, with copies that only change the order too."""
        told = self.told(ladder)
        if told is not None:
            return told.value
        mine, others = (view.step(rung) for rung in self.single_rungs(ladder))
        return self._copied(ladder).value + mine - others

    def told(self, ladder: Ladder) -> Interval | None:
        """Of a script's copies, where nothing else is measured."""
        alone = ladder.seen is not None and not _transposed(ladder)
        return self._copied(ladder) if alone else None

    def _copied(self, ladder: Ladder) -> Interval:
        """In a script's copies: the mean over traced steps, and the least and most of any.

        Not in those of operators on images themselves, where the other layout is tried.
        """
        traced = ladder.seen.traced if ladder.seen is not None else None
        if traced is None:
            return Interval(0.0, 0.0, 0.0)
        own = traced.in_operators_ms if _transposed(ladder) else ()
        pairs = zip_longest(traced.reordering_ms, own, fillvalue=0.0)
        each = [(every - theirs) / ladder.split for every, theirs in pairs]
        return Interval(fmean(each), min(each), max(each)) if each else Interval(0.0, 0.0, 0.0)

    def fix(self, ladder: Ladder, view: View) -> str:
        """The other layout; of a script, one throughout where what it copies costs more."""
        if ladder.seen is None:
            return f"--layout {other(ladder)}"
        copied = self._copied(ladder).value
        if 2 * copied < self.single_ms(ladder, view):
            return lines.channels_last(ladder.seen)
        return lines.reordering(ladder.seen)

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """The other layout on N devices; a script's, where its own is transposed."""
        if ladder.seen is None:
            return {f"--layout {other(ladder)}": ladder.edited(layout=other(ladder))}
        if not _transposed(ladder):
            return {}
        return {lines.channels_last(ladder.seen): ladder.full("real", channels_last=True)}


def _transposed(ladder: Ladder) -> bool:
    """Whether what a script's convolutions compute, and what follows them, is transposed for them,
    and not a little.
    """
    seen = ladder.seen
    if seen is None or seen.traced is None or seen.channels_last or not seen.convolutions:
        return False
    traced = seen.traced
    theirs = traced.transposing_ms + fmean(traced.in_operators_ms or (0.0,))
    return theirs > FLOOR * (traced.busy_ms or ladder.step_ms or 0.0)


def other(ladder: Ladder) -> str:
    """The layout that the plan has not."""
    return "channels_first" if ladder.plan.layout == "channels_last" else "channels_last"
