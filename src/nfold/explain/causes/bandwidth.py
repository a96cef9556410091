"""Bandwidth: gradient bytes that compute does not hide, within a host and between hosts."""

from __future__ import annotations

from typing import ClassVar

from nfold.core.variant import Variant
from nfold.explain.advice import communication, pytorch
from nfold.explain.causes.cause import Cause, cached_per_view, exposed_ms
from nfold.explain.design import ExperimentDesign, Input, Trial
from nfold.explain.estimate.bootstrap import MetricView

SHARDING_TRAFFIC = "parameters gathered and gradients scattered, their latency included"


class LinkCause(Cause):
    """Bytes between the devices of a host: the real gradient exchange against a barrier."""

    id: ClassVar[str] = "link"
    removal: ClassVar[Variant] = Variant(exchange="barrier")

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if uses_gloo_for_gpus(design):
            return "gloo copies GPU tensors through the host: see network"
        return "one process drives all devices" if design.uses_one_process else None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return _actual_and_barrier(design, design.cheapest_input)

    @cached_per_view
    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        def cost(input_: Input) -> float:
            full, barrier = _actual_and_barrier(design, input_)
            least = view.slowest_rank_step(barrier) if design.sharded else view.step(barrier)
            return view.step(full) - least

        return exposed_ms(design, view, cost, *_actual_and_barrier(design, "real"))

    def components(self, design: ExperimentDesign, view: MetricView) -> dict[str, float]:
        return {SHARDING_TRAFFIC: self.lost_ms(design, view)} if design.sharded else {}

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            return communication.reduce_gradient_bytes(
                design.profile, half_tried=bool(self.tried_fixes(design, view))
            )
        return "send less or hide more: --exchange bf16, a larger --batch, --accumulate"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if design.profile is not None:
            advice = communication.halve_gradient_bytes(design.profile)
            return {advice: design.actual(exchange="half")} if advice else {}
        if design.plan.exchange != "fp32":
            return {}
        found = {"--exchange bf16": design.with_plan(exchange="bf16")}
        if design.plan.strategy == "ddp":
            found["--strategy nfold"] = design.with_plan(strategy="nfold")
        return found


def _actual_and_barrier(design: ExperimentDesign, input_: Input) -> tuple[Trial, Trial]:
    barrier = design.no_allreduce(input_) if design.sharded else design.barrier_only(input_)
    return design.one_allreduce(input_), barrier


def uses_gloo_for_gpus(design: ExperimentDesign) -> bool:
    """Whether a script exchanges GPU tensors with gloo, which copies them to the host and back."""
    profile = design.profile
    return profile is not None and profile.backend == "gloo" and design.plan.device == "cuda"


class NetworkCause(LinkCause):
    """The same through the host, by gloo. Communication between several hosts is not measured."""

    id: ClassVar[str] = "network"

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        return None if uses_gloo_for_gpus(design) else "all devices are on one host"

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        del design, view
        return pytorch.USE_NCCL
