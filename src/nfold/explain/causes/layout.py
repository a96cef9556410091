"""C12: transposes around convolutions. One device with either order of axes."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain.causes.base import Cause
from nfold.explain.fit import View
from nfold.explain.ladder import Ladder, Rung


class Layout(Cause):
    """The same on one device as on N, so a loss of one device's own."""

    id: ClassVar[str] = "layout"

    def silent(self, ladder: Ladder) -> str | None:
        """Transposes are kernels of a GPU."""
        if ladder.seen is not None:
            return f"a script keeps its own layout, here {ladder.plan.layout}"
        return None if ladder.plan.device == "cuda" else "CPU devices transpose nothing for cuDNN"

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Both layouts."""
        return (ladder.alone(ladder.bare), ladder.alone(ladder.bare, layout=other(ladder)))

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What goes with the other one."""
        both = (view.step(rung) for rung in self.single_rungs(ladder))
        mine, others = both
        return mine - others

    def fix(self, ladder: Ladder, view: View) -> str:
        """The other layout."""
        return f"--layout {other(ladder)}"

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """The other layout on N devices."""
        return {f"--layout {other(ladder)}": ladder.edited(layout=other(ladder))}


def other(ladder: Ladder) -> str:
    """The layout that the plan has not."""
    return "channels_first" if ladder.plan.layout == "channels_last" else "channels_last"
