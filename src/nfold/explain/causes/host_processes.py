"""Host processes: one process for all devices, or cores shared by a process per device."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import Cause, cached_per_view, exposed_ms
from nfold.explain.causes.device_memory import MemoryCause
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import MetricView


class SingleProcessCause(Cause):
    """One process (nn.DataParallel) against a process per device: its threads share an interpreter."""

    id: ClassVar[str] = "single-process"

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        return None if design.uses_one_process else "each device has its own process"

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        script = design.profile is not None
        ranks = design.replicas("real") if script else design.with_plan(strategy="ddp")
        return tuple(map(design.with_expandable_segments, (design.actual(), ranks)))

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        one, each = self.trials(design)
        return view.step(one) - view.step(each)

    def refining_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        if design.profile is None:
            return ()
        return (design.replicas("real", exchange_after_backward=True),)

    def gained_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        # DistributedDataParallel gains between this, where no compute hides the gradient exchange
        # of the replicas, and ``lost_ms``.
        late = self.refining_trials(design)
        if not late or not view.has(*late):
            return self.lost_ms(design, view)
        return view.step(design.actual()) - view.step(late[0])

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            return pytorch.use_process_per_device(design.profile, design.devices)
        return "--strategy ddp"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if design.profile is not None:
            return {}
        return {f"--strategy {name}": design.with_plan(strategy=name) for name in ("ddp", "nfold")}


MEMORY_CAUSE = MemoryCause()


class ThreadsCause(Cause):
    """Cores, caches and memory bandwidth that N processes share, without real input."""

    id: ClassVar[str] = "threads"

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.profile is not None:
            return None
        return "one process drives all devices" if design.uses_one_process else None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return (*_replicas_and_one_device(design), *_oversubscribed_trials(design))

    def available_trials(self, design: ExperimentDesign, view: MetricView) -> tuple[Trial, ...]:
        if not self.multi_device_trials(design):
            return ()
        return (
            *view.all_or_none(_replicas_and_one_device(design)),
            *view.all_or_none(_oversubscribed_trials(design)),
        )

    @cached_per_view
    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        known = view.has(*_replicas_and_one_device(design))
        contention = self._contention_ms(design, view) if known else 0.0
        return contention + self.oversubscription_input_ms(design, view)

    def _contention_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        between = exposed_ms(
            design,
            view,
            lambda input_: (
                view.reference_step(design.replicas(input_)) - view.step(design.one_device(input_))
            ),
            design.replicas("real"),
            design.one_device("real"),
        )
        # Allocator retries of several processes delay each other in the driver: cause "memory".
        retries = MEMORY_CAUSE.extra_ms(design, view)
        return between - max(0.0, min(retries, between))

    def oversubscription_input_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """Return what more threads than cores cost input, which looks like slow input; 0 if unknown."""
        steps = [view.step(trial) for trial in view.all_or_none(_oversubscribed_trials(design))]
        if not steps:
            return 0.0
        own, fewer, replayed, replayed_fewer = steps
        return (own - fewer) - (replayed - replayed_fewer)

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        if not has_too_many_threads(design):
            return ()
        return (
            design.one_device(design.cheapest_input),
            design.one_device_with(design.cheapest_input, threads=_cores_per_device(design)),
        )

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        own, fewer = self.one_device_trials(design)
        return view.step(own) - view.step(fewer)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if design.profile is None or not has_too_many_threads(design):
            return {}
        fewer = _cores_per_device(design)
        return {pytorch.limit_threads(design.profile, fewer): design.actual("real", threads=fewer)}

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None and has_too_many_threads(design):
            return pytorch.limit_threads(design.profile, _cores_per_device(design))
        if design.plan.device == "cpu":
            fewer = "give each fewer cores, or " if _cores_per_device(design) > 1 else ""
            return f"devices share caches and memory bandwidth: {fewer}use fewer devices"
        if design.profile is not None:
            return pytorch.reduce_host_contention(design.profile)
        return "fewer threads per rank: OMP_NUM_THREADS=1, and fewer --workers"


def _replicas_and_one_device(design: ExperimentDesign) -> tuple[Trial, Trial]:
    return design.replicas(design.cheapest_input), design.one_device(design.cheapest_input)


def _oversubscribed_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
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
    """Whether a rank of a script computes with more threads than it has cores."""
    return design.profile is not None and design.profile.threads > _cores_per_device(design)


def _cores_per_device(design: ExperimentDesign) -> int:
    return design.plan.cores_per_device or 1
