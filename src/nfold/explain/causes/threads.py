"""C7: processes in each other's way on the host. Independent copies against one device alone."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause, exposed, once
from nfold.explain.causes.memory import Memory
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View

MEMORY = Memory()


class Threads(Cause):
    """Cores, caches and memory bandwidth that N processes share, without any real input."""

    id: ClassVar[str] = "threads"

    def silent(self, ladder: Ladder) -> str | None:
        """One process has no other beside it."""
        if ladder.seen is not None:
            return None
        return "one process drives all devices" if ladder.one_process else None

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """The first two rungs; of more threads than cores, the real run with fewer."""
        return (*_ranks(ladder), *_crowded(ladder))

    def shown_by(self, ladder: Ladder, view: View) -> tuple[Rung, ...]:
        """The runs of what is known: too many threads are one thing, others at work another."""
        if not self.on_n(ladder):
            return ()
        return (*view.all_or_none(_ranks(ladder)), *view.all_or_none(_crowded(ladder)))

    @once
    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """Both of its parts, those that are known."""
        between = self._between_ms(ladder, view) if view.has(*_ranks(ladder)) else 0.0
        return between + self.in_input_ms(ladder, view)

    def _between_ms(self, ladder: Ladder, view: View) -> float:
        """What a device loses by others at work, though it exchanges nothing with them."""
        between = exposed(
            ladder,
            view,
            lambda input_: view.own(ladder.copies(input_)) - view.step(ladder.alone(input_)),
            ladder.copies("real"),
            ladder.alone("real"),
        )
        # Allocators that try again stand in each other's way in the driver: that is memory's.
        retries = MEMORY.contended_ms(ladder, view)
        return between - max(0.0, min(retries, between))

    def in_input_ms(self, ladder: Ladder, view: View) -> float:
        """What more threads than cores cost where samples are made: it looks like slow input.

        0 where that is not known.
        """
        steps = [view.step(rung) for rung in view.all_or_none(_crowded(ladder))]
        if not steps:
            return 0.0
        own, fewer, replayed, replayed_fewer = steps
        return (own - fewer) - (replayed - replayed_fewer)

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """A script's own number of threads, and a device's share of the cores."""
        if not too_many(ladder):
            return ()
        return (ladder.alone(ladder.bare), ladder.alone_with(ladder.bare, threads=_share(ladder)))

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What more threads than cores cost one device."""
        own, fewer = self.single_rungs(ladder)
        return view.step(own) - view.step(fewer)

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """As many threads as a device has cores."""
        if ladder.seen is None or not too_many(ladder):
            return {}
        fewer = _share(ladder)
        return {lines.threads(ladder.seen, fewer): ladder.full("real", threads=fewer)}

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words."""
        if ladder.seen is not None and too_many(ladder):
            return lines.threads(ladder.seen, _share(ladder))
        if ladder.plan.device == "cpu":
            fewer = "give each fewer cores, or " if _share(ladder) > 1 else ""
            return f"the devices share caches and memory bandwidth: {fewer}use fewer devices"
        if ladder.seen is not None:
            return lines.fewer_processes(ladder.seen)
        return "fewer threads a rank: OMP_NUM_THREADS=1, and fewer --workers"


def _ranks(ladder: Ladder) -> tuple[Rung, Rung]:
    """The first two rungs of the ladder."""
    return ladder.copies(ladder.bare), ladder.alone(ladder.bare)


def _crowded(ladder: Ladder) -> tuple[Rung, ...]:
    """With real and with replayed input: a script's own threads, and as many as cores."""
    if not too_many(ladder) or not ladder.feeds or ladder.one_process:
        return ()
    fewer = _share(ladder)
    return (
        ladder.full(),
        ladder.full("real", threads=fewer),
        ladder.full("replayed"),
        ladder.full("replayed", threads=fewer),
    )


def too_many(ladder: Ladder) -> bool:
    """Whether a script computes with more threads than a device has cores."""
    return ladder.seen is not None and ladder.seen.threads > _share(ladder)


def _share(ladder: Ladder) -> int:
    """The cores of one device."""
    return ladder.plan.cores_per_device or 1
