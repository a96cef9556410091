"""Collectives: gradient bytes that compute does not hide, and the cost of waiting without bytes."""

from __future__ import annotations

from itertools import pairwise

from nfold.core.script_profile import ScriptProfile
from nfold.core.variant import Variant
from nfold.explain.advice import pytorch
from nfold.explain.advice.exchange_repairs import (
    many_collectives,
    repair_exchange,
    unchanged_rows,
)
from nfold.explain.advice.trainers import trainer_advice
from nfold.explain.causes.cause import ONE_PROCESS, Cause
from nfold.explain.causes.cost_model import Contrast, replica_step, with_both_inputs
from nfold.explain.design import (
    ExperimentDesign,
    Input,
    Trial,
    barrier_only,
    extra_collectives,
    no_allreduce,
    one_allreduce,
    replicas,
)
from nfold.explain.estimate.bootstrap import MetricView

SHARDING_TRAFFIC = "parameters gathered and gradients scattered, their latency included"
WRAPPER, LATENCY = "the wrapper", "latency of one element per bucket"
BATCH_NORM, BUFFERS = "synchronised batch norm", "buffers broadcast in every forward"
REPEATED_ALL_REDUCE = "gradients exchanged with every micro-batch"
# Communication besides the gradient exchange of a step, by the field of Variant that removes it.
EXTRA_COLLECTIVES = {
    "synchronised_batch_norm": BATCH_NORM,
    "broadcast_buffers": BUFFERS,
    "exchange_each_micro_batch": REPEATED_ALL_REDUCE,
}


class LinkCause(Cause):
    """Bytes between the devices of a host: the real gradient exchange against a barrier."""

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if _uses_gloo_for_gpus(design):
            return "gloo copies GPU tensors through the host: see network"
        return ONE_PROCESS if design.uses_one_process else None

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        def all_reduce(input_: Input) -> Contrast:
            whole, slowest = one_allreduce(design, input_), MetricView.slowest_rank_step
            if not design.facts.uses_fsdp:
                return Contrast(whole, barrier_only(design, input_))
            alone = replicas(design, input_)
            return Contrast(whole, alone, SHARDING_TRAFFIC, base_metric=slowest)

        return (with_both_inputs(design, all_reduce),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if repair := repair_exchange(design.facts):
            return repair
        if design.profile is not None:
            half_tried = any(map(view.has, self.fixes(design).values()))
            return pytorch.reduce_gradient_bytes(design.profile, half_tried=half_tried)
        return "send less or hide more: --exchange bf16, a larger --batch, --accumulate"

    def has_repair(self, design: ExperimentDesign) -> bool:
        return bool(repair_exchange(design.facts))

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if unchanged_rows(design.facts):
            return {}
        if design.profile is not None:
            advice = pytorch.halve_gradient_bytes(design.profile)
            kind = design.profile.compressed_gradient_type
            return {advice: design.actual(gradient_compression=kind)} if advice else {}
        if design.plan.exchange != "fp32":
            return {}
        found = {"--exchange bf16": design.actual().edit(exchange="bf16")}
        if design.plan.strategy == "ddp":
            found["--strategy nfold"] = design.actual().edit(strategy="nfold")
        return found


def _uses_gloo_for_gpus(design: ExperimentDesign) -> bool:
    return design.facts.backend == "gloo" and design.plan.device == "cuda"


class NetworkCause(LinkCause):
    """The same through the host, by gloo. Communication between several hosts is not measured."""

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        return None if _uses_gloo_for_gpus(design) else "all devices are on one host"

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        return pytorch.USE_NCCL


LINK = LinkCause("link", removal=Variant(exchange="barrier"), affects_one_device=False)
NETWORK = NetworkCause("network", removal=LINK.removal, affects_one_device=False)


class SynchronizationCause(Cause):
    """The wrapper, one-element all-reduces, synchronised batch norm and host reads."""

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if _has_host_reads(design) or design.facts.detects_anomalies:
            return None
        if design.facts.uses_fsdp:
            return (
                "the collectives of FSDP cannot be removed one by one: all of their cost is in link"
            )
        return ONE_PROCESS if design.uses_one_process else None

    def observed_in_probe(self, design: ExperimentDesign) -> bool:
        return design.facts.detects_anomalies

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        if design.uses_one_process or design.facts.uses_fsdp:
            return ()
        slowest = MetricView.slowest_rank_step

        def latency(input_: Input) -> Contrast:
            barrier, none = barrier_only(design, input_), no_allreduce(design, input_)
            return Contrast(barrier, none, LATENCY, base_metric=slowest, base_first=True)

        fields = extra_collectives(design)
        removed = [dict.fromkeys(fields[:count], False) for count in range(len(fields) + 1)]
        pairs = pairwise(design.actual("real", **changes) for changes in removed)
        wrapper = (
            () if repeats_gathered_work(design.facts) else (wrapper_contrast(design, WRAPPER),)
        )
        return (
            *wrapper,
            with_both_inputs(design, latency),
            *(
                Contrast(*pair, EXTRA_COLLECTIVES[field])
                for field, pair in zip(fields, pairs, strict=True)
            ),
        )

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        own, without = design.one_device(design.cheapest_input), without_host_syncs(design)
        return (Contrast(own, without),) if own != without else ()

    def one_device_fix(self, design: ExperimentDesign, view: MetricView) -> str:
        return "; ".join(_host_read_fixes(design))

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        found = self.costs(design).components(view)
        largest = max(found, key=lambda name: found[name])
        if design.profile is not None:
            search = _searches_unused_needlessly(design.profile)
            untried = search and not view.has(_without_unused_search(design))
            if untried and largest in (WRAPPER, LATENCY):
                return pytorch.disable_unused_search(design.profile)
            if largest == LATENCY and many_collectives(design.profile) is not None:
                return repair_exchange(design.profile)
            return _advice_for(design.profile, largest)
        if largest == BATCH_NORM:
            return "--batch-norm device, if the training allows it"
        if design.plan.device == "cuda" and "captured" not in str(design.plan.step):
            return "capture the step with its gradient exchange: --step captured --strategy nfold"
        return (
            "exchange gradients less often (--accumulate 2 at twice the batch), or a larger --batch"
        )

    def has_repair(self, design: ExperimentDesign) -> bool:
        repeats = "exchange_each_micro_batch" in extra_collectives(design)
        return repeats or many_collectives(design.facts) is not None

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        found: dict[str, Trial] = {}
        if design.profile is not None:
            for field in extra_collectives(design):
                advice = _advice_for(design.profile, EXTRA_COLLECTIVES[field])
                found[advice] = design.actual("real", **{field: False})
            if _searches_unused_needlessly(design.profile):
                advice = pytorch.disable_unused_search(design.profile)
                found[advice] = _without_unused_search(design)
            return found | _host_read_fixes(design)
        full = design.actual()
        if design.plan.batch_norm == "synchronised":
            found["--batch-norm device"] = full.edit(batch_norm="device")
        if design.plan.device == "cuda" and design.plan.step == "eager":
            captured = full.edit(step="captured", strategy="nfold")
            found["--step captured --strategy nfold"] = captured
        if design.plan.strategy == "ddp":
            found["--strategy nfold"] = full.edit(strategy="nfold")
        return found


SYNCHRONIZATION = SynchronizationCause(
    "synchronization", removal=Variant(synchronised_batch_norm=False)
)


def repeats_gathered_work(profile: ScriptProfile) -> bool:
    """Return whether every rank computes for samples that it gathers from all ranks."""
    return "gathered_work" in profile.source_locations and not profile.uses_fsdp


def wrapper_contrast(design: ExperimentDesign, name: str) -> Contrast:
    """Return ranks that do not communicate against replicas: the same work, but for the wrapper."""

    def contrast(input_: Input) -> Contrast:
        alone, none = replicas(design, input_), no_allreduce(design, input_)
        base = replica_step(design, input_)
        return Contrast(none, alone, name, MetricView.reference_step, base, base_first=True)

    return with_both_inputs(design, contrast)


def without_host_syncs(design: ExperimentDesign) -> Trial:
    """Return one device alone with the cheapest input, whose host waits for no value."""
    return design.one_device(
        design.cheapest_input,
        host_syncs=not _has_host_reads(design),
        anomaly_detection=not design.facts.detects_anomalies,
    )


def _has_host_reads(design: ExperimentDesign) -> bool:
    return Variant.host_syncs.is_useful(design.facts) and design.plan.device == "cuda"


def _advice_for(profile: ScriptProfile, component: str) -> str:
    advice = {
        BATCH_NORM: lambda profile: trainer_advice(profile).batch_norm,
        REPEATED_ALL_REDUCE: pytorch.all_reduce_once,
        BUFFERS: pytorch.disable_buffer_broadcast,
    }
    return advice.get(component, pytorch.reduce_collectives)(profile)


def _host_read_fixes(design: ExperimentDesign) -> dict[str, Trial]:
    found, profile = {}, design.facts
    if profile.detects_anomalies:
        found[pytorch.disable_anomaly_detection(profile)] = design.actual(anomaly_detection=False)
    if _has_host_reads(design):
        found[pytorch.reduce_host_reads(profile)] = design.actual(host_syncs=False)
    return found


def _searches_unused_needlessly(profile: ScriptProfile) -> bool:
    return profile.find_unused_parameters and not profile.unused_parameter_bytes


def _without_unused_search(design: ExperimentDesign) -> Trial:
    return design.actual("real", find_unused_parameters=False)
