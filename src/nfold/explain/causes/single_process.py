"""C4: one process for all devices. The same plan with a process a device."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View


class SingleProcess(Cause):
    """nn.DataParallel: threads of one interpreter, weights copied to all devices in every step."""

    id: ClassVar[str] = "single-process"

    def silent(self, ladder: Ladder) -> str | None:
        """A process a device is what is wanted."""
        return None if ladder.one_process else "every device has a process of its own"

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """The plan as it is, and with DistributedDataParallel; neither with retries: see memory."""
        return (ladder.grown(ladder.full()), ladder.grown(self._each(ladder)))

    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """What goes when every device has its process."""
        one, each = self.rungs(ladder)
        return view.step(one) - view.step(each)

    def telling(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Of a script, copies that exchange their gradients."""
        return (ladder.copies("real", late_exchange=True),) if ladder.seen is not None else ()

    def gained_ms(self, ladder: Ladder, view: View) -> float:
        """Of a script, what is left when the copies exchange gradients and nothing hides it.

        DistributedDataParallel hides some of that: it comes to lie between this and ``lost_ms``.
        """
        late = self.telling(ladder)
        if not late or not view.has(*late):
            return self.lost_ms(ladder, view)
        return view.step(ladder.full()) - view.step(late[0])

    def fix(self, ladder: Ladder, view: View) -> str:
        """The strategy."""
        if ladder.seen is not None:
            return lines.process_each(ladder.seen, ladder.devices)
        return "--strategy ddp"

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """Both ways to have a process a device."""
        if ladder.seen is not None:
            return {}
        return {f"--strategy {name}": ladder.edited(strategy=name) for name in ("ddp", "nfold")}

    def _each(self, ladder: Ladder) -> Rung:
        """A process a device: a script's as copies, which do not yet exchange anything."""
        if ladder.seen is not None:
            return ladder.copies("real")
        return ladder.edited(strategy="ddp")
