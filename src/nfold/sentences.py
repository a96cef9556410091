"""What an explanation says in three sentences: what costs most, what to change, what to expect."""

from __future__ import annotations

from nfold.amounts import milliseconds, times
from nfold.budget import Budget, no_help
from nfold.finding import CAUSES, FLOOR, AtLeast, Finding
from nfold.measurement import UNEXCHANGED

AS_MUCH = 0.95
"""Of a cost on N devices: one device that loses so much of it loses the same."""
HIDDEN = 0.2
"""Of a step: where the noise may hide more, nobody can say that there is nothing to change."""
MEASURE_LONGER = (
    "Change nothing yet: measure longer (a larger --budget), with the machine to itself."
)
MENTIONED = 3
"""Rows within the noise that are told, where nothing has a name."""


def sentences(budget: Budget) -> list[str]:
    """What costs most, what to change, what to expect."""
    if any(UNEXCHANGED in text for text in budget.wrong):
        return _unexchanged(budget)
    if budget.cannot_help:
        return no_help(budget)
    known = [FLOOR * budget.n_devices.step_ms.value, *(row.all_ms.value for row in budget.named)]
    if budget.at_least is not None and budget.at_least.lost_ms > max(known):
        return _unfinished(budget, budget.at_least)
    return _named(budget, budget.named[0]) if budget.named else _nameless(budget)


def _unfinished(budget: Budget, least: AtLeast) -> list[str]:
    """A cause of which is known only that it costs more than all others that have a name."""
    devices = f"{least.steps:,} steps on {least.devices} device{'s' * (least.devices != 1)}"
    rest = [f"Of what was measured most is lost to {_cost(budget, one)}." for one in budget.named]
    seconds = f"{least.seconds:,.2f} s" if least.whole else f"more than {least.seconds:.0f} s"
    why = "that of one device is not known" if least.whole else "nobody waited for its end"
    cost = f"{seconds} after an epoch, {least.lost_ms:.2f} ms of each of its {devices}"
    return [
        *_most(budget, least.lost_ms, f"{least.cause} ({CAUSES[least.cause]}): {cost}."),
        f"Change: {least.fix}.",
        f"No row holds this cost, because {why}; next: a larger --budget.",
        *(rest[:1] or [_as_it_is(budget)]),
    ]


def _most(budget: Budget, ms: float, told: str) -> list[str]:
    """That most is lost to what costs ``ms``, unless more is where nothing has a name."""
    rest, others = budget.unexplained_ms, budget.others_ms
    if budget.unseen and rest.value > ms:
        return [
            f"{_in_no_row(budget)}: {_no_time(budget)}.",
            f"Of what was measured most is lost to {told}",
        ]
    if budget.misses(others) and others.value > ms:
        return [
            f"{_in_no_name(budget)}: measure longer (a larger --budget).",
            f"Of what is above it most is lost to {told}",
        ]
    return [f"Most is lost to {told}"]


def _no_time(budget: Budget) -> str:
    """The causes that there was none for."""
    causes = ", ".join(budget.no_time)
    return f"there was no time for {causes}; next: a larger --budget, which goes on from here"


def _named(budget: Budget, first: Finding) -> list[str]:
    cost, change = f"{_cost(budget, first)}.", _change(budget, first)
    most = _most(budget, first.all_ms.value, cost)
    if len(most) == 1:
        return [*most, *change, *_missing(budget, first)]
    return [most[0], f"{most[1]} {change[0]}", *change[1:]]


def _in_no_row(budget: Budget) -> str:
    return f"Most is in no row yet, {milliseconds(budget.unexplained_ms)} of {_a_step(budget)}"


def _in_no_name(budget: Budget) -> str:
    return (
        f"Most, {milliseconds(budget.others_ms)} of {_a_step(budget)}, is in rows of which none by "
        f"itself is above the noise of these runs ({_largest(budget)} ms)"
    )


def _change(budget: Budget, first: Finding) -> list[str]:
    """What to change and what to expect; where that costs more than it wins, the next that does
    not, if there is one.
    """
    if first.predicted_speedup is None or not budget.slows(first):
        expected = _expectation(budget, first, on_n=first in budget.rows)
        return [f"Change: {first.fix}.", expected]
    now = times(budget.speedup) if first in budget.rows else "1 ×"
    told = (
        f"Its change does not pay here: {first.fix} would make it "
        f"{times(first.predicted_speedup)} of one device; it is {now} now."
    )
    better = next((row for row in budget.named if not budget.slows(row)), None)
    if better is None:
        return [told, _as_it_is(budget)]
    expected = _expectation(budget, better, on_n=better in budget.rows)
    return [told, f"Change for {better.cause}: {better.fix}.", expected]


def _cost(budget: Budget, first: Finding) -> str:
    """A cause, all that a step on N devices loses to it, and what one device loses of that."""
    cost, step = first.all_ms, budget.n_devices.step_ms
    part = f"{100 * cost.value / step.value:.0f} % of {_a_step(budget)}"
    told = f"{first.cause} ({first.what}): {milliseconds(cost)}, {part}"
    if budget.devices == 1:
        return told
    alone = next((row.lost_ms for row in budget.single if row.cause == first.cause), None)
    if alone is None or alone.value < FLOOR * step.value:
        return told
    if alone.value > AS_MUCH * cost.value:
        return f"{told}; one device alone loses as much"
    return f"{told}, of which one device alone loses {alone.value:.2f} ms"


def _a_step(budget: Budget) -> str:
    return f"a step on {budget.devices} devices" if budget.devices > 1 else "a step"


def _missing(budget: Budget, first: Finding) -> list[str]:
    """What most of the rest to N-fold goes to, where one device loses as much to the first."""
    more = next((row for row in budget.rows if row.named), None)
    if more is None or first in budget.rows:
        return []
    return [
        f"Of what is missing to {budget.devices}-fold most is {more.cause} ({more.what}): "
        f"{milliseconds(more.lost_ms)}."
    ]


def _nameless(budget: Budget) -> list[str]:
    """No row is a cause: perhaps one was not measured, or what is missing has no name."""
    if budget.no_time:
        return [_unsure(budget), f"Change nothing yet: {_no_time(budget)}.", _as_it_is(budget)]
    if _is_missing(budget):
        return _spread(budget)
    if _hides(budget):
        return [
            "No cause is above the noise of these runs, but that is large: all rows together cost "
            f"{milliseconds(budget.others_ms)} of {_a_step(budget)}.",
            MEASURE_LONGER,
            _as_it_is(budget),
        ]
    return [
        f"No cause costs more than {FLOOR:.0%} of a step beyond the noise.",
        "There is nothing to change.",
        _as_it_is(budget),
    ]


def _hides(budget: Budget) -> bool:
    """Whether the noise is so large that a good part of a step may be lost in it."""
    most = budget.others_ms.high
    return most is not None and most > HIDDEN * budget.n_devices.step_ms.value


def _unsure(budget: Budget) -> str:
    """Where most is, while no row has a name and some causes were not measured."""
    rest, others = budget.unexplained_ms, budget.others_ms
    if budget.unseen and rest.value > others.value:
        return f"{_in_no_row(budget)}."
    if budget.misses(others):
        return f"{_in_no_name(budget)}."
    return f"Nothing that was measured costs more than {FLOOR:.0%} of a step beyond the noise."


def _unexchanged(budget: Budget) -> list[str]:
    return [
        f"The training on {budget.devices} devices is wrong: {'; '.join(budget.wrong)}.",
        "Change that first: DistributedDataParallel, or tell the trainer of all processes.",
        _as_it_is(budget, ", sharing no work"),
    ]


def _as_it_is(budget: Budget, more: str = "") -> str:
    if budget.devices > 1:
        return f"{budget.devices} devices are {times(budget.speedup)} as fast as one{more}."
    rate, bound = budget.one_device.samples_per_s.value, budget.device_bound
    alone = f"; its compute alone would do {bound.samples_per_s.value:,.0f}" if bound else ""
    return f"The device does {rate:,.0f} samples/s{alone}."


def _expectation(budget: Budget, first: Finding, *, on_n: bool) -> str:
    if first.predicted_speedup is None:
        return "No prediction: what the change gains was not measured."
    gain, rate = times(first.predicted_speedup), _rate(budget, first)
    if budget.devices == 1:
        return f"Expect {gain} of its speed{rate}, {_how(first)}."
    if not on_n:
        measured = ", as measured with the change" if first.proven and rate else ""
        return f"Expect one device to be {gain} as fast if the whole cost goes{rate}{measured}."
    expected = f"Expect {gain} of one device instead of {times(budget.speedup)}"
    if first.proven or _same_on_one(budget, first):
        return f"{expected}{rate}, {_how(first)}."
    return f"{expected} where they lose no more to it than one does{rate} without any of it."


def _rate(budget: Budget, first: Finding) -> str:
    rate = first.predicted_samples_per_s
    which = f"{budget.devices} devices at " if budget.devices > 1 else ""
    return f", {which}{rate.value:,.0f} samples/s" if rate else ""


def _how(first: Finding) -> str:
    if not first.proven:
        return "if the whole cost goes"
    rate, bound = first.predicted_samples_per_s, first.bound_samples_per_s
    more = rate is not None and bound is not None and bound.value > (1 + FLOOR) * rate.value
    most = f" ({bound.value:,.0f} if the whole cost went)" if bound and more else ""
    return f"as measured with the change{most}"


def _same_on_one(budget: Budget, first: Finding) -> bool:
    """Whether nothing goes on one device that N devices lose too: then both numbers are one."""
    rate, gain = first.predicted_samples_per_s, first.predicted_speedup
    if rate is None or gain is None:
        return True
    one = budget.one_device.samples_per_s.value
    return abs(rate.value / (gain.value * one) - 1) < FLOOR


def _is_missing(budget: Budget) -> bool:
    """Whether something has no name."""
    return budget.misses(budget.others_ms) or budget.misses(budget.unexplained_ms)


def _largest(budget: Budget) -> str:
    """The rows without a name that seem to cost most."""
    rows = budget.rows if budget.devices > 1 else budget.single
    found = [row for row in rows if not row.named and row.lost_ms.value > 0][:MENTIONED]
    return ", ".join(f"{row.cause} {row.lost_ms.value:.2f}" for row in found)


def _spread(budget: Budget) -> list[str]:
    """Something is missing, and no row by itself is above the noise."""
    step_ms, parts = budget.n_devices.step_ms.value, _largest(budget)
    missing = step_ms - budget.goal_ms
    over = f"Measured were {parts} ms, none by itself" if parts else "No single cause is"
    told = parts and budget.misses(budget.others_ms)
    together = f"; together they cost {milliseconds(budget.others_ms)}" if told else ""
    return [
        f"{missing:.2f} ms, {missing / step_ms:.0%} of a step, is missing to "
        f"{budget.goal}. {over} above the noise of these runs{together}.",
        MEASURE_LONGER,
        _as_it_is(budget),
    ]
