"""C1: gradient bytes that compute does not hide. The real exchange against a barrier alone."""

from __future__ import annotations

from typing import ClassVar

from nfold.ablation import Ablation
from nfold.explain import sending
from nfold.explain.causes.base import Cause, exposed, once
from nfold.explain.ladder import Input, Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View

SHARDS = "parameters gathered and gradients scattered, their latency included"


class Link(Cause):
    """Bytes on the way between devices of one host."""

    id: ClassVar[str] = "link"
    removal: ClassVar[Ablation] = Ablation(exchange="barrier")

    def silent(self, ladder: Ladder) -> str | None:
        """nn.DataParallel's copies of weights and gradients cannot be taken away."""
        if through_host(ladder):
            return "gloo sends what is on GPUs through the host: see network"
        return "one process drives all devices" if ladder.one_process else None

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """The last two rungs; of a sharded model, copies that exchange nothing."""
        return _both(ladder, ladder.bare)

    @once
    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """What goes with the bytes; of a sharded model, with all that is exchanged."""

        def cost(input_: Input) -> float:
            full, without = _both(ladder, input_)
            least = view.slowest(without) if ladder.sharded else view.step(without)
            return view.step(full) - least

        return exposed(ladder, view, cost, *_both(ladder, "real"))

    def parts(self, ladder: Ladder, view: View) -> dict[str, float]:
        """What is meant by bytes of a sharded model."""
        return {SHARDS: self.lost_ms(ladder, view)} if ladder.sharded else {}

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words."""
        if ladder.seen is not None:
            return sending.less(ladder.seen, tried_half=bool(self.tried(ladder, view)))
        return "send less or hide more: --exchange bf16, a larger --batch, --accumulate"

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """Half of the bytes."""
        if ladder.seen is not None:
            said = sending.half(ladder.seen)
            return {said: ladder.full(exchange="half")} if said else {}
        if ladder.plan.exchange != "fp32":
            return {}
        found = {"--exchange bf16": ladder.edited(exchange="bf16")}
        if ladder.plan.strategy == "ddp":
            found["--strategy nfold"] = ladder.edited(strategy="nfold")
        return found


def _both(ladder: Ladder, input_: Input) -> tuple[Rung, Rung]:
    without = ladder.unexchanged(input_) if ladder.sharded else ladder.barrier(input_)
    return ladder.lean(input_), without


def through_host(ladder: Ladder) -> bool:
    """Whether a script exchanges what is on GPUs by a backend that knows only the host."""
    seen = ladder.seen
    return seen is not None and seen.backend == "gloo" and ladder.plan.device == "cuda"
