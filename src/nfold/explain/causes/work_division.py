"""C10: every device trains on the same samples. Seen by the hashes of what each rank was fed."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import Cause, cached_per_view, exposed_ms
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.metrics import slow_clock_advice

SAME_SAMPLES = "same_samples"
"""The doubt that a measurement carries where it is so."""


class UndividedWorkCause(Cause):
    """N devices make the same step N times: exactly N times the work."""

    id: ClassVar[str] = "undivided-work"

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return (design.actual(),)

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return (design.devices - 1) * view.step(design.actual())

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            return pytorch.divide_samples(design.profile)
        return "give every rank its own samples: DistributedSampler, or run.loader"


# C9: waiting for the slowest rank. What ranks would wait, by their own steps without an exchange.
#
# A kernel's time in a collective holds the waiting for late ranks too; the steps of ranks that do
# not wait tell both apart.

SLOW_RANK_RATIO = 1.02


class ImbalanceCause(Cause):
    """A slow device, uneven work, or steps that vary from rank to rank."""

    id: ClassVar[str] = "imbalance"

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        return "one process drives all devices" if design.uses_one_process else None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return (design.no_allreduce(design.cheapest_input),)

    @cached_per_view
    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return exposed_ms(
            design,
            view,
            lambda input_: (
                view.slowest_rank_step(design.no_allreduce(input_))
                - view.reference_step(design.no_allreduce(input_))
            ),
            design.no_allreduce("real"),
        )

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        if design.devices == 1:
            return ()
        return (*self.trials(design), design.one_device(design.cheapest_input))

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        (rung, _) = self.one_device_trials(design)
        if len(view.reference) != 1:
            return 0.0
        return view.reference_step(rung) - min(view.step_by_rank(rung).values())

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        slow, times = _slow_rank(view, design.no_allreduce(design.cheapest_input))
        if slow is None:
            return "steps vary from rank to rank: look for work that only some steps have"
        pause_ms = _extra_host_gap_ms(design, view, slow)
        if design.profile is not None and pause_ms is not None:
            return pytorch.reduce_rank_host_gap(design, slow, pause_ms)
        moved, _ = _slow_rank(
            view, design.no_allreduce(design.cheapest_input, rotated_devices(design))
        )
        if moved == slow:
            return f"rank {slow}'s share of the work is larger or slower: divide it evenly"
        clock = slow_clock_advice(design.clock_rates, slow, times)
        if moved is None:
            both = "compare its device and its share of the data"
            return f"rank {slow} is slow: {clock or both}"
        return f"device {slow} is slow: {clock or _inspect_device(design)}"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        return {"": design.no_allreduce(design.cheapest_input, rotated_devices(design))}


def rotated_devices(design: ExperimentDesign) -> tuple[int, ...]:
    """Every rank on its neighbour's device."""
    return (*range(1, design.devices), 0)


def _inspect_device(design: ExperimentDesign) -> str:
    if design.clock_rates:
        return "its clock is not: look at its links and what else runs there, or leave it out"
    return "look at its clock and temperature, or leave it out"


def _extra_host_gap_ms(design: ExperimentDesign, view: MetricView, slow: int) -> float | None:
    """By how much the rank is slower because its host is away longer between two steps of a script,
    if that is most of it. In that time it may wait for its device, too.
    """
    if not design.host_gaps_ms:
        return None
    more = design.host_gaps_ms[slow] - min(design.host_gaps_ms)
    own = view.step_by_rank(design.no_allreduce(design.cheapest_input))
    slower = own[slow] - min(own.values())
    return min(more, slower) if 2 * more > slower else None


def _slow_rank(view: MetricView, trial: Trial) -> tuple[int | None, float]:
    """The rank that is slower than the others by itself, if one is, and how many times as long its
    steps are as those of the next one.
    """
    own = view.step_by_rank(trial)
    if len(own) < 2:
        return None, 1.0
    slow = max(own, key=lambda rank: own[rank])
    second = max(value for rank, value in own.items() if rank != slow)
    return slow if own[slow] > SLOW_RANK_RATIO * second else None, own[slow] / second
