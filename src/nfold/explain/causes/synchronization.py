"""Synchronization: the cost of communication even without bytes, and of host reads."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from nfold.core.script_profile import ScriptProfile
from nfold.core.variant import Variant
from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import Cause, cached_per_view, exposed_ms
from nfold.explain.design import ExperimentDesign, Input, Trial
from nfold.explain.estimate.bootstrap import MetricView

WRAPPER, LATENCY = "the wrapper", "latency of one element per bucket"
BATCH_NORM, BUFFERS = "synchronised batch norm", "buffers broadcast in every forward"
REPEATED_ALL_REDUCE = "gradients exchanged with every micro-batch"
# Communication besides the gradient exchange of a step, by the field of Variant that removes it.
EXTRA_COLLECTIVES = {
    "synchronised_batch_norm": BATCH_NORM,
    "broadcast_buffers": BUFFERS,
    "exchange_each_micro_batch": REPEATED_ALL_REDUCE,
}


class SynchronizationCause(Cause):
    """The wrapper, one-element all-reduces, synchronised batch norm and host reads."""

    id: ClassVar[str] = "synchronization"
    removal: ClassVar[Variant] = Variant(synchronised_batch_norm=False)

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.has_host_reads or design.detects_anomalies:
            return None
        if design.sharded:
            return (
                "the collectives of FSDP cannot be removed one by one: all of their cost is in link"
            )
        return "one process drives all devices" if design.uses_one_process else None

    def observed_in_probe(self, design: ExperimentDesign) -> bool:
        return design.detects_anomalies

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        if design.uses_one_process or design.sharded:
            return ()
        return (
            *_replicas_to_barrier(design, design.cheapest_input),
            *_actual_to_one_allreduce(design),
        )

    def available_trials(self, design: ExperimentDesign, view: MetricView) -> tuple[Trial, ...]:
        if not self.multi_device_trials(design):
            return ()
        pairs = (
            *pairwise(_replicas_to_barrier(design, design.cheapest_input)),
            *pairwise(_actual_to_one_allreduce(design)),
        )
        known = [pair for pair in pairs if view.has(*pair)]
        return tuple(dict.fromkeys(trial for pair in known for trial in pair))

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return sum(self.components(design, view).values())

    @cached_per_view
    def components(self, design: ExperimentDesign, view: MetricView) -> dict[str, float]:
        if design.sharded:
            return {}
        cheapest = _replicas_to_barrier(design, design.cheapest_input)
        real = _replicas_to_barrier(design, "real")

        def wrapper(input_: Input) -> float:
            return view.reference_step(design.no_allreduce(input_)) - view.reference_step(
                design.replicas(input_)
            )

        def latency(input_: Input) -> float:
            return view.step(design.barrier_only(input_)) - view.slowest_rank_step(
                design.no_allreduce(input_)
            )

        found = {}
        if view.has(*cheapest[:2]):
            found[WRAPPER] = exposed_ms(design, view, wrapper, *real[:2])
        if view.has(*cheapest[1:]):
            found[LATENCY] = exposed_ms(design, view, latency, *real[1:])
        pairs = pairwise(_actual_to_one_allreduce(design))
        for name, pair in zip(_present_collectives(design).values(), pairs, strict=True):
            if view.has(*pair):
                found[name] = view.step(pair[0]) - view.step(pair[1])
        return found

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        own, without = design.one_device(design.cheapest_input), design.no_host_sync
        return (own, without) if own != without else ()

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        own, without = self.one_device_trials(design)
        return view.step(own) - view.step(without)

    def one_device_fix(self, design: ExperimentDesign, view: MetricView) -> str:
        assert design.profile is not None
        return "; ".join(_host_read_fixes(design, design.profile))

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        found = self.components(design, view)
        largest = max(found, key=lambda name: found[name])
        if design.profile is not None:
            search = _searches_unused_needlessly(design.profile)
            untried = search and not view.has(_without_unused_search(design))
            if untried and largest in (WRAPPER, LATENCY):
                return pytorch.disable_unused_search(design.profile)
            return _advice_for(design.profile, largest)
        if largest == BATCH_NORM:
            return "--batch-norm device, if the training allows it"
        if design.plan.device == "cuda" and "captured" not in str(design.plan.step):
            return "capture the step with its gradient exchange: --step captured --strategy nfold"
        return (
            "exchange gradients less often (--accumulate 2 at twice the batch), or a larger --batch"
        )

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if design.profile is not None:
            return _collective_fixes(design, design.profile)
        found: dict[str, Trial] = {}
        if design.synchronises_batch_norm:
            found["--batch-norm device"] = design.with_plan(batch_norm="device")
        if design.plan.device == "cuda" and design.plan.step == "eager":
            found["--step captured --strategy nfold"] = design.with_plan(
                step="captured", strategy="nfold"
            )
        if design.plan.strategy == "ddp":
            found["--strategy nfold"] = design.with_plan(strategy="nfold")
        return found


def _replicas_to_barrier(design: ExperimentDesign, input_: Input) -> tuple[Trial, Trial, Trial]:
    return design.replicas(input_), design.no_allreduce(input_), design.barrier_only(input_)


def _present_collectives(design: ExperimentDesign) -> dict[str, str]:
    removed = design.gradients_only
    return {field: name for field, name in EXTRA_COLLECTIVES.items() if not getattr(removed, field)}


def _actual_to_one_allreduce(design: ExperimentDesign) -> tuple[Trial, ...]:
    fields = tuple(_present_collectives(design))
    removed = [dict.fromkeys(fields[:count], False) for count in range(len(fields) + 1)]
    return tuple(design.actual("real", **changes) for changes in removed) if fields else ()


def _advice_for(profile: ScriptProfile, component: str) -> str:
    if component == BATCH_NORM:
        return pytorch.use_local_batch_norm(profile)
    if component == REPEATED_ALL_REDUCE:
        return pytorch.all_reduce_once(profile)
    if component == BUFFERS:
        return pytorch.disable_buffer_broadcast(profile)
    return pytorch.reduce_collectives(profile)


def _collective_fixes(design: ExperimentDesign, profile: ScriptProfile) -> dict[str, Trial]:
    found = {
        _advice_for(profile, name): design.actual("real", **{field: False})
        for field, name in _present_collectives(design).items()
    }
    if _searches_unused_needlessly(profile):
        found[pytorch.disable_unused_search(profile)] = _without_unused_search(design)
    return found | _host_read_fixes(design, profile)


def _host_read_fixes(design: ExperimentDesign, profile: ScriptProfile) -> dict[str, Trial]:
    found = {}
    if design.detects_anomalies:
        found[pytorch.disable_anomaly_detection(profile)] = design.actual(anomaly_detection=False)
    if design.has_host_reads:
        found[pytorch.reduce_host_reads(profile)] = design.actual(host_syncs=False)
    return found


def _searches_unused_needlessly(profile: ScriptProfile) -> bool:
    return profile.find_unused_parameters and not profile.unused_parameter_bytes


def _without_unused_search(design: ExperimentDesign) -> Trial:
    return design.actual("real", find_unused_parameters=False)
