"""What an explanation says in three sentences: what costs most, what to change, what to expect."""

from __future__ import annotations

from nfold.finding import FLOOR, NO_TIME, Budget, Finding, milliseconds, no_help, times
from nfold.measurement import UNEXCHANGED

MENTIONED = 3
"""Rows within the noise that are told, where nothing has a name."""


def sentences(budget: Budget) -> list[str]:
    """What costs most, what to change, what to expect."""
    if any(UNEXCHANGED in text for text in budget.wrong):
        return _unexchanged(budget)
    if budget.cannot_help:
        return no_help(budget)
    return _named(budget, budget.named[0]) if budget.named else _nameless(budget)


def _named(budget: Budget, first: Finding) -> list[str]:
    on_n = first in budget.rows
    step = budget.n_devices.step_ms if on_n else budget.one_device.step_ms
    part = 100 * first.lost_ms.value / step.value
    where = f"of a step on {budget.devices} devices" if on_n else "of a step even on one device"
    return [
        f"Most is lost to {first.cause} ({first.what}): {milliseconds(first.lost_ms)}, "
        f"{part:.0f} % {where}.",
        f"Change: {first.fix}.",
        _expectation(budget, first, on_n=on_n),
    ]


def _nameless(budget: Budget) -> list[str]:
    """No row is a cause: perhaps one was not measured, or what is missing has no name."""
    left = [cause for cause, reason in budget.untested if reason == NO_TIME]
    if left:
        return [
            f"Nothing that was measured costs more than {FLOOR:.0%} of a step beyond the noise.",
            f"Change nothing yet: there was no time for {', '.join(left)}; next: a larger "
            "--budget, which goes on from here.",
            _as_it_is(budget),
        ]
    if _is_missing(budget):
        return _spread(budget)
    return [
        f"No cause costs more than {FLOOR:.0%} of a step beyond the noise.",
        "There is nothing to change.",
        _as_it_is(budget),
    ]


def _unexchanged(budget: Budget) -> list[str]:
    return [
        f"The training on {budget.devices} devices is wrong: {'; '.join(budget.wrong)}.",
        "Change that first: DistributedDataParallel, or tell the trainer of all processes.",
        _as_it_is(budget, ", sharing no work"),
    ]


def _as_it_is(budget: Budget, more: str = "") -> str:
    return f"{budget.devices} devices are {times(budget.speedup)} as fast as one{more}."


def _expectation(budget: Budget, first: Finding, *, on_n: bool) -> str:
    if first.predicted_speedup is None:
        return "No prediction: what the change gains was not measured."
    how = "as measured with the change" if first.proven else "if the whole cost goes"
    rate, bound = first.predicted_samples_per_s, first.bound_samples_per_s
    at_rate = f", {budget.devices} devices at {rate.value:,.0f} samples/s" if rate else ""
    if first.proven and bound is not None:
        how += f" ({bound.value:,.0f} if the whole cost went)"
    if not on_n:
        gain = times(first.predicted_speedup)
        return f"Expect one device to be {gain} as fast{at_rate}, {how}."
    return (
        f"Expect {times(first.predicted_speedup)} of one device instead of "
        f"{times(budget.speedup)}{at_rate}, {how}."
    )


def _is_missing(budget: Budget) -> bool:
    """Whether something has no name. To say so takes less than to name a cause for it."""
    least = FLOOR * budget.n_devices.step_ms.value
    rests = (budget.others_ms, budget.unexplained_ms)
    return any(rest.low is not None and rest.low > 0 and rest.value > least for rest in rests)


def _spread(budget: Budget) -> list[str]:
    """Something is missing, and no row by itself is above the noise."""
    step_ms, ideal_ms = budget.n_devices.step_ms.value, budget.ideal_ms.value
    missing = step_ms - ideal_ms
    largest = [row for row in budget.rows if row.lost_ms.value > 0][:MENTIONED]
    parts = ", ".join(f"{row.cause} {row.lost_ms.value:.2f}" for row in largest)
    over = f"Measured were {parts} ms, none" if parts else "No single cause is"
    return [
        f"{missing:.2f} ms, {missing / step_ms:.0%} of a step, is missing to "
        f"{budget.devices}-fold. {over} above the noise of these runs.",
        "Change nothing yet: measure longer (a larger --budget), with the machine to itself.",
        _as_it_is(budget),
    ]
