"""What an explanation says in three sentences: what costs most, what to change, what to expect."""

from __future__ import annotations

from nfold.core.format import format_milliseconds_interval, format_ratio_interval
from nfold.core.measurement import NO_GRADIENT_EXCHANGE
from nfold.explain.result.budget import (
    CAUSE_DESCRIPTIONS,
    MIN_STEP_FRACTION,
    Budget,
    Finding,
    LowerBound,
    explain_no_speedup,
)

SAME_LOSS_FRACTION = 0.95
"""Of a cost on N devices: one device that loses so much of it loses the same."""
NOISE_FRACTION = 0.2
"""Of a step: where the noise may hide more, nobody can say that there is nothing to change."""
MEASURE_LONGER = (
    "Change nothing yet: measure longer (a larger --budget), with the machine to itself."
)
MAX_MENTIONED = 3
"""Rows within the noise that are told, where nothing has a name."""


def write_conclusion(budget: Budget) -> list[str]:
    """What costs most, what to change, what to expect."""
    if any(NO_GRADIENT_EXCHANGE in text for text in budget.training_errors):
        return _no_all_reduce_conclusion(budget)
    if budget.devices_cannot_help:
        return explain_no_speedup(budget)
    known = [
        MIN_STEP_FRACTION * budget.n_devices.step_ms.value,
        *(row.total_ms.value for row in budget.significant),
    ]
    if budget.lower_bound is not None and budget.lower_bound.lost_ms > max(known):
        return _lower_bound_conclusion(budget, budget.lower_bound)
    return (
        _significant_conclusion(budget, budget.significant[0])
        if budget.significant
        else _no_cause_conclusion(budget)
    )


def _lower_bound_conclusion(budget: Budget, least: LowerBound) -> list[str]:
    devices = f"{least.steps:,} steps on {least.devices} device{'s' * (least.devices != 1)}"
    rest = [
        f"Of what was measured most is lost to {_loss(budget, one)}." for one in budget.significant
    ]
    seconds = f"{least.seconds:,.2f} s" if least.is_complete else f"more than {least.seconds:.0f} s"
    why = "that of one device is not known" if least.is_complete else "nobody waited for its end"
    cost = f"{seconds} after an epoch, {least.lost_ms:.2f} ms of each of its {devices}"
    return [
        *_largest_loss(
            budget, least.lost_ms, f"{least.cause} ({CAUSE_DESCRIPTIONS[least.cause]}): {cost}."
        ),
        f"Change: {least.fix}.",
        f"No row holds this cost, because {why}; next: a larger --budget.",
        *(rest[:1] or [_current_speed(budget)]),
    ]


def _largest_loss(budget: Budget, ms: float, text: str) -> list[str]:
    rest, others = budget.not_attributed_ms, budget.not_significant_ms
    if budget.may_miss_causes and rest.value > ms:
        return [
            f"{_not_attributed(budget)}: {_skipped_causes(budget)}.",
            f"Of what was measured most is lost to {text}",
        ]
    if budget.is_time_missing(others) and others.value > ms:
        return [
            f"{_not_significant(budget)}: measure longer (a larger --budget).",
            f"Of what is above it most is lost to {text}",
        ]
    return [f"Most is lost to {text}"]


def _skipped_causes(budget: Budget) -> str:
    causes = ", ".join(budget.skipped_causes)
    return f"there was no time for {causes}; next: a larger --budget, which goes on from here"


def _significant_conclusion(budget: Budget, first: Finding) -> list[str]:
    cost, change = f"{_loss(budget, first)}.", _change_and_expectation(budget, first)
    most = _largest_loss(budget, first.total_ms.value, cost)
    if len(most) == 1:
        return [*most, *change, *_largest_multi_device_loss(budget, first)]
    return [most[0], f"{most[1]} {change[0]}", *change[1:]]


def _not_attributed(budget: Budget) -> str:
    return f"Most is in no row yet, {format_milliseconds_interval(budget.not_attributed_ms)} of {_step_name(budget)}"


def _not_significant(budget: Budget) -> str:
    return (
        f"Most, {format_milliseconds_interval(budget.not_significant_ms)} of "
        f"{_step_name(budget)}, is in rows of which none by "
        f"itself is above the noise of these runs ({_largest_not_significant(budget)} ms)"
    )


def _change_and_expectation(budget: Budget, first: Finding) -> list[str]:
    """What to change and what to expect; where that costs more than it wins, the next that does
    not, if there is one.
    """
    if first.predicted_speedup is None or not budget.fix_is_slower(first):
        expected = _expectation(budget, first, on_n=first in budget.rows)
        return [f"Change: {first.fix}.", expected]
    now = format_ratio_interval(budget.speedup) if first in budget.rows else "1 ×"
    told = (
        f"Its change does not pay here: {first.fix} would make it "
        f"{format_ratio_interval(first.predicted_speedup)} of one device; it is {now} now."
    )
    better = next((row for row in budget.significant if not budget.fix_is_slower(row)), None)
    if better is None:
        return [told, _current_speed(budget)]
    expected = _expectation(budget, better, on_n=better in budget.rows)
    return [told, f"Change for {better.cause}: {better.fix}.", expected]


def _loss(budget: Budget, first: Finding) -> str:
    cost, step = first.total_ms, budget.n_devices.step_ms
    part = f"{100 * cost.value / step.value:.0f} % of {_step_name(budget)}"
    told = f"{first.cause} ({first.description}): {format_milliseconds_interval(cost)}, {part}"
    if budget.devices == 1:
        return told
    alone = next((row.lost_ms for row in budget.one_device_rows if row.cause == first.cause), None)
    if alone is None or alone.value < MIN_STEP_FRACTION * step.value:
        return told
    if alone.value > SAME_LOSS_FRACTION * cost.value:
        return f"{told}; one device alone loses as much"
    return f"{told}, of which one device alone loses {alone.value:.2f} ms"


def _step_name(budget: Budget) -> str:
    return f"a step on {budget.devices} devices" if budget.devices > 1 else "a step"


def _largest_multi_device_loss(budget: Budget, first: Finding) -> list[str]:
    more = next((row for row in budget.rows if row.significant), None)
    if more is None or first in budget.rows:
        return []
    return [
        f"Of what is missing to {budget.devices}-fold most is {more.cause} ({more.description}): "
        f"{format_milliseconds_interval(more.lost_ms)}."
    ]


def _no_cause_conclusion(budget: Budget) -> list[str]:
    if budget.skipped_causes:
        return [
            _largest_unknown(budget),
            f"Change nothing yet: {_skipped_causes(budget)}.",
            _current_speed(budget),
        ]
    if _is_missing(budget):
        return _many_small_losses(budget)
    if _noise_may_hide(budget):
        return [
            "No cause is above the noise of these runs, but that is large: all rows together cost "
            f"{format_milliseconds_interval(budget.not_significant_ms)} of {_step_name(budget)}.",
            MEASURE_LONGER,
            _current_speed(budget),
        ]
    return [
        f"No cause costs more than {MIN_STEP_FRACTION:.0%} of a step beyond the noise.",
        "There is nothing to change.",
        _current_speed(budget),
    ]


def _noise_may_hide(budget: Budget) -> bool:
    most = budget.not_significant_ms.high
    return most is not None and most > NOISE_FRACTION * budget.n_devices.step_ms.value


def _largest_unknown(budget: Budget) -> str:
    rest, others = budget.not_attributed_ms, budget.not_significant_ms
    if budget.may_miss_causes and rest.value > others.value:
        return f"{_not_attributed(budget)}."
    if budget.is_time_missing(others):
        return f"{_not_significant(budget)}."
    return f"Nothing that was measured costs more than {MIN_STEP_FRACTION:.0%} of a step beyond the noise."


def _no_all_reduce_conclusion(budget: Budget) -> list[str]:
    return [
        f"The training on {budget.devices} devices is wrong: {'; '.join(budget.training_errors)}.",
        "Change that first: DistributedDataParallel, or tell the trainer of all processes.",
        _current_speed(budget, ", sharing no work"),
    ]


def _current_speed(budget: Budget, more: str = "") -> str:
    if budget.devices > 1:
        return f"{budget.devices} devices are {format_ratio_interval(budget.speedup)} as fast as one{more}."
    rate, bound = budget.one_device.samples_per_s.value, budget.device_bound
    alone = f"; its compute alone would do {bound.samples_per_s.value:,.0f}" if bound else ""
    return f"The device does {rate:,.0f} samples/s{alone}."


def _expectation(budget: Budget, first: Finding, *, on_n: bool) -> str:
    if first.predicted_speedup is None:
        return "No prediction: what the change gains was not measured."
    gain, rate = format_ratio_interval(first.predicted_speedup), _rate(budget, first)
    if budget.devices == 1:
        return f"Expect {gain} of its speed{rate}, {_evidence(first)}."
    if not on_n:
        measured = ", as measured with the change" if first.fix_measured and rate else ""
        return f"Expect one device to be {gain} as fast if the whole cost goes{rate}{measured}."
    expected = f"Expect {gain} of one device instead of {format_ratio_interval(budget.speedup)}"
    if first.fix_measured or _same_on_one(budget, first):
        return f"{expected}{rate}, {_evidence(first)}."
    return f"{expected} where they lose no more to it than one does{rate} without any of it."


def _rate(budget: Budget, first: Finding) -> str:
    rate = first.predicted_samples_per_s
    which = f"{budget.devices} devices at " if budget.devices > 1 else ""
    return f", {which}{rate.value:,.0f} samples/s" if rate else ""


def _evidence(first: Finding) -> str:
    if not first.fix_measured:
        return "if the whole cost goes"
    rate, bound = first.predicted_samples_per_s, first.bound_samples_per_s
    more = (
        rate is not None
        and bound is not None
        and bound.value > (1 + MIN_STEP_FRACTION) * rate.value
    )
    most = f" ({bound.value:,.0f} if the whole cost went)" if bound and more else ""
    return f"as measured with the change{most}"


def _same_on_one(budget: Budget, first: Finding) -> bool:
    rate, gain = first.predicted_samples_per_s, first.predicted_speedup
    if rate is None or gain is None:
        return True
    one = budget.one_device.samples_per_s.value
    return abs(rate.value / (gain.value * one) - 1) < MIN_STEP_FRACTION


def _is_missing(budget: Budget) -> bool:
    return budget.is_time_missing(budget.not_significant_ms) or budget.is_time_missing(
        budget.not_attributed_ms
    )


def _largest_not_significant(budget: Budget) -> str:
    rows = budget.rows if budget.devices > 1 else budget.one_device_rows
    found = [row for row in rows if not row.significant and row.lost_ms.value > 0][:MAX_MENTIONED]
    return ", ".join(f"{row.cause} {row.lost_ms.value:.2f}" for row in found)


def _many_small_losses(budget: Budget) -> list[str]:
    step_ms, parts = budget.n_devices.step_ms.value, _largest_not_significant(budget)
    missing = step_ms - budget.goal_ms
    over = f"Measured were {parts} ms, none by itself" if parts else "No single cause is"
    told = parts and budget.is_time_missing(budget.not_significant_ms)
    together = (
        f"; together they cost {format_milliseconds_interval(budget.not_significant_ms)}"
        if told
        else ""
    )
    return [
        f"{missing:.2f} ms, {missing / step_ms:.0%} of a step, is missing to "
        f"{budget.goal_label}. {over} above the noise of these runs{together}.",
        MEASURE_LONGER,
        _current_speed(budget),
    ]
