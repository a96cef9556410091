"""C13: copies from host to device. Batches replayed from the host against resident ones."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause, cached_per_view
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.rung import Trial
from nfold.explain.view import MetricView

CANNOT_REPLAY_INPUT = (
    "neither a DataLoader nor a function made the batches, so none can be given again"
)


class CopiesCause(Cause):
    """Copies that compute does not hide."""

    id: ClassVar[str] = "copies"
    occupies_device: ClassVar[bool] = True

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        """Only a GPU has a memory of its own."""
        if design.plan.device != "cuda":
            return "CPU devices work in the host's memory"
        if not design.can_replay_input:
            return CANNOT_REPLAY_INPUT
        if design.batch_function is not None and design.batch_function.on_device:
            return f"{design.batch_function.call_text} makes a batch and moves it: what both cost is input"
        return "the data are on the device" if design.plan.input == "resident" else None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Both ends of the ladder, replayed and resident."""
        if design.uses_one_process and design.profile is not None:
            return ()
        on_n = (design.one_allreduce(design.host_input), design.one_allreduce("resident"))
        return (*on_n, *self.one_device_trials(design))

    @cached_per_view
    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What copies cost N devices more than one."""
        on_n = view.step(design.one_allreduce(design.host_input)) - view.step(
            design.one_allreduce("resident")
        )
        return on_n - self.one_device_ms(design, view)

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """One device alone."""
        return (design.one_device(design.host_input), design.one_device("resident"))

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What copies cost one device alone."""
        return view.step(design.one_device(design.host_input)) - view.step(
            design.one_device("resident")
        )

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """Words."""
        if design.profile is not None:
            return lines.use_pinned_copies(design.profile)
        if design.is_operation:
            return "keep images and results on the devices between calls, or compute more on each"
        return "keep the data on the device: --input resident"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        """Data on the device."""
        if design.profile is not None or design.is_operation:
            return {}
        plan = {"input": "resident", "augment": "device", "workers": 0}
        return {"--input resident": design.with_plan(**plan)}
