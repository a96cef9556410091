"""C14: too little memory, so that the allocator gives back what it keeps and asks again.

Every such retry waits for the device. The same run with segments that grow in place needs none,
unless the tensors themselves are too many: the same work, another allocator.
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
    """An allocator that tries again and again, seen in the steps of a first look."""

    id: ClassVar[str] = "memory"
    removal: ClassVar[Variant] = Variant(expandable_segments=True)

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        seen, refusal = design.profile, self.removal.refusal(design.plan)
        if refusal is not None:
            return refusal
        if seen is None:
            return "no run shows what more memory would gain; see peak memory in nfold bench"
        return None if seen.alloc_retries else _memory_use(seen, design.memory_bytes)

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
        """What N devices lose more than one: at least, until it is known what one loses.

        That is less than all of its step.
        """
        on_n = view.step(design.actual()) - view.step(
            design.with_expandable_segments(design.actual())
        )
        own, growing = self.one_device_trials(design)
        if not view.has(growing):
            return max(0.0, on_n - view.step(own))
        return on_n - self.one_device_ms(design, view)

    def extra_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """``lost_ms`` where it is known: N devices alone together lose as much more than one.

        0 where nothing was tried again: there is no other allocator then.
        """
        return self.lost_ms(design, view) if self.available_trials(design, view) else 0.0

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return (
            design.one_device("real"),
            design.with_expandable_segments(design.one_device("real")),
        )

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        own, growing = self.one_device_trials(design)
        return view.step(own) - view.step(growing)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        assert design.profile is not None
        return pytorch.reduce_allocator_retries(design.profile)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        return {pytorch.USE_EXPANDABLE_SEGMENTS: design.with_expandable_segments(design.actual())}


def _memory_use(profile: ScriptProfile, size_bytes: int | None) -> str:
    none = f"in {profile.steps} steps the allocator never had to try again"
    if profile.peak_memory_bytes is None or size_bytes is None:
        return none
    used = (
        f"{profile.peak_memory_bytes / 1e9:.1f} of {size_bytes / 1e9:.1f} GB of a device are used"
    )
    more = ": the batch may grow" if 2 * profile.peak_memory_bytes < size_bytes else ""
    return f"{none}; {used}{more}"
