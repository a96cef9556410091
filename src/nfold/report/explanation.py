"""The rows of an explanation as words, the same in the terminal, in HTML and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from nfold.core.format import format_parenthesized_range, pluralize
from nfold.core.measurement import Caveat
from nfold.core.stats import Interval
from nfold.explain.result.budget import (
    MIN_STEP_FRACTION,
    Budget,
    Finding,
    Interaction,
    Speed,
    exceeds_noise,
)
from nfold.explain.result.conclusion import write_conclusion
from nfold.report.export import escape_markdown, pipe_table

WRITES_KIND = "would_have_written"
"""A doubt that is none: what a script did not get to keep."""
SPEED_HEADS = ("", "samples/s", "ms a step", "of one device")
COST_HEADS = ("cause", "what it is", "ms a step", "without it", "change")
NUMERIC_HEADS = ("samples/s", "ms a step", "of one device", "without it")
"""Columns whose entries stand on the right."""


def cost_tables(budget: Budget) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The tables of costs with their heads: what is missing to N-fold, what one device loses."""
    own, end = finding_rows(budget.one_device_rows, budget), closing_rows(budget)
    if budget.devices == 1:
        return [(single_device_heading(budget), [*own, *end])]
    first = (cost_heading(budget), [*finding_rows(budget.rows, budget), *end])
    return [first, (single_device_heading(budget), own)] if own else [first]


def cost_heading(budget: Budget) -> str:
    """The head of the first block."""
    lost = budget.ideal_ms.value * (budget.devices / budget.speedup.value - 1)
    return f"Where {max(0.0, lost):.2f} ms of a step on {budget.devices} devices went"


def single_device_heading(budget: Budget) -> str:
    """The head of the second block, whose steps are those of a device's share of the batch."""
    share = -(-(budget.plan.batch or 0) // budget.devices)
    step = f"a step of {share} samples" if share else "a step"
    alone = " on one device alone" if budget.devices > 1 else ""
    bound = (
        f" of {format_range_in_words(budget.device_bound.step_ms)} ms"
        if budget.device_bound
        else ""
    )
    return f"What {step} spends{alone} besides its compute{bound}"


def explanation_title(budget: Budget) -> str:
    """``digits · 2 cpu devices · ddp · batch 128 · strong scaling``."""
    plan, several = budget.plan, budget.devices > 1
    words = [
        budget.target,
        pluralize(budget.devices, f"{plan.device} device"),
        budget.parallelism or (str(plan.strategy) if several else ""),
        f"batch {plan.batch}",
        f"{plan.precision}, {plan.step}",
        "no DataLoader" if plan.workers is None else f"input {plan.input}, {plan.workers} workers",
        f"{budget.scaling} scaling" if several else "",
    ]
    return " · ".join(filter(None, words))


def speed_rows(budget: Budget) -> list[tuple[str, ...]]:
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
        (f"{n} devices", *_speed(budget.n_devices), f"{format_range_in_words(budget.speedup)} ×"),
        (f"{n}-fold would be", f"{ideal:,.0f}", f"{budget.ideal_ms.value:.2f}", f"{n} ×"),
    ]


def _speed(speed: Speed) -> tuple[str, str]:
    rate = speed.samples_per_s
    return f"{rate.value:,.0f}{format_parenthesized_range(rate, '{:,.0f}')}", format_range_in_words(
        speed.step_ms
    )


def finding_rows(rows: Iterable[Finding], budget: Budget) -> list[tuple[str, ...]]:
    """The rows that are named, with what they are made of."""
    found: list[tuple[str, ...]] = []
    for row in (row for row in rows if row.significant):
        gained = row.predicted_speedup
        without = f"{gained.value:.2f} ×" if gained and row in budget.rows else _gain(gained)
        told = f"{row.fix} (measured)" if row.fix_measured else row.fix
        change = "" if budget.fix_is_slower(row) else told
        found.append(
            (row.cause, row.description, format_range_in_words(row.lost_ms), without, change)
        )
        found += [
            ("", f"· {name}", format_range_in_words(cost), "", "") for name, cost in row.components
        ]
    return found


def _gain(gained: Interval | None) -> str:
    if gained is None:
        return ""
    return f"+{100 * (gained.value - 1):.0f} %" if gained.value < 10 else f"{gained.value:,.0f} ×"


def closing_rows(budget: Budget) -> list[tuple[str, ...]]:
    """Interactions beyond the noise, the rows without a name together, and what no row has.

    On one device nothing is in no row: its compute is what is left of a step without all rows.
    """
    step = budget.n_devices.step_ms.value
    both = [_interaction(one) for one in budget.interactions if exceeds_noise(one.lost_ms, step)]
    others = (
        "other rows",
        "none above the noise by itself",
        format_range_in_words(budget.not_significant_ms),
        "",
        "",
    )
    rest = ("unexplained", "in no row", format_range_in_words(budget.not_attributed_ms), "", "")
    return [*both, others, rest] if budget.devices > 1 else [*both, others]


def _interaction(one: Interaction) -> tuple[str, ...]:
    hides = one.lost_ms.value > 0
    what = "each hides the other: only without both is it won" if hides else "counted by both"
    return (" × ".join(one.causes), what, format_range_in_words(one.lost_ms), "", "")


def explanation_notes(budget: Budget) -> list[str]:
    """What is within the noise, what was not tested, and doubts."""
    alone = [row.cause for row in budget.one_device_rows if not row.significant]
    quiet = [row.cause for row in budget.rows if not row.significant]
    if budget.devices == 1:
        quiet, alone = alone, []
    found = []
    if quiet:
        text = f"Nothing beyond the noise or {MIN_STEP_FRACTION:.0%} of a step: {', '.join(quiet)}"
        found.append(f"{text}; on one device {', '.join(alone)}." if alone else f"{text}.")
    found += [f"Not tested: {cause} ({reason})." for cause, reason in _by_reason(budget)]
    return [*found, *(_note(doubt) for doubt in budget.caveats)]


def run_ids(budget: Budget) -> list[tuple[str, str]]:
    """Each row with the ids of the runs that prove it."""
    alone = " on one device alone" if budget.devices > 1 else ""
    own = [(f"{row.cause}{alone}", row.evidence) for row in budget.one_device_rows]
    told = [*((row.cause, row.evidence) for row in budget.rows), *own]
    return [(name, ", ".join(ids)) for name, ids in told]


def _note(caveat: Caveat) -> str:
    if caveat.kind == WRITES_KIND:
        return f"The script {caveat.text}. None of it was kept."
    return f"Doubt: {caveat.text}."


def _by_reason(budget: Budget) -> list[tuple[str, str]]:
    rows = {row.cause for row in (*budget.rows, *budget.one_device_rows)}
    groups: dict[str, list[str]] = {}
    for cause, reason in budget.unmeasured:
        groups.setdefault(reason, []).append(f"a part of {cause}" if cause in rows else cause)
    return [(", ".join(causes), reason) for reason, causes in groups.items()]


def format_range_in_words(value: Interval) -> str:
    """``1.25 (1.10 to 1.40)``."""
    return f"{value.value:z.2f}{format_parenthesized_range(value, '{:z.2f}')}"


def explanation_markdown(budget: Budget) -> str:
    """What the terminal shows, and the runs that prove each row."""
    tables = [
        text
        for head, rows in cost_tables(budget)
        for text in (
            f"### {escape_markdown(head)}",
            pipe_table(COST_HEADS, rows, NUMERIC_HEADS),
        )
    ]
    blocks = [
        f"## {escape_markdown(explanation_title(budget))}",
        escape_markdown(budget.headline),
        *(f"**Wrong training: {escape_markdown(text)}**" for text in budget.training_errors),
        f"**{escape_markdown(' '.join(write_conclusion(budget)))}**",
        pipe_table(SPEED_HEADS, speed_rows(budget)),
        *tables,
        "\n".join(f"- {escape_markdown(note)}" for note in explanation_notes(budget)),
        "### Runs",
        "\n".join(f"- {cause}: {escape_markdown(ids)}" for cause, ids in run_ids(budget)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"
