"""Host processes: one process for all devices, or cores shared by a process per device."""

from __future__ import annotations

import numpy as np

from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import ONE_PROCESS, Cause
from nfold.explain.causes.cost_model import (
    Contrast,
    CostModel,
    replica_step,
    with_both_inputs,
    without_retries,
)
from nfold.explain.causes.device_memory import MEMORY
from nfold.explain.design import ExperimentDesign, Input, Trial, replicas
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.estimate.samples import Samples
from nfold.explain.several_devices import one_device_trials


class SingleProcessCause(Cause):
    """One process (nn.DataParallel) against a process per device: its threads share an interpreter."""

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        return None if design.uses_one_process else "each device has its own process"

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        script = design.profile is not None
        full = design.actual()
        ranks = replicas(design, "real") if script else full.edit(strategy="ddp")
        return (without_retries(design, full, ranks),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            return pytorch.use_process_per_device(design.profile, design.devices)
        return "--strategy ddp"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if design.profile is not None:
            return {}
        full = design.actual()
        return {f"--strategy {name}": full.edit(strategy=name) for name in ("ddp", "nfold")}


class SingleProcessCosts(CostModel):
    """A process per device gains less than replicas: it exchanges gradients.

    DistributedDataParallel gains between ``gained_ms``, where no compute hides the gradient exchange
    of the replicas, and ``lost_ms``.
    """

    @property
    def refining_trials(self) -> tuple[Trial, ...]:
        if self.design.profile is None:
            return ()
        late = replicas(self.design, "real", exchange_after_backward=True)
        return (late, *one_device_trials(self.design))

    def gained_ms(self, view: MetricView) -> Samples:
        late = self.refining_trials[:1]
        if not late or not view.has(*late):
            return self.lost_ms(view)
        return view.step(self.design.actual()) - view.step(late[0])


SINGLE_PROCESS = SingleProcessCause(
    "single-process",
    affects_one_device=False,
    advice_in_words=True,
    model=SingleProcessCosts,
)


class ThreadsCause(Cause):
    """Cores, caches and memory bandwidth that N processes share, without real input.

    More threads than cores also delay the input: with fewer threads, a step gains more with real
    than with replayed batches.
    """

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        return ONE_PROCESS if design.profile is None and design.uses_one_process else None

    def observed_in_probe(self, design: ExperimentDesign) -> bool:
        return bool(design.facts.shared_cores)

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        def shared(input_: Input) -> Contrast:
            one, metric = design.one_device(input_), replica_step(design, input_)
            return Contrast(replicas(design, input_), one, metric=metric)

        return (with_both_inputs(design, shared), *_oversubscription(design))

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        if not has_too_many_threads(design):
            return ()
        own = design.one_device(design.cheapest_input)
        return (Contrast(own, own.under(threads=_cores_per_device(design))),)

    def costs(self, design: ExperimentDesign) -> ThreadsCosts:
        return ThreadsCosts(design, self.contrasts(design), self.one_device_contrasts(design))

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if not has_too_many_threads(design):
            return {}
        fewer = _cores_per_device(design)
        return {pytorch.limit_threads(design.facts, fewer): design.actual("real", threads=fewer)}

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.facts.shared_cores:
            return pytorch.restore_affinity(design.facts)
        if self.fixes(design):
            return next(iter(self.fixes(design)))
        if design.plan.device == "cpu":
            fewer = "give each fewer cores, or " if _cores_per_device(design) > 1 else ""
            return f"devices share caches and memory bandwidth: {fewer}use fewer devices"
        if design.profile is not None:
            return pytorch.reduce_host_contention(design.profile)
        return "fewer threads per rank: OMP_NUM_THREADS=1, and fewer --workers"


THREADS = ThreadsCause("threads")


class ThreadsCosts(CostModel):
    """Costs that processes cause each other, without their allocator retries."""

    def lost_ms(self, view: MetricView) -> Samples:
        shared, *_ = self.contrasts
        between = shared.exposed_ms(self.design, view) if view.has(*shared.trials) else 0.0
        # Allocator retries of several processes delay each other in the driver: cause "memory".
        retries = np.minimum(MEMORY.costs(self.design).lost_ms(view), between)
        return between - np.maximum(0.0, retries) + self.oversubscription_ms(view)

    def oversubscription_ms(self, view: MetricView) -> Samples:
        """Return what more threads than cores cost input, which looks like slow input; 0 if unknown."""
        known = [one for one in self.contrasts[1:] if view.has(*one.trials)]
        return known[0].cost_ms(view) if known else 0.0


def _oversubscription(design: ExperimentDesign) -> tuple[Contrast, ...]:
    if not has_too_many_threads(design) or not design.can_replay_input or design.uses_one_process:
        return ()
    fewer = _cores_per_device(design)
    real, replayed = (
        Contrast(design.actual(input_), design.actual(input_, threads=fewer))
        for input_ in ("real", "replayed")
    )
    return (Contrast(real.trial, real.base, less=replayed),)


def has_too_many_threads(design: ExperimentDesign) -> bool:
    """Return whether a rank of a script computes with more threads than it has cores."""
    return design.facts.threads > _cores_per_device(design)


def _cores_per_device(design: ExperimentDesign) -> int:
    return design.plan.cores_per_device or 1
