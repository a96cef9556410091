"""C6: waiting for a disk or a network. Of what slow input costs, the part in which nobody computes.

The input's cost is proven by an experiment (real input against replayed). Its division is watched
in the same runs, in every process that makes batches: how long they compute or want a core, and
how long they sleep. Made side by side, a step's batches take that time over the number of workers.
"""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause
from nfold.explain.causes.copies import NO_LOADER
from nfold.explain.causes.input import Input
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View

INPUT = Input()
MORE_WORKERS = (2, 4)
"""Times as many as the script has."""


class Storage(Cause):
    """A slow disk or a remote one: the part of the input that waits."""

    id: ClassVar[str] = "storage"

    def silent(self, ladder: Ladder) -> str | None:
        """Built-in data are read before the first step."""
        if ladder.seen is None:
            return "the data are in memory before the first step"
        if not ladder.feeds:
            return NO_LOADER
        if ladder.maker is not None:
            return f"waiting in {ladder.maker.called} was not watched: it is part of input"
        if ladder.seen.fetches is None:
            return "the processes that make batches could not be watched (workers by spawn)"
        return None

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Those of the input."""
        return INPUT.rungs(ladder)

    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """What more N devices wait than one."""
        return INPUT.divided_ms(ladder, view)[1]

    def whole_ms(self, ladder: Ladder, view: View) -> float:
        """With its part of what every pass over the data waits for its first batch."""
        return super().whole_ms(ladder, view) + INPUT.first_ms(ladder, view)[1]

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Those of the input."""
        return INPUT.single_rungs(ladder)

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What one device alone waits."""
        return INPUT.divided_single_ms(ladder, view)[1]

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words."""
        assert ladder.seen is not None
        return lines.faster_reads(ladder.seen)

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """Workers that wait need no core: many more of them."""
        assert ladder.seen is not None
        own = ladder.plan.workers or 1
        counts = [factor * own for factor in MORE_WORKERS]
        return {lines.workers(ladder.seen, count): ladder.edited(workers=count) for count in counts}
