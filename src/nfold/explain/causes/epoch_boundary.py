"""C8: time between epochs: workers that start anew, work of one rank while the others wait.

The first batch of an epoch is waited for too, as long as a worker makes it: the shorter epochs are,
the more of a step that is.
"""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause
from nfold.explain.fit import View
from nfold.explain.ladder import Ladder, Rung, short_passes, whole_epochs

ENDLESS = 10_000_000
"""So many batches are no epoch that anybody waits for: a day of them at 9 ms."""


class EpochBoundary(Cause):
    """What lies between two epochs and in no step, over the steps of one.

    Of a script with short epochs the ladder's own runs hold some; else whole epochs are run, or
    passes over the data that are cut short: what lies between them is the same.
    """

    id: ClassVar[str] = "epoch-boundary"

    def silent(self, ladder: Ladder) -> str | None:
        """A data set may be sampled without an end in sight."""
        batches = (ladder.seen and lines.loader(ladder.seen).batches) or 0
        return f"an epoch is {batches:,} batches: none ends" if batches > ENDLESS else None

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Both ends of the ladder."""
        return (ladder.full(), ladder.one)

    def telling(self, ladder: Ladder) -> tuple[Rung, ...]:
        """The same over whole epochs, or where those are long, over short passes."""
        return (*self.whole(ladder), *self.short(ladder))

    def whole(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Over whole epochs."""
        return tuple(map(whole_epochs, self.rungs(ladder)))

    def short(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Over passes that are cut short: of a script whose epochs have a length."""
        if ladder.seen is None or not lines.loader(ladder.seen).batches or self.counted(ladder):
            return ()
        return tuple(map(short_passes, self.rungs(ladder)))

    def counted(self, ladder: Ladder) -> bool:
        """Whether the script's trainer knows an epoch's batches before it: none is cut short."""
        return ladder.seen is not None and lines.loader(ladder.seen).counted

    def known(self, ladder: Ladder, view: View) -> bool:
        """Whether both ends have had an end of an epoch."""
        return all(map(view.has_gap, self.rungs(ladder)))

    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """What N devices lose more than one does at N-fold speed."""
        return view.gap(ladder.full()) - self.single_ms(ladder, view)

    def parts(self, ladder: Ladder, view: View) -> dict[str, float]:
        """The wait for the first batch of a script's workers, and what it does before it asks."""
        if ladder.seen is None or not lines.loader(ladder.seen).workers:
            return {}
        first = view.first_wait(ladder.full()) - view.first_wait(ladder.one) / ladder.split
        rest = self.lost_ms(ladder, view) - first
        return {"waiting for an epoch's first batch": first, "what else lies between epochs": rest}

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """One device."""
        return (ladder.one,)

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What one device loses in a step over its share."""
        return view.gap(ladder.one) / ladder.split

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words."""
        if ladder.seen is not None:
            waits = 2 * view.first_wait(ladder.full()) > view.gap(ladder.full())
            return lines.between_epochs(ladder.seen, waits=waits)
        return (
            "keep loader workers alive between epochs (persistent_workers), and evaluate and log "
            "less often"
        )
