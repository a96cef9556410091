"""C8: time between epochs, and between steps: workers that start anew, evaluations, logs.

One rank's work while the others wait is such a thing, too. The first batch of an epoch is waited
for, as long as a worker makes it: the shorter epochs are, the more of a step that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from nfold.explain import lines, pausing
from nfold.explain.causes.base import Cause, once
from nfold.explain.causes.idle import between_ms, told_by
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung, short_passes, whole_epochs
from nfold.explain.view import View

Tells = Callable[[Rung], bool]
Number = Callable[[Rung], float]
ENDLESS = 10_000_000
"""So many batches are no epoch that anybody waits for: a day of them at 9 ms."""


class EpochBoundary(Cause):
    """What lies between two epochs and in no step, over the steps of one; and what recurs within.

    Of a script with short epochs the ladder's own runs hold some; else whole epochs are run, or
    passes over the data that are cut short: what lies between them is the same. What a script does
    after some steps only is seen in any run.
    """

    id: ClassVar[str] = "epoch-boundary"

    def none_ends(self, ladder: Ladder) -> str | None:
        """That a data set is sampled without an end in sight."""
        batches = (ladder.seen and lines.loader(ladder.seen).batches) or 0
        return f"an epoch is {batches:,} batches: none ends" if batches > ENDLESS else None

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Both ends of the ladder."""
        return (ladder.full(), ladder.one)

    def telling(self, ladder: Ladder) -> tuple[Rung, ...]:
        """The same over whole epochs, or where those are long, over short passes; and the run that
        tells what comes after every step.
        """
        own = (*self.whole(ladder), *self.short(ladder))
        return own if ladder.seen is None else (*own, told_by(ladder))

    def whole(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Over whole epochs."""
        return tuple(map(whole_epochs, self.rungs(ladder)))

    def short(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Over passes that are cut short: of a script whose epochs have a length."""
        if ladder.seen is None or not lines.loader(ladder.seen).batches or self.counted(ladder):
            return ()
        if self.none_ends(ladder) is not None:
            return ()
        return tuple(map(short_passes, self.rungs(ladder)))

    def counted(self, ladder: Ladder) -> bool:
        """Whether the script's trainer knows an epoch's batches before it: none is cut short."""
        return ladder.seen is not None and lines.loader(ladder.seen).counted

    def known(self, ladder: Ladder, view: View) -> bool:
        """Whether anything of it is known at both ends, or of one device, what every step has."""
        return self.ends(ladder, view) or self.recurs(ladder, view) or between_ms(ladder, view) > 0

    def unknown(self, ladder: Ladder, view: View) -> str | None:
        """Of what recurs one end of the ladder, or where that is known, the ends of epochs."""
        full, every = ladder.full(), view.every(ladder.full())
        if every is not None and not self.recurs(ladder, view):
            what = f"{view.recurring(full):.2f} ms of a step come after one step in {every:.0f}"
            return f"{what}, on one device alone nobody knows: "
        if self.known(ladder, view) and not self.ends(ladder, view):
            return "the ends of its epochs: "
        return super().unknown(ladder, view)

    def ends(self, ladder: Ladder, view: View) -> bool:
        """Whether both ends have had an end of an epoch."""
        return all(map(view.has_gap, self.rungs(ladder)))

    def recurs(self, ladder: Ladder, view: View) -> bool:
        """Whether something is done after some steps only, known at both ends."""
        rungs = self.rungs(ladder)
        some = any(view.every(rung) is not None for rung in rungs)
        return some and all(map(view.has_recurring, rungs))

    def _told(self, ladder: Ladder, view: View) -> Iterator[tuple[Tells, Number]]:
        """Which rungs have a part of it, and how much."""
        if self.ends(ladder, view):
            yield view.has_gap, view.gap
        if self.recurs(ladder, view):
            yield view.has_recurring, view.recurring

    @once
    def of_step(self, ladder: Ladder, view: View, rung: Rung) -> float:
        """Milliseconds a step of all that was measured of a rung."""
        return sum(number(rung) for has, number in self._told(ladder, view) if has(rung))

    def saved_ms(self, ladder: Ladder, view: View, rung: Rung) -> float:
        """Of a step on N devices, as far as that is known of a rung."""
        full = ladder.full()
        told = [number for has, number in self._told(ladder, view) if has(rung)]
        return sum(number(full) - number(rung) for number in told)

    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """What N devices lose more than one does at N-fold speed."""
        return self.of_step(ladder, view, ladder.full()) - self._of_one(ladder, view)

    def parts(self, ladder: Ladder, view: View) -> dict[str, float]:
        """The wait for the first batch of a script's workers, and what it does without a step."""
        found: dict[str, float] = {}
        full, one = self.rungs(ladder)
        ends = self.lost_ms(ladder, view)
        within = 0.0
        if self.recurs(ladder, view):
            within = view.recurring(full) - view.recurring(one) / ladder.split
            ends -= within
        if self.ends(ladder, view) and ladder.seen and lines.loader(ladder.seen).workers:
            first = view.first_wait(full) - view.first_wait(one) / ladder.split
            found = {
                "waiting for an epoch's first batch": first,
                "what else lies between epochs": ends - first,
            }
        if self.recurs(ladder, view) and self.ends(ladder, view):
            found = found or {"between epochs": ends}
            found["after some steps only"] = within
        return found

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """One device."""
        return (ladder.one,)

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What one device loses in a step over its share; what comes after every step, too."""
        return self._of_one(ladder, view) + between_ms(ladder, view)

    def _of_one(self, ladder: Ladder, view: View) -> float:
        return self.of_step(ladder, view, ladder.one) / ladder.split

    def single_fix(self, ladder: Ladder, view: View) -> str:
        """Words, for the larger part."""
        usual = between_ms(ladder, view)
        if ladder.seen is None or 2 * usual < self.single_ms(ladder, view):
            return self._words(ladder, view, ladder.one)
        return pausing.after_every_step(ladder, usual)

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words, for the larger part."""
        return self._words(ladder, view, ladder.full())

    def _words(self, ladder: Ladder, view: View, rung: Rung) -> str:
        """By what is known of a rung."""
        gap = view.gap(rung) if view.has_gap(rung) else 0.0
        within = view.recurring(rung) if self.recurs(ladder, view) else 0.0
        if ladder.seen is not None and within > gap:
            every = view.every(rung) or view.every(ladder.one) or 1.0
            return pausing.after_some_steps(ladder, every, within * every)
        if ladder.seen is not None:
            waits = 2 * view.first_wait(rung) > gap
            return pausing.between_epochs(ladder.seen, waits=waits, ranks=ladder.paused_at)
        return (
            "keep loader workers alive between epochs (persistent_workers), and evaluate and log "
            "less often"
        )
