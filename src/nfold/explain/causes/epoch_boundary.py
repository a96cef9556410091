"""C8: time between epochs: workers that start anew, work of one rank while the others wait."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause
from nfold.explain.fit import View
from nfold.explain.ladder import Ladder, Rung

EPOCHS: dict[str, Any] = {"epochs": 3, "steps": None}


class EpochBoundary(Cause):
    """An epoch's wall time less the windows in it, over its steps."""

    id: ClassVar[str] = "epoch-boundary"

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Both ends of the ladder, over whole epochs."""
        return (whole_epochs(ladder.full()), whole_epochs(ladder.one))

    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """What N devices lose more than one does at N-fold speed."""
        on_n, on_one = map(view.gap, self.rungs(ladder))
        return on_n - on_one / (ladder.devices if ladder.scaling == "strong" else 1)

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """One device, over whole epochs."""
        return (whole_epochs(ladder.one),)

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What one device loses in a step over its share."""
        times = ladder.devices if ladder.scaling == "strong" else 1
        return view.gap(whole_epochs(ladder.one)) / times

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words."""
        if ladder.seen is not None:
            return lines.between_epochs(ladder.seen)
        return (
            "keep loader workers alive between epochs (persistent_workers), and evaluate and log "
            "less often"
        )


@functools.cache
def whole_epochs(rung: Rung) -> Rung:
    """The same run, measured in epochs."""
    return Rung(plan=rung.plan.edit(**EPOCHS), ablation=rung.ablation)
