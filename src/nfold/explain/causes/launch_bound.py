"""C11: work per step that does not shrink with the batch: launches, and kernels left half empty."""

from __future__ import annotations

import functools
from typing import ClassVar, Literal

from nfold.ablation import Ablation
from nfold.explain import lines
from nfold.explain.causes.base import Cause
from nfold.explain.causes.idle import busy_ms, idle_ms, paused_ms, told_by
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.seen import Seen

MODES: tuple[Literal["default", "reduce-overhead"], ...] = ("reduce-overhead", "default")
"""In which a script's model is compiled to try whether that helps: as CUDA graphs, or without."""


class LaunchBound(Cause):
    """A device with its share of the batch, against an N-th of the whole batch on one."""

    id: ClassVar[str] = "launch-bound"

    def silent(self, ladder: Ladder) -> str | None:
        """Weak scaling leaves every device its batch; what launches cost shows on a GPU only."""
        if ladder.scaling == "strong" or _captures(ladder):
            return None
        if ladder.seen is None or ladder.seen.device == "cpu":
            if ladder.devices == 1:
                return "one device has no other share of the batch"
            return "the batch of a device does not shrink with their number"
        if busy_ms(ladder) is None:
            return "no step of the script was traced"
        return None

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """One device at the whole batch and at its share."""
        return () if ladder.scaling == "weak" else (ladder.alone("real"), ladder.one)

    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """The share's step over its part of the whole batch's."""
        share = view.step(ladder.alone("real"))
        return share - view.step(ladder.one) / ladder.devices

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Eager launches against one graph, where there are graphs; else two batches.

        A script's are told by the time in which its GPU was busy, where neither host
        nor allocator waits for it.
        """
        if _captures(ladder):
            return (ladder.alone(ladder.bare), _captured(ladder))
        return (told_by(ladder),) if _traced(ladder) else self.rungs(ladder)

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What a graph saves; else the part of the step that a line gives batch 0.

        Of a script, the time in which its GPU has nothing to do, unless its host is ahead of it or
        does something else.
        """
        if _traced(ladder):
            return idle_ms(ladder, view) - paused_ms(ladder, view)
        if _captures(ladder):
            return view.step(ladder.alone(ladder.bare)) - view.step(_captured(ladder))
        n, share, whole = ladder.devices, view.step(ladder.alone("real")), view.step(ladder.one)
        return (n * share - whole) / (n - 1)

    def least_ms(self, ladder: Ladder) -> float:
        """Of a script that was traced, the time in which its GPU is busy."""
        return (busy_ms(ladder) or 0.0) if _traced(ladder) else 0.0

    def whole_ms(self, ladder: Ladder, view: View) -> float:
        """What N devices lose more is a part of what one does."""
        return max(0.0, *self.both_ms(ladder, view))

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words."""
        if ladder.seen is not None:
            return _larger(ladder.seen, _compiled(ladder), view)
        captured = " or --step captured" if _captures(ladder) else ""
        return f"more work a step: a larger --batch{captured}"

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """The step as one graph; a script's model compiled."""
        seen = ladder.seen
        if seen is not None:
            return {lines.compiled(seen, mode): rung for mode, rung in _compiled(ladder).items()}
        if not _captures(ladder):
            return {}
        if ladder.devices == 1:
            return {"--step captured": ladder.edited(step="captured")}
        strategy = "dp" if ladder.one_process else "nfold"
        changes = {"step": "captured", "strategy": strategy}
        return {"--step captured --strategy nfold": ladder.edited(**changes)}


def _compiled(ladder: Ladder) -> dict[str, Rung]:
    """By mode; none where a script compiles something already, or its module is copied or cut."""
    seen = ladder.seen
    if seen is None or seen.compiled or ladder.plan.device != "cuda" or ladder.plain:
        return {}
    if seen.parallel in ("dp", "fsdp"):
        return {}
    return {mode: ladder.full("real", compiled=mode) for mode in MODES}


def _larger(seen: Seen, modes: dict[str, Rung], view: View) -> str:
    """Fewer launches a sample; what was tried and not found better is not advised.

    Where GradScaler reads a value in every step, its host is never ahead of the device.
    """
    tried = [mode for mode, rung in modes.items() if view.has(rung)]
    also = f", or {lines.compiled(seen, MODES[0])}" if modes else ""
    if tried:
        also = f" (torch.compile, {' and '.join(tried)}: no gain beyond the noise)"
    elif any(rung in view.failed for rung in modes.values()):
        also = " (torch.compile was tried, and failed)"
    if seen.host_syncs >= 1 and seen.autocast == "fp16":
        also += ", or bf16, which needs no GradScaler: that waits for the device in every step"
    return lines.larger_batch(seen, also)


def _captures(ladder: Ladder) -> bool:
    if ladder.seen is not None or ladder.operation:
        return False
    eager = "captured" not in str(ladder.plan.step) and ladder.plan.precision != "fp16"
    return ladder.plan.device == "cuda" and eager


def _traced(ladder: Ladder) -> bool:
    """Whether a script's busy time stands for what a graph would take."""
    return ladder.scaling == "weak" and busy_ms(ladder) is not None


def _captured(ladder: Ladder) -> Rung:
    return _replayed_as_graph(ladder.alone(ladder.bare))


@functools.cache
def _replayed_as_graph(alone: Rung) -> Rung:
    return Rung(plan=alone.plan, ablation=alone.ablation.merged(Ablation(captured=True)))
