"""Device memory: an allocator without free memory returns its cached blocks and tries again.

Every retry waits for the device. The same trial with expandable segments needs no retry, unless the
tensors themselves are too large.
"""

from __future__ import annotations

from typing import ClassVar

from nfold.core.script_profile import ScriptProfile
from nfold.core.variant import Variant
from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import Cause, cached_per_view
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import MetricView


class MemoryCause(Cause):
    """Retries of the allocator, observed in the probe run."""

    id: ClassVar[str] = "memory"
    removal: ClassVar[Variant] = Variant(expandable_segments=True)

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        profile, refusal = design.profile, self.removal.refusal(design.plan)
        if refusal is not None:
            return refusal
        if profile is None:
            return "no run shows what more memory would gain; see peak memory in nfold bench"
        return None if profile.alloc_retries else _memory_use(profile, design.memory_bytes)

    def observed_in_probe(self, design: ExperimentDesign) -> bool:
        return design.has_allocator_retries

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return (
            design.actual(),
            design.with_expandable_segments(design.actual()),
            *self.one_device_trials(design),
        )

    def available_trials(self, design: ExperimentDesign, view: MetricView) -> tuple[Trial, ...]:
        own = self.multi_device_trials(design)
        return tuple(filter(view.has, own)) if view.has(*own[:2], design.one_device("real")) else ()

    @cached_per_view
    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        full = design.actual()
        on_n = view.step(full) - view.step(design.with_expandable_segments(full))
        one, expandable = self.one_device_trials(design)
        if not view.has(expandable):
            # A lower bound: one device loses less than all of its step.
            return max(0.0, on_n - view.step(one))
        return on_n - self.one_device_ms(design, view)

    def extra_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """Return ``lost_ms`` if it is known, else 0."""
        return self.lost_ms(design, view) if self.available_trials(design, view) else 0.0

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return (
            design.one_device("real"),
            design.with_expandable_segments(design.one_device("real")),
        )

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        one, expandable = self.one_device_trials(design)
        return view.step(one) - view.step(expandable)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        assert design.profile is not None
        return pytorch.reduce_allocator_retries(design.profile)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        return {pytorch.USE_EXPANDABLE_SEGMENTS: design.with_expandable_segments(design.actual())}


def _memory_use(profile: ScriptProfile, size_bytes: int | None) -> str:
    none = f"no allocator retry in {profile.steps} steps"
    if profile.peak_memory_bytes is None or size_bytes is None:
        return none
    used = f"uses {profile.peak_memory_bytes / 1e9:.1f} of {size_bytes / 1e9:.1f} GB of a device"
    larger = ": the batch can grow" if 2 * profile.peak_memory_bytes < size_bytes else ""
    return f"{none}; {used}{larger}"
