"""C7: processes in each other's way on the host. Independent copies against one device alone."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.base import Cause, cached_per_view, exposed_ms
from nfold.explain.causes.memory import MemoryCause
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.rung import Trial
from nfold.explain.view import MetricView

MEMORY_CAUSE = MemoryCause()


class ThreadsCause(Cause):
    """Cores, caches and memory bandwidth that N processes share, without any real input."""

    id: ClassVar[str] = "threads"

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        """One process has no other beside it."""
        if design.profile is not None:
            return None
        return "one process drives all devices" if design.uses_one_process else None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """The first two rungs; of more threads than cores, the real run with fewer."""
        return (*_replicas_and_one_device(design), *_oversubscribed_trials(design))

    def available_trials(self, design: ExperimentDesign, view: MetricView) -> tuple[Trial, ...]:
        """The runs of what is known: too many threads are one thing, others at work another."""
        if not self.multi_device_trials(design):
            return ()
        return (
            *view.all_or_none(_replicas_and_one_device(design)),
            *view.all_or_none(_oversubscribed_trials(design)),
        )

    @cached_per_view
    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """Both of its parts, those that are known."""
        between = (
            self._contention_ms(design, view)
            if view.has(*_replicas_and_one_device(design))
            else 0.0
        )
        return between + self.oversubscription_input_ms(design, view)

    def _contention_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What a device loses by others at work, though it exchanges nothing with them."""
        between = exposed_ms(
            design,
            view,
            lambda input_: (
                view.reference_step(design.replicas(input_)) - view.step(design.one_device(input_))
            ),
            design.replicas("real"),
            design.one_device("real"),
        )
        # Allocators that try again stand in each other's way in the driver: that is memory's.
        retries = MEMORY_CAUSE.extra_ms(design, view)
        return between - max(0.0, min(retries, between))

    def oversubscription_input_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What more threads than cores cost where samples are made: it looks like slow input.

        0 where that is not known.
        """
        steps = [view.step(rung) for rung in view.all_or_none(_oversubscribed_trials(design))]
        if not steps:
            return 0.0
        own, fewer, replayed, replayed_fewer = steps
        return (own - fewer) - (replayed - replayed_fewer)

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """A script's own number of threads, and a device's share of the cores."""
        if not has_too_many_threads(design):
            return ()
        return (
            design.one_device(design.cheapest_input),
            design.one_device_with(design.cheapest_input, threads=_cores_per_device(design)),
        )

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """What more threads than cores cost one device."""
        own, fewer = self.one_device_trials(design)
        return view.step(own) - view.step(fewer)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        """As many threads as a device has cores."""
        if design.profile is None or not has_too_many_threads(design):
            return {}
        fewer = _cores_per_device(design)
        return {lines.limit_threads(design.profile, fewer): design.actual("real", threads=fewer)}

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """Words."""
        if design.profile is not None and has_too_many_threads(design):
            return lines.limit_threads(design.profile, _cores_per_device(design))
        if design.plan.device == "cpu":
            fewer = "give each fewer cores, or " if _cores_per_device(design) > 1 else ""
            return f"the devices share caches and memory bandwidth: {fewer}use fewer devices"
        if design.profile is not None:
            return lines.reduce_host_contention(design.profile)
        return "fewer threads a rank: OMP_NUM_THREADS=1, and fewer --workers"


def _replicas_and_one_device(design: ExperimentDesign) -> tuple[Trial, Trial]:
    """The first two rungs of the ladder."""
    return design.replicas(design.cheapest_input), design.one_device(design.cheapest_input)


def _oversubscribed_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """With real and with replayed input: a script's own threads, and as many as cores."""
    if not has_too_many_threads(design) or not design.can_replay_input or design.uses_one_process:
        return ()
    fewer = _cores_per_device(design)
    return (
        design.actual(),
        design.actual("real", threads=fewer),
        design.actual("replayed"),
        design.actual("replayed", threads=fewer),
    )


def has_too_many_threads(design: ExperimentDesign) -> bool:
    """Whether a script computes with more threads than a device has cores."""
    return design.profile is not None and design.profile.threads > _cores_per_device(design)


def _cores_per_device(design: ExperimentDesign) -> int:
    """The cores of one device."""
    return design.plan.cores_per_device or 1
