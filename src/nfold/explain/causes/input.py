"""C5: waiting for samples that the host makes. Real input against the same batches replayed."""

from __future__ import annotations

import math
from typing import ClassVar

from nfold.ablation import Ablation
from nfold.explain import lines
from nfold.explain.causes.base import Cause, once, starved
from nfold.explain.causes.copies import NO_LOADER, Copies
from nfold.explain.causes.epoch_boundary import EpochBoundary
from nfold.explain.causes.imbalance import Imbalance
from nfold.explain.causes.link import Link
from nfold.explain.causes.network import Network
from nfold.explain.causes.synchronization import Synchronization
from nfold.explain.causes.threads import Threads
from nfold.explain.ladder import Ladder
from nfold.explain.readings import made_ms
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.rates import decodes_for_gpus


class Input(Cause):
    """Loading, decoding and augmenting on the host; also loaders that crowd each other out."""

    id: ClassVar[str] = "input"
    removal: ClassVar[Ablation] = Ablation(input="replayed")

    def silent(self, ladder: Ladder) -> str | None:
        """Data on the device need no host."""
        if not ladder.feeds:
            return NO_LOADER
        return "the data are on the device" if ladder.plan.input == "resident" else None

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Both ends of the ladder, with real and with replayed input.

        Of a script whose allocator tries again, without that: it may hide what its input costs.
        """
        if _one_script(ladder):
            return (_each(ladder), *Threads().rungs(ladder), *self.single_rungs(ladder))
        return (*_both(ladder), *self.single_rungs(ladder))

    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """What N devices wait more than one, less what is storage's."""
        return self.divided_ms(ladder, view)[0]

    @once
    def divided_ms(self, ladder: Ladder, view: View) -> tuple[float, float]:
        """What N devices lose more than one: to computing batches, and to waiting for a disk."""
        whole = self._whole_ms(ladder, view)
        on_n = _each(ladder) if _one_script(ladder) else ladder.grown(ladder.full())
        alone, replayed = self.single_rungs(ladder)
        single = view.step(alone) - view.step(replayed)
        more = _waiting(ladder, view, on_n, whole + single) - _waiting(ladder, view, alone, single)
        return whole - more, more

    def _whole_ms(self, ladder: Ladder, view: View) -> float:
        """Of N devices more than of one; with the real ladder, all that it adds to the bare.

        What other causes lose is then less where the input hides it.
        """
        if _one_script(ladder):
            more = view.own(_each(ladder)) - view.step(self.single_rungs(ladder)[0])
            return more - Threads().lost_ms(ladder, view)
        told = view.has(*real_ladder(ladder)) or (view.final and starved(ladder, view))
        full = ladder.grown(ladder.full())
        if ladder.one_process or not (told and view.has(full) and _all_known(ladder, view)):
            on_n = _of_ranks(ladder, view)
            crowded = Threads().in_input_ms(ladder, view)
            return on_n - sum(self.divided_single_ms(ladder, view)) - crowded
        rest = view.step(full) - view.step(self.single_rungs(ladder)[0])
        return rest - sum(cause.lost_ms(ladder, view) for cause in _others(ladder))

    def whole_ms(self, ladder: Ladder, view: View) -> float:
        """With what every pass over the data waits for its first batch: that is made as well.

        What goes with the input of N devices that work together, less storage's part: what comes to
        light then is another cause's, and what loaders do to other causes goes with them.
        """
        if _one_script(ladder) or ladder.devices == 1:
            return super().whole_ms(ladder, view) + self.first_ms(ladder, view)[0]
        gone = _of_ranks(ladder, view) - Threads().in_input_ms(ladder, view)
        gone -= self.divided_ms(ladder, view)[1] + self.divided_single_ms(ladder, view)[1]
        return max(0.0, gone) + self.first_ms(ladder, view)[0]

    @once
    def first_ms(self, ladder: Ladder, view: View) -> tuple[float, float]:
        """Of a step on N devices what passes wait for their first batches: computed, and read.

        One such batch is made by one worker, as any other is: in that time it computes and waits.
        """
        full = ladder.full()
        if not EpochBoundary().ends(ladder, view):
            return 0.0, 0.0
        first = view.first_wait(full)
        loading, waiting = view.fetching(full)
        read = first * min(1.0, waiting / loading) if loading > 0 else 0.0
        return first - read, read

    def parts(self, ladder: Ladder, view: View) -> dict[str, float]:
        """How much of it independent copies lose too: loaders in each other's way."""
        copies = ladder.copies("real")
        if _one_script(ladder) or not view.has(copies, *Threads().rungs(ladder)):
            return {}
        crowd = view.own(copies) - view.step(ladder.alone("real"))
        crowd -= Threads().lost_ms(ladder, view)
        return {
            "loaders of all ranks share the host": crowd,
            "waiting for whichever loader is late": self.lost_ms(ladder, view) - crowd,
        }

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """One device alone."""
        real, replayed = ladder.alone("real"), ladder.alone("replayed")
        return (ladder.grown(real), ladder.grown(replayed))

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What one device alone waits, less what is storage's."""
        return self.divided_single_ms(ladder, view)[0]

    def divided_single_ms(self, ladder: Ladder, view: View) -> tuple[float, float]:
        """What one device loses: to computing batches, and to waiting for a disk."""
        real, replayed = self.single_rungs(ladder)
        whole = view.step(real) - view.step(replayed)
        waiting = _waiting(ladder, view, real, whole)
        return whole - waiting, waiting

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words where no plan edit was measured to help."""
        if ladder.seen is not None:
            numbers = [rung.plan.workers or 0 for rung in self.tried(ladder, view)]
            return lines.more_input(ladder.seen, max(_first_workers(ladder)), numbers)
        if not ladder.plan.workers:
            return "let worker processes load (--workers 2), or --input resident"
        *most, last = self.fixes(ladder)
        return f"{', '.join(most)} or {last} (measure them)"

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """Decoding on the device, no host at all, augmentation on the device, other workers."""
        plan = ladder.plan
        workers = plan.workers or 0
        if ladder.maker is not None:
            return {}
        others = sorted({workers // 2, 2 * workers} - {0}) or _first_workers(ladder)
        if ladder.seen is not None:
            seen = ladder.seen
            return {lines.workers(seen, other): ladder.edited(workers=other) for other in others}
        found = {}
        if decodes_for_gpus(plan) and plan.cache == "off":
            on_device = ladder.edited(decode="device", augment="device")
            found["--decode device --augment device"] = on_device
        found["--input resident"] = ladder.edited(input="resident", augment="device", workers=0)
        if plan.augment == "cpu":
            found["--augment device"] = ladder.edited(augment="device")
        for other in others[: 2 if workers else 1]:
            found[f"--workers {other}"] = ladder.edited(workers=other)
        return found


def _first_workers(ladder: Ladder) -> list[int]:
    """For a script that has none: as many as keep up with the rest of its step, and then two.

    On CPU devices they have no cores of their own.
    """
    seen, step_ms, cores = ladder.seen, ladder.step_ms, ladder.plan.cores_per_device or 1
    if seen is None or seen.fetches is None or not (seen.fetches.batches and step_ms):
        return [1, 2]
    making_ms = made_ms(ladder.plan, seen.fetches.batches, seen.fetches.seconds)
    rest_ms = max(step_ms - making_ms, making_ms / cores)
    enough = min(cores, math.ceil(making_ms / rest_ms)) if ladder.plan.device == "cuda" else 1
    return list(dict.fromkeys((enough, 2))) if enough > 1 else [1, 2]


def _of_ranks(ladder: Ladder, view: View) -> float:
    """All that goes with the input of N devices that work together."""
    real, replayed = _both(ladder)
    return view.step(real) - view.step(replayed)


def _waiting(ladder: Ladder, view: View, rung: Rung, exposed_ms: float) -> float:
    """Of what the input costs a step of a rung, the part that no computing explains.

    Where computing and waiting are together more than is exposed, the larger one counts whole:
    without the smaller one, as much would be lost. Where more is exposed and the process that
    trains makes its batches itself, the rest goes with both: while it sleeps, its threads fall
    asleep and its caches cool, and a sleep ends late.
    """
    if ladder.seen is None or ladder.seen.fetches is None or ladder.maker is not None:
        return 0.0
    loading, waiting = view.fetching(rung)
    computing, exposed_ms = loading - waiting, max(0.0, exposed_ms)
    if exposed_ms > loading > 0 and not ladder.plan.workers:
        return exposed_ms * waiting / loading
    if waiting < computing:
        exposed_ms = max(0.0, exposed_ms - computing)
    return min(exposed_ms, waiting)


def real_ladder(ladder: Ladder) -> tuple[Rung, ...]:
    """The rungs between both ends with real input: asked for where input was found."""
    if ladder.one_process:
        return ()
    if ladder.sharded:
        return (ladder.copies("real"),)
    return (ladder.copies("real"), ladder.unexchanged("real"), ladder.barrier("real"))


def _all_known(ladder: Ladder, view: View) -> bool:
    """Whether the costs that are not the input's were all measured."""
    return all(view.has(*cause.rungs(ladder)) for cause in _others(ladder))


def _others(ladder: Ladder) -> list[Cause]:
    """The causes between one device alone and the real run that are not the input."""
    found: list[Cause] = [Threads(), Imbalance(), Synchronization(), Link(), Network(), Copies()]
    return [cause for cause in found if cause.silent(ladder) is None]


def _one_script(ladder: Ladder) -> bool:
    """A script in one process: what its input costs N devices is told by copies of it."""
    return ladder.one_process and ladder.seen is not None


def _both(ladder: Ladder) -> tuple[Rung, Rung]:
    return (ladder.grown(ladder.lean()), ladder.grown(ladder.lean("replayed")))


def _each(ladder: Ladder) -> Rung:
    """A process a device, as copies of a script's one process."""
    return ladder.grown(ladder.copies("real"))
