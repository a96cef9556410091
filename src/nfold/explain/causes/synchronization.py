"""C3: what exchanging costs even without bytes: the wrapper, waiting points, their latency."""

from __future__ import annotations

from typing import ClassVar

from nfold.ablation import Ablation
from nfold.explain.causes.base import Cause, exposed
from nfold.explain.fit import View
from nfold.explain.ladder import Input, Ladder, Rung


class Synchronization(Cause):
    """The wrapper's work, one-element all-reduces, and synchronised batch norm."""

    id: ClassVar[str] = "synchronization"
    removal: ClassVar[Ablation] = Ablation(synchronised_batch_norm=False)

    def silent(self, ladder: Ladder) -> str | None:
        """nn.DataParallel has no waiting points that could be taken away one by one."""
        return "one process drives all devices" if ladder.one_process else None

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Copies, no exchange, a barrier; with synchronised batch norm the real run without it."""
        found = (
            ladder.copies(ladder.bare),
            ladder.unexchanged(ladder.bare),
            ladder.barrier(ladder.bare),
        )
        plain = (ladder.full(), ladder.full(batch_norm=False))
        return found + (plain if ladder.synchronises_batch_norm else ())

    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """All of its parts."""
        return sum(self.parts(ladder, view).values())

    def parts(self, ladder: Ladder, view: View) -> dict[str, float]:
        """Wrapper, latency, batch norm."""
        real = (ladder.copies("real"), ladder.unexchanged("real"), ladder.barrier("real"))

        def wrapper(input_: Input) -> float:
            return view.own(ladder.unexchanged(input_)) - view.own(ladder.copies(input_))

        def latency(input_: Input) -> float:
            return view.step(ladder.barrier(input_)) - view.slowest(ladder.unexchanged(input_))

        found = {
            "the wrapper": exposed(ladder, view, wrapper, *real[:2]),
            "latency of one element a bucket": exposed(ladder, view, latency, *real[1:]),
        }
        if ladder.synchronises_batch_norm:
            plain = view.step(ladder.full(batch_norm=False))
            found["synchronised batch norm"] = view.step(ladder.full()) - plain
        return found

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words for the largest part."""
        found = self.parts(ladder, view)
        if max(found, key=lambda name: found[name]) == "synchronised batch norm":
            return "--batch-norm device, if the training allows it"
        if ladder.plan.device == "cuda" and "captured" not in str(ladder.plan.step):
            return "capture the step with its exchange: --step captured --strategy nfold"
        return "exchange less often (--accumulate 2 at twice the batch), or a larger --batch"

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """Statistics of each device's own; a captured step."""
        found: dict[str, Rung] = {}
        if ladder.synchronises_batch_norm:
            found["--batch-norm device"] = ladder.edited(batch_norm="device")
        if ladder.plan.device == "cuda" and ladder.plan.step == "eager":
            found["--step captured --strategy nfold"] = ladder.edited(
                step="captured", strategy="nfold"
            )
        if ladder.plan.strategy == "ddp":
            found["--strategy nfold"] = ladder.edited(strategy="nfold")
        return found
