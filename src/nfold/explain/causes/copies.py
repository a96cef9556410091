"""C13: copies from host to device. Batches replayed from the host against resident ones."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause, once
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View

NO_LOADER = "neither a DataLoader nor a function made the batches, so none can be given again"


class Copies(Cause):
    """Copies that compute does not hide."""

    id: ClassVar[str] = "copies"
    on_device: ClassVar[bool] = True

    def silent(self, ladder: Ladder) -> str | None:
        """Only a GPU has a memory of its own."""
        if ladder.plan.device != "cuda":
            return "CPU devices work in the host's memory"
        if not ladder.feeds:
            return NO_LOADER
        if ladder.maker is not None and ladder.maker.on_device:
            return f"{ladder.maker.called} makes a batch and moves it: what both cost is input"
        return "the data are on the device" if ladder.plan.input == "resident" else None

    def rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """Both ends of the ladder, replayed and resident."""
        if ladder.one_process and ladder.seen is not None:
            return ()
        on_n = (ladder.lean(ladder.on_host), ladder.lean("resident"))
        return (*on_n, *self.single_rungs(ladder))

    @once
    def lost_ms(self, ladder: Ladder, view: View) -> float:
        """What copies cost N devices more than one."""
        on_n = view.step(ladder.lean(ladder.on_host)) - view.step(ladder.lean("resident"))
        return on_n - self.single_ms(ladder, view)

    def single_rungs(self, ladder: Ladder) -> tuple[Rung, ...]:
        """One device alone."""
        return (ladder.alone(ladder.on_host), ladder.alone("resident"))

    def single_ms(self, ladder: Ladder, view: View) -> float:
        """What copies cost one device alone."""
        return view.step(ladder.alone(ladder.on_host)) - view.step(ladder.alone("resident"))

    def fix(self, ladder: Ladder, view: View) -> str:
        """Words."""
        if ladder.seen is not None:
            return lines.copies(ladder.seen)
        if ladder.operation:
            return "keep images and results on the devices between calls, or compute more on each"
        return "keep the data on the device: --input resident"

    def fixes(self, ladder: Ladder) -> dict[str, Rung]:
        """Data on the device."""
        if ladder.seen is not None or ladder.operation:
            return {}
        plan = {"input": "resident", "augment": "device", "workers": 0}
        return {"--input resident": ladder.edited(**plan)}
