"""The rows of an explanation as words, the same in the terminal, in HTML and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from nfold.amounts import bounds
from nfold.budget import Budget
from nfold.finding import FLOOR, Finding, Interaction, Speed, beyond
from nfold.measurement import Doubt
from nfold.report.words import count
from nfold.stats import Interval

WROTE = "would_have_written"
"""A doubt that is none: what a script did not get to keep."""
SPEED_HEADS = ("", "samples/s", "ms a step", "of one device")
HEADS = ("cause", "what it is", "ms a step", "without it", "change")
NUMBERS = ("samples/s", "ms a step", "of one device", "without it")
"""Columns whose entries stand on the right."""


def blocks(budget: Budget) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The tables of costs with their heads: what is missing to N-fold, what one device loses."""
    own, end = lines(budget.single, budget), ending(budget)
    if budget.devices == 1:
        return [(single_head(budget), [*own, *end])]
    first = (lost_head(budget), [*lines(budget.rows, budget), *end])
    return [first, (single_head(budget), own)] if own else [first]


def lost_head(budget: Budget) -> str:
    """The head of the first block."""
    lost = budget.ideal_ms.value * (budget.devices / budget.speedup.value - 1)
    return f"Where {max(0.0, lost):.2f} ms of a step on {budget.devices} devices went"


def single_head(budget: Budget) -> str:
    """The head of the second block, whose steps are those of a device's share of the batch."""
    share = -(-(budget.plan.batch or 0) // budget.devices)
    step = f"a step of {share} samples" if share else "a step"
    alone = " on one device alone" if budget.devices > 1 else ""
    bound = f" of {between(budget.device_bound.step_ms)} ms" if budget.device_bound else ""
    return f"What {step} spends{alone} besides its compute{bound}"


def title(budget: Budget) -> str:
    """``digits · 2 cpu devices · ddp · batch 128 · strong scaling``."""
    plan, several = budget.plan, budget.devices > 1
    words = [
        budget.target,
        count(budget.devices, f"{plan.device} device"),
        budget.way or (str(plan.strategy) if several else ""),
        f"batch {plan.batch}",
        f"{plan.precision}, {plan.step}",
        "no DataLoader" if plan.workers is None else f"input {plan.input}, {plan.workers} workers",
        f"{budget.scaling} scaling" if several else "",
    ]
    return " · ".join(filter(None, words))


def speeds(budget: Budget) -> list[tuple[str, ...]]:
    """One device, N devices, and N devices at N-fold speed; one alone, and its compute."""
    n = budget.devices
    if n == 1:
        own, bound = budget.one_device, budget.device_bound
        gain = f"{own.step_ms.value / bound.step_ms.value:.2f} ×" if bound else ""
        alone = [("its compute alone", *_speed(bound), gain)] if bound else []
        return [("1 device", *_speed(own), ""), *alone]
    ideal = 1e3 * (budget.plan.batch or 1) / budget.ideal_ms.value
    return [
        ("1 device", *_speed(budget.one_device), ""),
        (f"{n} devices", *_speed(budget.n_devices), f"{between(budget.speedup)} ×"),
        (f"{n}-fold would be", f"{ideal:,.0f}", f"{budget.ideal_ms.value:.2f}", f"{n} ×"),
    ]


def _speed(speed: Speed) -> tuple[str, str]:
    rate = speed.samples_per_s
    return f"{rate.value:,.0f}{bounds(rate, '{:,.0f}')}", between(speed.step_ms)


def lines(rows: Iterable[Finding], budget: Budget) -> list[tuple[str, ...]]:
    """The rows that are named, with what they are made of."""
    found: list[tuple[str, ...]] = []
    for row in (row for row in rows if row.named):
        gained = row.predicted_speedup
        without = f"{gained.value:.2f} ×" if gained and row in budget.rows else _gain(gained)
        told = f"{row.fix} (measured)" if row.proven else row.fix
        change = "" if budget.slows(row) else told
        found.append((row.cause, row.what, between(row.lost_ms), without, change))
        found += [("", f"· {name}", between(cost), "", "") for name, cost in row.parts]
    return found


def _gain(gained: Interval | None) -> str:
    """What one device alone would win, on its own rate: a part of it, or many times that."""
    if gained is None:
        return ""
    return f"+{100 * (gained.value - 1):.0f} %" if gained.value < 10 else f"{gained.value:,.0f} ×"


def ending(budget: Budget) -> list[tuple[str, ...]]:
    """Interactions beyond the noise, the rows without a name together, and what no row has.

    On one device nothing is in no row: its compute is what is left of a step without all rows.
    """
    step = budget.n_devices.step_ms.value
    both = [_interaction(one) for one in budget.interactions if beyond(one.lost_ms, step)]
    others = ("other rows", "none above the noise by itself", between(budget.others_ms), "", "")
    rest = ("unexplained", "in no row", between(budget.unexplained_ms), "", "")
    return [*both, others, rest] if budget.devices > 1 else [*both, others]


def _interaction(one: Interaction) -> tuple[str, ...]:
    """Above 0, each hides the other."""
    hides = one.lost_ms.value > 0
    what = "each hides the other: only without both is it won" if hides else "counted by both"
    return (" × ".join(one.causes), what, between(one.lost_ms), "", "")


def notes(budget: Budget) -> list[str]:
    """What is within the noise, what was not tested, and doubts."""
    alone = [row.cause for row in budget.single if not row.named]
    quiet = [row.cause for row in budget.rows if not row.named]
    if budget.devices == 1:
        quiet, alone = alone, []
    found = []
    if quiet:
        text = f"Nothing beyond the noise or {FLOOR:.0%} of a step: {', '.join(quiet)}"
        found.append(f"{text}; on one device {', '.join(alone)}." if alone else f"{text}.")
    found += [f"Not tested: {cause} ({reason})." for cause, reason in _by_reason(budget)]
    return [*found, *(_note(doubt) for doubt in budget.warnings)]


def runs(budget: Budget) -> list[tuple[str, str]]:
    """Each row with the ids of the runs that prove it."""
    alone = " on one device alone" if budget.devices > 1 else ""
    own = [(f"{row.cause}{alone}", row.evidence) for row in budget.single]
    told = [*((row.cause, row.evidence) for row in budget.rows), *own]
    return [(name, ", ".join(ids)) for name, ids in told]


def _note(doubt: Doubt) -> str:
    if doubt.kind == WROTE:
        return f"The script {doubt.text}. None of it was kept."
    return f"Doubt: {doubt.text}."


def _by_reason(budget: Budget) -> list[tuple[str, str]]:
    """Causes with the same reason together; of one that has a row, a part of it."""
    rows = {row.cause for row in (*budget.rows, *budget.single)}
    groups: dict[str, list[str]] = {}
    for cause, reason in budget.untested:
        groups.setdefault(reason, []).append(f"a part of {cause}" if cause in rows else cause)
    return [(", ".join(causes), reason) for reason, causes in groups.items()]


def between(value: Interval) -> str:
    """``1.25 (1.10 to 1.40)``."""
    return f"{value.value:z.2f}{bounds(value, '{:z.2f}')}"
