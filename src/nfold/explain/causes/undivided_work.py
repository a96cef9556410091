"""C10: every device trains on the same samples. Seen by the hashes of what each rank was fed."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View

SIGN = "same_samples"
"""The doubt that a measurement carries where it is so."""


class UndividedWork(Cause):
    """N devices make the same step N times: exactly N times the work."""

    id: ClassVar[str] = "undivided-work"

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """The real run, whose doubts tell."""
        return (ladder.full(),)

    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """All steps but one that distinct samples would need."""
        return (ladder.devices - 1) * view.step(ladder.full())

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words."""
        if ladder.seen is not None:
            return lines.divide(ladder.seen)
        return "give every rank its own samples: DistributedSampler, or run.loader"
