"""C3: what exchanging costs even without bytes: the wrapper, waiting points, their latency."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from nfold.ablation import Ablation
from nfold.explain import lines
from nfold.explain.causes.base import Cause, exposed, once
from nfold.explain.ladder import Input, Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.seen import Seen

WRAPPER, LATENCY = "the wrapper", "latency of one element a bucket"
BATCH_NORM, BUFFERS = "synchronised batch norm", "buffers sent in every forward"
REPEATED = "gradients exchanged with every batch of a step"
BESIDE = {
    "synchronised_batch_norm": BATCH_NORM,
    "buffers": BUFFERS,
    "repeated_exchange": REPEATED,
}
"""By the field of Ablation without it, what ranks exchange beside a step's gradients."""


class Synchronization(Cause):
    """The wrapper's work, one-element all-reduces, and synchronised batch norm."""

    id: ClassVar[str] = "synchronization"
    removal: ClassVar[Ablation] = Ablation(synchronised_batch_norm=False)

    def silent(self, ladder: Ladder) -> str | None:
        """nn.DataParallel has no waiting points that could be taken away one by one, nor FSDP."""
        if ladder.reads_back or ladder.detects_anomalies:
            return None
        if ladder.sharded:
            return "what FSDP exchanges cannot be taken away one by one: all of it is in link"
        return "one process drives all devices" if ladder.one_process else None

    def evident(self, ladder: Ladder) -> bool:
        """Backwards that are searched for NaN are seen at once."""
        return ladder.detects_anomalies

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Copies, no exchange, a barrier; the real run with one exchange of gradients only."""
        if ladder.one_process or ladder.sharded:
            return ()
        return (*_up(ladder, ladder.bare), *_down(ladder))

    def shown_by(self, ladder: Ladder, view: View) -> tuple[Rung, ...]:
        """The runs of the parts that are known: what each costs is lost, whatever the others do."""
        if not self.on_n(ladder):
            return ()
        pairs = (*pairwise(_up(ladder, ladder.bare)), *pairwise(_down(ladder)))
        known = [pair for pair in pairs if view.has(*pair)]
        return tuple(dict.fromkeys(rung for pair in known for rung in pair))

    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """All of its parts that are known."""
        return sum(self.parts(ladder, view).values())

    @once
    def parts(self, ladder: Ladder, view: View) -> dict[str, float]:
        """Wrapper, latency, batch norm; those whose runs were made."""
        if ladder.sharded:
            return {}
        bare, real = _up(ladder, ladder.bare), _up(ladder, "real")

        def wrapper(input_: Input) -> float:
            return view.own(ladder.unexchanged(input_)) - view.own(ladder.copies(input_))

        def latency(input_: Input) -> float:
            return view.step(ladder.barrier(input_)) - view.slowest(ladder.unexchanged(input_))

        found = {}
        if view.has(*bare[:2]):
            found[WRAPPER] = exposed(ladder, view, wrapper, *real[:2])
        if view.has(*bare[1:]):
            found[LATENCY] = exposed(ladder, view, latency, *real[1:])
        for words, (before, without) in zip(
            _beside(ladder).values(), pairwise(_down(ladder)), strict=True
        ):
            if view.has(before, without):
                found[words] = view.step(before) - view.step(without)
        return found

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """A script that reads values back or looks for NaN, and one that does not wait for them."""
        own, without = ladder.alone(ladder.bare), ladder.unwaited
        return (own, without) if own != without else ()

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What waiting for values costs one device."""
        own, without = self.single_rungs(ladder)
        return view.step(own) - view.step(without)

    def single_fix(self, ladder: Ladder, view: View) -> str:
        """One device has nobody to wait for but itself."""
        assert ladder.seen is not None
        return "; ".join(_awaited(ladder, ladder.seen))

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words for the largest part."""
        found = self.parts(ladder, view)
        largest = max(found, key=lambda name: found[name])
        if ladder.seen is not None:
            untried = _looks_in_vain(ladder.seen) and not view.has(_all_used(ladder))
            if untried and largest in (WRAPPER, LATENCY):
                return lines.all_used(ladder.seen)
            return _line(ladder.seen, largest)
        if largest == BATCH_NORM:
            return "--batch-norm device, if the training allows it"
        if ladder.plan.device == "cuda" and "captured" not in str(ladder.plan.step):
            return "capture the step with its exchange: --step captured --strategy nfold"
        return "exchange less often (--accumulate 2 at twice the batch), or a larger --batch"

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """Statistics of each device's own; a captured step."""
        found: dict[str, Rung] = {}
        if ladder.seen is not None:
            return _without(ladder, ladder.seen)
        if ladder.synchronises_batch_norm:
            found["--batch-norm device"] = ladder.edited(batch_norm="device")
        if ladder.plan.device == "cuda" and ladder.plan.step == "eager":
            found["--step captured --strategy nfold"] = ladder.edited(
                step="captured", strategy="nfold"
            )
        if ladder.plan.strategy == "ddp":
            found["--strategy nfold"] = ladder.edited(strategy="nfold")
        return found


def _up(ladder: Ladder, input_: Input) -> tuple[Rung, Rung, Rung]:
    """Copies, no exchange, a barrier."""
    return ladder.copies(input_), ladder.unexchanged(input_), ladder.barrier(input_)


def _beside(ladder: Ladder) -> dict[str, str]:
    """What of ``BESIDE`` there is."""
    without = ladder.beside_gradients
    return {name: words for name, words in BESIDE.items() if not getattr(without, name)}


def _down(ladder: Ladder) -> tuple[Rung, ...]:
    """The real run, and without each of them, one after the other; the last is lean."""
    names = tuple(_beside(ladder))
    gone = [dict.fromkeys(names[:count], False) for count in range(len(names) + 1)]
    return tuple(ladder.full("real", **left_out) for left_out in gone) if names else ()


def _line(seen: Seen, part: str) -> str:
    if part == BATCH_NORM:
        return lines.each_normalised(seen)
    if part == REPEATED:
        return lines.one_exchange(seen)
    return lines.buffers(seen) if part == BUFFERS else lines.waiting_points(seen)


def _without(ladder: Ladder, seen: Seen) -> dict[str, Rung]:
    """The script without each of them, which is what the change of its line would do."""
    names = _beside(ladder)
    found = {
        _line(seen, words): ladder.full("real", **{name: False}) for name, words in names.items()
    }
    if _looks_in_vain(seen):
        found[lines.all_used(seen)] = _all_used(ladder)
    return found | _awaited(ladder, seen)


def _awaited(ladder: Ladder, seen: Seen) -> dict[str, Rung]:
    """The script whose host waits for less, by what its line is to be."""
    found = {}
    if ladder.detects_anomalies:
        found[lines.no_anomalies(seen)] = ladder.full(anomaly_detection=False)
    if ladder.reads_back:
        found[lines.host_syncs(seen)] = ladder.full(host_syncs=False)
    return found


def _looks_in_vain(seen: Seen) -> bool:
    """Whether DDP searches every step's graph for parameters without a gradient and finds none."""
    return seen.find_unused_parameters and not seen.unused_parameter_bytes


def _all_used(ladder: Ladder) -> Rung:
    return ladder.full("real", unused_parameters=False)
