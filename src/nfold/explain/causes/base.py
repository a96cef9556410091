"""What every cause can be asked. The base says nothing is lost, at no cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

from nfold.ablation import Ablation
from nfold.explain.ladder import Input, Ladder
from nfold.explain.operation import ABSENT
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.stats import Interval

Number = TypeVar("Number", bound=Callable[..., Any])
LEAST = 1e-3
"""Of a step: less than that no gain leaves."""
STARVED = 0.3
"""Of a step of one device: where its input costs as much, other costs may hide behind that."""


def once(number: Number) -> Number:
    """Of a cause: worked out once for each view, of which its row and other causes ask it often.

    All causes of a kind are the same one.
    """

    @functools.wraps(number)
    def asked(cause: Cause, ladder: Ladder, view: View, *rungs: Rung) -> Any:
        key = (number, type(cause), id(ladder), *rungs)
        if key not in view.made:
            # With the ladder, whose identity is no other's as long as it is there.
            view.made[key] = (number(cause, ladder, view, *rungs), ladder)
        return view.made[key][0]

    return cast(Number, asked)


class Cause:
    """One cause of ``nfold.finding.CAUSES``: which runs prove it, and what it costs by them.

    Costs are in milliseconds a step. Those on N devices are of the step's difference to N-fold:
    what one device loses in the same way is not in them, but in ``single_ms``.
    """

    id: ClassVar[str]
    removal: ClassVar[Ablation] = Ablation()
    """What takes the cause away from the real run, for interactions; nothing: nothing can."""
    on_device: ClassVar[bool] = False
    """Whether a device is busy with what it costs."""

    @property
    def of_one(self) -> bool:
        """Whether one device alone can lose anything to it."""
        return type(self).single_rungs is not Cause.single_rungs

    def absent(self, ladder: Ladder) -> str | None:
        """Why there is no row of it, or None."""
        return (ABSENT.get(self.id) if ladder.operation else None) or self.silent(ladder)

    def silent(self, ladder: Ladder) -> str | None:
        """Why this plan cannot have the cause or nothing can show it, or None."""
        del ladder
        return None

    def evident(self, ladder: Ladder) -> bool:
        """Whether a first look has seen it happen: its runs come first, in case time is short."""
        del ladder
        return False

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """The runs that ``lost_ms`` compares."""
        del ladder
        return ()

    def on_n(self, ladder: Ladder) -> tuple[Rung, ...]:
        """``rungs``, where there is more than one device."""
        return self.rungs(ladder) if ladder.devices > 1 else ()

    def shown_by(self, ladder: Ladder, view: View) -> tuple[Rung, ...]:
        """Those of ``on_n`` that tell ``lost_ms``; none while some that it needs have no run."""
        return view.all_or_none(self.on_n(ladder))

    def settled(self, ladder: Ladder, view: View) -> bool:
        """Whether it is known what N devices lose to it, if they can lose anything."""
        return bool(self.shown_by(ladder, view)) or not self.on_n(ladder)

    def telling(self, ladder: Ladder) -> tuple[Rung, ...]:
        """More runs, which tell what the fix would gain; without them ``lost_ms`` stands for it."""
        del ladder
        return ()

    def known(self, ladder: Ladder, view: View) -> bool:
        """Whether the runs of ``rungs``, once they are made, tell what ``lost_ms`` needs."""
        del ladder, view
        return True

    def unknown(self, ladder: Ladder, view: View) -> str | None:
        """None where all of it is known; else which part is not, nothing for the whole."""
        return None if self.known(ladder, view) else ""

    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """What a step on N devices loses to it."""
        raise NotImplementedError

    def gained_ms(self, ladder: Ladder, view: View) -> float:
        """What is won at least when it goes; less than it costs, where something else comes."""
        return self.lost_ms(ladder, view)

    def whole_ms(self, ladder: Ladder, view: View) -> float:
        """All that a step on N devices loses to it: what one device loses in the same way, too."""
        return max(0.0, sum(self.both_ms(ladder, view)))

    def both_ms(self, ladder: Ladder, view: View) -> tuple[float, float]:
        """What N devices lose more than one, or less, and what one does; 0 where nobody knows."""
        single = self.single_rungs(ladder)
        more = self.lost_ms(ladder, view) if self.shown_by(ladder, view) else 0.0
        alone = self.single_ms(ladder, view) if single and view.has(*single) else 0.0
        return more, alone

    def parts(self, ladder: Ladder, view: View) -> dict[str, float]:
        """What the cost is made of, where that can be told."""
        del ladder, view
        return {}

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """The runs that ``single_ms`` compares."""
        del ladder
        return ()

    def single_evidence(self, ladder: Ladder) -> tuple[Rung, ...]:
        """The runs that tell ``single_ms`` and its part of a step; none without the former."""
        own = self.single_rungs(ladder)
        return tuple(dict.fromkeys((*own, ladder.alone("real")))) if own else ()

    def told(self, ladder: Ladder) -> Interval | None:
        """``single_ms`` with its interval, where no rung but the first look tells it."""
        del ladder
        return None

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What a step of one device alone loses to it."""
        raise NotImplementedError

    def least_ms(self, ladder: Ladder) -> float:
        """What is known to be left of one device's step when all of ``single_ms`` is gone."""
        del ladder
        return 0.0

    def fix(self, ladder: Ladder, view: View) -> str:
        """What to change, in words."""
        raise NotImplementedError

    def single_fix(self, ladder: Ladder, view: View) -> str:
        """What to change for what one device alone loses; ``single_rungs`` were measured."""
        return self.fix(ladder, view)

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """Plan edits to try on N devices where the cause was found, by the flags that say them.

        Without a flag: a run that changes nothing, but tells more.
        """
        del ladder
        return {}

    def tried(self, ladder: Ladder, view: View) -> list[Rung]:
        """Those of ``fixes`` that were run."""
        return [rung for rung in self.fixes(ladder).values() if view.has(rung)]


def left(step_ms: float, gained_ms: float, least_ms: float = 0.0) -> float:
    """Of a step after so much is gained; costs that are uncertain never leave nothing of it."""
    return max(LEAST * step_ms, min(least_ms, step_ms), step_ms - gained_ms)


def exposed(ladder: Ladder, view: View, cost: Callable[[Input], float], *real: Rung) -> float:
    """A cost on the ladder without the real input, or with it where that shows less.

    Beside input that is slower, another cost hides and taking it away gains nothing. What the
    real input adds to it is the input's own. ``real`` are the rungs that tell; where there was no
    time for them, no more is gained than what N devices lose at all.
    """
    bare = cost(ladder.bare)
    if view.has(*real):
        return min(bare, max(0.0, cost("real")))
    if not view.final or not starved(ladder, view):
        return bare
    return min(bare, max(0.0, view.step(ladder.full()) - view.step(ladder.alone("real"))))


def starved(ladder: Ladder, view: View) -> bool:
    """Whether a good part of one device's step goes to its input."""
    real, bare = ladder.alone("real"), ladder.alone(ladder.bare)
    if ladder.one_process or not view.has(ladder.full(), real, bare):
        return False
    return view.step(real) - view.step(bare) > STARVED * view.step(real)
