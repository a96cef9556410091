"""C4: one process for all devices. The same plan with a process a device."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.rung import Trial
from nfold.explain.view import MetricView


class SingleProcessCause(Cause):
    """nn.DataParallel: threads of one interpreter, weights copied to all devices in every step."""

    id: ClassVar[str] = "single-process"

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        """A process a device is what is wanted."""
        return None if design.uses_one_process else "every device has a process of its own"

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """The plan as it is, and with DistributedDataParallel; neither with retries: see memory."""
        return (
            design.with_expandable_segments(design.actual()),
            design.with_expandable_segments(self._process_per_device(design)),
        )

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What goes when every device has its process."""
        one, each = self.trials(design)
        return view.step(one) - view.step(each)

    def refining_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Of a script, copies that exchange their gradients."""
        return (
            (design.replicas("real", exchange_after_backward=True),)
            if design.profile is not None
            else ()
        )

    def gained_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """Of a script, what is left when the copies exchange gradients and nothing hides it.

        DistributedDataParallel hides some of that: it comes to lie between this and ``lost_ms``.
        """
        late = self.refining_trials(design)
        if not late or not view.has(*late):
            return self.lost_ms(design, view)
        return view.step(design.actual()) - view.step(late[0])

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """The strategy."""
        if design.profile is not None:
            return lines.use_process_per_device(design.profile, design.devices)
        return "--strategy ddp"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        """Both ways to have a process a device."""
        if design.profile is not None:
            return {}
        return {f"--strategy {name}": design.with_plan(strategy=name) for name in ("ddp", "nfold")}

    def _process_per_device(self, design: ExperimentDesign) -> Trial:
        """A process a device: a script's as copies, which do not yet exchange anything."""
        if design.profile is not None:
            return design.replicas("real")
        return design.with_plan(strategy="ddp")
