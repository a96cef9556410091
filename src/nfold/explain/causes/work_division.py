"""Work division: devices that train on the same samples, and ranks that wait for the slowest."""

from __future__ import annotations

from nfold.explain.advice import pytorch
from nfold.explain.advice.trainers import trainer_advice
from nfold.explain.causes.cause import ONE_PROCESS, Cause
from nfold.explain.causes.cost_model import Contrast, with_both_inputs, zero
from nfold.explain.design import ExperimentDesign, Input, Trial, no_allreduce
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.estimate.samples import Samples, smallest
from nfold.explain.metrics import slow_clock_advice

SLOW_RANK_RATIO = 1.02  # of the slowest rank's step over that of the next


class UndividedWorkCause(Cause):
    """All devices train on the same samples: exactly N times the work."""

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        def repeated_work(view: MetricView, trial: Trial) -> Samples:
            return (design.devices - 1) * view.step(trial)

        full = design.actual()
        return (Contrast(full, full, metric=repeated_work, base_metric=zero),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            sampler = trainer_advice(design.profile).sampler
            return pytorch.at_event(design.profile, "loader", sampler)
        return "give every rank its own samples: DistributedSampler, or run.loader"


UNDIVIDED_WORK = UndividedWorkCause("undivided-work", affects_one_device=False)


class ImbalanceCause(Cause):
    """A slow device, uneven work, or steps that vary from rank to rank.

    The time of a collective contains the wait for late ranks. The steps of ranks without gradient
    exchange show that wait alone.
    """

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        return ONE_PROCESS if design.uses_one_process else None

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        def slowest(input_: Input) -> Contrast:
            ranks = no_allreduce(design, input_)
            metrics = MetricView.slowest_rank_step, MetricView.reference_step
            return Contrast(ranks, ranks, "", *metrics)

        return (with_both_inputs(design, slowest),)

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        if design.devices == 1:
            return ()

        def excess_of_reference(view: MetricView, trial: Trial) -> Samples:
            if len(view.reference) != 1:
                return 0.0
            return view.reference_step(trial) - smallest(view.step_by_rank(trial).values())

        # The step of one device alone shows which rank is the reference.
        ranks, one = (
            no_allreduce(design, design.cheapest_input),
            design.one_device(design.cheapest_input),
        )
        return (Contrast(ranks, one, metric=excess_of_reference, base_metric=zero),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        slow, slowdown = _slow_rank(view, no_allreduce(design, design.cheapest_input))
        if slow is None:
            return "steps vary from rank to rank: look for work that only some steps have"
        gap_ms = _extra_host_gap_ms(design, view, slow)
        if design.profile is not None and gap_ms is not None:
            return pytorch.reduce_rank_host_gap(design, slow, gap_ms)
        moved, _ = _slow_rank(view, _on_rotated_devices(design))
        if moved == slow:
            return f"rank {slow}'s share of the work is larger or slower: divide it evenly"
        clock = slow_clock_advice(design.clock_rates, slow, slowdown)
        if moved is None:
            return f"rank {slow} is slow: {clock or 'compare its device and its share of the data'}"
        other = "check its clock and temperature, or exclude it"
        if design.clock_rates:
            other = "its clock is not: check its links and other processes on it, or exclude it"
        return f"device {slow} is slow: {clock or other}"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        return {"": _on_rotated_devices(design)}


IMBALANCE = ImbalanceCause("imbalance")


def _on_rotated_devices(design: ExperimentDesign) -> Trial:
    # Every rank is on its neighbour's device.
    return no_allreduce(design, design.cheapest_input, (*range(1, design.devices), 0))


def _extra_host_gap_ms(design: ExperimentDesign, view: MetricView, slow: int) -> float | None:
    """Return how much slower the rank is because of a longer host gap, if that is most of it.

    In that time the host may also wait for its device.
    """
    if not design.host_gaps_ms:
        return None
    extra = design.host_gaps_ms[slow] - min(design.host_gaps_ms)
    steps = view.step_by_rank(no_allreduce(design, design.cheapest_input))
    slower = float(steps[slow] - smallest(steps.values()))
    return min(extra, slower) if 2 * extra > slower else None


def _slow_rank(view: MetricView, trial: Trial) -> tuple[int | None, float]:
    """Return the rank that is slower than all others, if any, and its step over the next one's."""
    steps = view.step_by_rank(trial)
    if len(steps) < 2:
        return None, 1.0
    slow = max(steps, key=lambda rank: steps[rank])
    second = max(value for rank, value in steps.items() if rank != slow)
    slowdown = float(steps[slow] / second)
    return slow if slowdown > SLOW_RANK_RATIO else None, slowdown
