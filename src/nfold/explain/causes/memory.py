"""C14: too little memory, so that the allocator gives back what it keeps and asks again.

Every such retry waits for the device. The same run with segments that grow in place needs none,
unless the tensors themselves are too many: the same work, another allocator.
"""

from __future__ import annotations

from typing import ClassVar

from nfold.ablation import Ablation
from nfold.explain import lines
from nfold.explain.causes.base import Cause, once
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.seen import Seen


class Memory(Cause):
    """An allocator that tries again and again, seen in the steps of a first look."""

    id: ClassVar[str] = "memory"
    removal: ClassVar[Ablation] = Ablation(expandable_segments=True)

    def silent(self, ladder: Ladder) -> str | None:
        """Where nothing was tried again, no run shows what more memory would gain."""
        seen, refusal = ladder.seen, self.removal.refusal(ladder.plan)
        if refusal is not None:
            return refusal
        if seen is None:
            return "no run shows what more memory would gain; see peak memory in nfold bench"
        return None if seen.alloc_retries else _used(seen, ladder.memory_bytes)

    def evident(self, ladder: Ladder) -> bool:
        """No steps try again but those that lose by it."""
        return ladder.tries_again

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Both ends of the ladder, with either allocator."""
        return (ladder.full(), ladder.grown(ladder.full()), *self.single_rungs(ladder))

    def shown_by(self, ladder: Ladder, view: View) -> tuple[Rung, ...]:
        """Those that are known, if what the change does to N devices is."""
        own = self.on_n(ladder)
        return tuple(filter(view.has, own)) if view.has(*own[:2], ladder.alone("real")) else ()

    @once
    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """What N devices lose more than one: at least, until it is known what one loses.

        That is less than all of its step.
        """
        on_n = view.step(ladder.full()) - view.step(ladder.grown(ladder.full()))
        own, growing = self.single_rungs(ladder)
        if not view.has(growing):
            return max(0.0, on_n - view.step(own))
        return on_n - self.single_ms(ladder, view)

    def contended_ms(self, ladder: Ladder, view: View) -> float:
        """``lost_ms`` where it is known: N devices alone together lose as much more than one.

        0 where nothing was tried again: there is no other allocator then.
        """
        return self.lost_ms(ladder, view) if self.shown_by(ladder, view) else 0.0

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """One device alone."""
        return (ladder.alone("real"), ladder.grown(ladder.alone("real")))

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What retries cost one device alone."""
        own, growing = self.single_rungs(ladder)
        return view.step(own) - view.step(growing)

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words."""
        assert ladder.seen is not None
        return lines.allocator(ladder.seen)

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """The experiment is the change."""
        return {lines.EXPANDABLE: ladder.grown(ladder.full())}


def _used(seen: Seen, size_bytes: int | None) -> str:
    none = f"in {seen.steps} steps the allocator never had to try again"
    if seen.peak_memory_bytes is None or size_bytes is None:
        return none
    used = f"{seen.peak_memory_bytes / 1e9:.1f} of {size_bytes / 1e9:.1f} GB of a device are used"
    more = ": the batch may grow" if 2 * seen.peak_memory_bytes < size_bytes else ""
    return f"{none}; {used}{more}"
