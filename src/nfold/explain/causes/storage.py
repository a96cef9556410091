"""C6: waiting for a disk or a network. Of what slow input costs, the part in which nobody computes.

The input's cost is proven by an experiment (real input against replayed). Its division is watched
in the same runs, in every process that makes batches: how long they compute or want a core, and
how long they sleep. Made side by side, a step's batches take that time over the number of workers.
"""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause
from nfold.explain.causes.copies import CANNOT_REPLAY_INPUT
from nfold.explain.causes.input import InputCause
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.rung import Trial
from nfold.explain.view import MetricView

INPUT_CAUSE = InputCause()
WORKER_FACTORS = (2, 4)
"""Times as many as the script has."""


class StorageCause(Cause):
    """A slow disk or a remote one: the part of the input that waits."""

    id: ClassVar[str] = "storage"

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        """Built-in data are read before the first step."""
        if design.profile is None:
            return "the data are in memory before the first step"
        if not design.can_replay_input:
            return CANNOT_REPLAY_INPUT
        if design.batch_function is not None:
            return (
                f"waiting in {design.batch_function.call_text} was not watched: it is part of input"
            )
        if design.profile.fetches is None:
            return "the processes that make batches could not be watched (workers by spawn)"
        return None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Those of the input."""
        return INPUT_CAUSE.trials(design)

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What more N devices wait than one."""
        return INPUT_CAUSE.cpu_and_storage_ms(design, view)[1]

    def total_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """With its part of what every pass over the data waits for its first batch."""
        return super().total_ms(design, view) + INPUT_CAUSE.first_batch_ms(design, view)[1]

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Those of the input."""
        return INPUT_CAUSE.one_device_trials(design)

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What one device alone waits."""
        return INPUT_CAUSE.one_device_cpu_and_storage_ms(design, view)[1]

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """Words."""
        assert design.profile is not None
        return lines.speed_up_reads(design.profile)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        """Workers that wait need no core: many more of them."""
        assert design.profile is not None
        own = design.plan.workers or 1
        counts = [factor * own for factor in WORKER_FACTORS]
        return {
            lines.num_workers_setting(design.profile, count): design.with_plan(workers=count)
            for count in counts
        }
