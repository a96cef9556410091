"""C9: waiting for the slowest rank. What ranks would wait, by their own steps without an exchange.

A kernel's time in a collective holds the waiting for late ranks too; the steps of ranks that do
not wait tell both apart.
"""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import pausing
from nfold.explain.causes.base import Cause, exposed, once
from nfold.explain.clocks import why_slow
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View

APART = 1.02


class Imbalance(Cause):
    """A slow device, uneven work, or steps that vary from rank to rank."""

    id: ClassVar[str] = "imbalance"

    def silent(self, ladder: Ladder) -> str | None:
        """The devices of one process have no steps of their own."""
        return "one process drives all devices" if ladder.one_process else None

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Data parallel without an exchange."""
        return (ladder.unexchanged(ladder.bare),)

    @once
    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """The slowest rank of every step, over what one device needs."""
        return exposed(
            ladder,
            view,
            lambda input_: (
                view.slowest(ladder.unexchanged(input_)) - view.own(ladder.unexchanged(input_))
            ),
            ladder.unexchanged("real"),
        )

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """The same, and one device alone, which is the first rank."""
        if ladder.devices == 1:
            return ()
        return (*self.rungs(ladder), ladder.alone(ladder.bare))

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """By how much one device alone is slower than another rank, where it is the slow one."""
        (rung, _) = self.single_rungs(ladder)
        if len(view.reference) != 1:
            return 0.0
        return view.own(rung) - min(view.ranks(rung).values())

    def fix(self, ladder: Ladder, view: View) -> str:
        """Who is slow, and whether the device or its data are, where ranks changed devices."""
        slow, times = _slow(view, ladder.unexchanged(ladder.bare))
        if slow is None:
            return "steps vary from rank to rank: look for work that only some steps have"
        pause_ms = _paused_ms(ladder, view, slow)
        if ladder.seen is not None and pause_ms is not None:
            return pausing.of_rank(ladder, slow, pause_ms)
        moved, _ = _slow(view, ladder.unexchanged(ladder.bare, turned(ladder)))
        if moved == slow:
            return f"rank {slow}'s share of the work is larger or slower: divide it evenly"
        clock = why_slow(ladder.clocks, slow, times)
        if moved is None:
            both = "compare its device and its share of the data"
            return f"rank {slow} is slow: {clock or both}"
        return f"device {slow} is slow: {clock or _unclear(ladder)}"

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """No edit of the plan, but a run that tells a slow device from slow data."""
        return {"": ladder.unexchanged(ladder.bare, turned(ladder))}


def turned(ladder: Ladder) -> tuple[int, ...]:
    """Every rank on its neighbour's device."""
    return (*range(1, ladder.devices), 0)


def _unclear(ladder: Ladder) -> str:
    """What to look at where a device's clock is not known, or does not explain it."""
    if ladder.clocks:
        return "its clock is not: look at its links and what else runs there, or leave it out"
    return "look at its clock and temperature, or leave it out"


def _paused_ms(ladder: Ladder, view: View, slow: int) -> float | None:
    """By how much the rank is slower because its host is away longer between two steps of a script,
    if that is most of it. In that time it may wait for its device, too.
    """
    if not ladder.pauses_ms:
        return None
    more = ladder.pauses_ms[slow] - min(ladder.pauses_ms)
    own = view.ranks(ladder.unexchanged(ladder.bare))
    slower = own[slow] - min(own.values())
    return min(more, slower) if 2 * more > slower else None


def _slow(view: View, rung: Rung) -> tuple[int | None, float]:
    """The rank that is slower than the others by itself, if one is, and how many times as long its
    steps are as those of the next one.
    """
    own = view.ranks(rung)
    if len(own) < 2:
        return None, 1.0
    slow = max(own, key=lambda rank: own[rank])
    second = max(value for rank, value in own.items() if rank != slow)
    return slow if own[slow] > APART * second else None, own[slow] / second
