"""The tables behind an explanation, the same in the terminal, in HTML and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nfold.core.format import join_words, pluralize
from nfold.core.stats import Interval
from nfold.explain.result.budget import (
    AccountRow,
    Budget,
    Speed,
    exceeds_noise,
)
from nfold.explain.result.view import (
    NOT_UNCERTAIN,
    ExplanationView,
    format_factor,
    format_ms,
    format_percent,
)
from nfold.report.export import escape_markdown, pipe_table

SMALL_FRACTION = 0.005
"""Of the step: smaller parts of a row are not printed."""


@dataclass(frozen=True, kw_only=True)
class DetailTable:
    """A table of texts; ``numeric`` are the columns to align on the right."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int]


def detail_tables(budget: Budget) -> list[DetailTable]:
    """Throughput, the account with intervals, all changes, alternatives, interactions."""
    tables = [_throughput(budget), _account(budget), _changes(budget), *_alternatives(budget)]
    return [table for table in [*tables, _interactions(budget)] if table.rows]


def _table(
    title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], texts: int = 1
) -> DetailTable:
    numeric = frozenset(range(texts, len(heads)))
    return DetailTable(title=title, heads=heads, rows=tuple(rows), numeric=numeric)


def format_interval(interval: Interval | None, form: str = "ms") -> str:
    """``19.6 (18.1–21.0)``; ``form`` is ms, rate or factor."""
    if interval is None:
        return ""
    if form == "factor":
        return format_factor(interval, always=True)
    text = format_ms if form == "ms" else "{:,.0f}".format
    low, high = interval.low, interval.high
    if low is None or high is None or text(low) == text(high):
        return text(interval.value)
    to = " to " if low < 0 else "–"
    return f"{text(interval.value)} ({text(low)}{to}{text(high)})"


def _throughput(budget: Budget) -> DetailTable:
    def row(name: str, speed: Speed, factor: Interval | None) -> tuple[str, ...]:
        step, rate = format_interval(speed.step_ms), format_interval(speed.samples_per_s, "rate")
        return (name, rate, step, format_interval(factor, "factor"))

    rows = [row("1 device", budget.one_device, None)]
    if budget.devices > 1:
        rows.append(row(pluralize(budget.devices, "device"), budget.n_devices, budget.speedup))
        ideal = 1e3 * (budget.plan.batch or 1) / budget.ideal_ms.value
        goal = (f"{ideal:,.0f}", format_ms(budget.ideal_ms.value), f"{budget.devices:.2f}x")
        rows.append((f"{budget.devices}-fold would be", *goal))
    elif budget.device_bound is not None:
        rows.append(row("its compute alone", budget.device_bound, None))
    kind = f", {budget.scaling} scaling" * (budget.devices > 1)
    plan = f"{budget.plan.precision}, {budget.plan.step}{kind}"
    heads = ("", "samples/s", "ms per step", "of one device")
    return _table(f"Throughput ({plan})", heads, rows)


def _account(budget: Budget) -> DetailTable:
    account = budget.account
    if account is None:
        return _table("", ("",), [])
    step, rows = account.step_ms.value, list[tuple[str, ...]]()
    own = {row.id: row for row in account.one_device}

    def add(row: AccountRow) -> None:
        one = own[row.id].ms if row.id in own else None
        part = format_percent(row.ms.value / step)
        rows.append((row.label, format_interval(row.ms), part, format_interval(one)))
        rows.extend(
            (f"· {name}", format_interval(ms), format_percent(ms.value / step), "")
            for name, ms in row.parts
            if abs(ms.value) > SMALL_FRACTION * step
        )

    for row in account.rows:
        add(row)
    rows.extend(
        (f"· {row.label}, below the noise", format_interval(row.ms), "", "")
        for row in sorted(account.small, key=lambda row: -row.ms.value)
        if abs(row.ms.value) > SMALL_FRACTION * step
    )
    rows.append(("a step", format_interval(account.step_ms), "100 %", ""))
    n = pluralize(budget.devices, "device")
    heads = (f"on {n}", "ms (95 % interval)", "of step", "on 1 device, ms")
    keep = len(heads) if own else len(heads) - 1
    return _table("Step account", heads[:keep], [row[:keep] for row in rows])


def _changes(budget: Budget) -> DetailTable:
    labels = {row.id: row.label for row in budget.account.rows} if budget.account else {}
    rows = []
    for change in budget.changes:
        rate = f"{change.samples_per_s.value:,.0f}" if change.samples_per_s else ""
        factor = format_interval(change.factor, "factor")
        basis = "measured" if change.measured else "at most"
        place = f"{change.location}: " * bool(change.location)
        text = f"{place}{change.code}{'; ' * bool(change.note)}{change.note}"
        label = labels.get(change.row, change.row)
        rows.append((label, change.current, rate, factor, basis, text))
    heads = ("cost", "now", "samples/s then", "factor", "basis", "change")
    return DetailTable(title="Changes", heads=heads, rows=tuple(rows), numeric=frozenset({1, 2, 3}))


def _alternatives(budget: Budget) -> list[DetailTable]:
    return [
        _table(
            f"Measured values of {change.varied}",
            (change.varied, "ms per step", "samples/s"),
            [
                (
                    one.value,
                    format_interval(one.step_ms),
                    format_interval(one.samples_per_s, "rate"),
                )
                for one in change.alternatives
            ],
        )
        for change in budget.changes
        if len(change.alternatives) > 1
    ]


def _interactions(budget: Budget) -> DetailTable:
    hidden, shared = "each hides the other: remove both", "both rows contain this time"
    rows = [
        (
            " and ".join(one.causes),
            hidden if one.lost_ms.value > 0 else shared,
            format_interval(one.lost_ms),
        )
        for one in budget.interactions
        if exceeds_noise(one.lost_ms, budget.n_devices.step_ms.value)
    ]
    return _table("Costs that overlap", ("costs", "meaning", "ms"), rows, texts=2)


def detail_notes(budget: Budget) -> list[tuple[str, list[str]]]:
    """What was not tested, with reasons, and every caveat in full."""
    groups: dict[str, list[str]] = {}
    for cause, reason in budget.unmeasured:
        groups.setdefault(reason, []).append(cause)
    untested = [f"{join_words(causes)}: {reason}" for reason, causes in groups.items()]
    caveats = [
        f"The script {one.text}." if one.kind in NOT_UNCERTAIN else one.text
        for one in budget.caveats
    ]
    groups_of_notes = [("Not tested", untested), ("Caveats", caveats)]
    return [(title, notes) for title, notes in groups_of_notes if notes]


def run_ids(budget: Budget) -> list[tuple[str, str]]:
    """Every finding with the ids of the measurements behind it."""
    where = " on one device" if budget.devices > 1 else ""
    return [
        *((row.cause, ", ".join(row.evidence)) for row in budget.rows),
        *((f"{row.cause}{where}", ", ".join(row.evidence)) for row in budget.one_device_rows),
    ]


def explanation_markdown(view: ExplanationView, budget: Budget) -> str:
    """The view and every table as Markdown, in the order of the terminal."""
    blocks = [
        f"# {escape_markdown(view.title)}",
        f"**{escape_markdown(view.headline)}**",
        *map(escape_markdown, view.notices),
        _action_markdown(view),
    ]
    if view.alternatives:
        heads, *others = view.alternatives
        blocks.append(pipe_table(heads, others, heads[1:]))
    blocks.append(_account_markdown(view))
    ends = (view.summary, view.untested, view.caveats, view.firmer, view.before_edit)
    blocks += map(escape_markdown, ends)
    for table in detail_tables(budget):
        numeric = [table.heads[at] for at in table.numeric]
        blocks.append(f"## {escape_markdown(table.title)}")
        blocks.append(pipe_table(table.heads, table.rows, numeric))
    for title, notes in detail_notes(budget):
        blocks += [f"## {title}", "\n".join(f"- {escape_markdown(note)}" for note in notes)]
    blocks += [
        "## Measurements",
        "\n".join(f"- {cause}: {escape_markdown(ids)}" for cause, ids in run_ids(budget)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _action_markdown(view: ExplanationView) -> str:
    lines = []
    if view.change is not None:
        place = f"`{view.change.location}` " * bool(view.change.location)
        now = f" (now {view.change.current})" * bool(view.change.current)
        lines.append(f"- Change: {place}`{view.change.code}`{now}")
    elif view.no_change:
        lines.append(f"- Change: {escape_markdown(view.no_change)}")
    if view.gain:
        lines.append(f"- Gain: {escape_markdown(view.gain)} ({view.gain_basis})")
    if view.data_set:
        lines.append(f"- Data set: {escape_markdown(view.data_set)}")
    return "\n".join(lines)


def _account_markdown(view: ExplanationView) -> str:
    if not view.rows:
        return ""
    rows = [(row.label, format_interval(row.ms), format_percent(row.fraction)) for row in view.rows]
    heads = (view.account_title, "ms", "of step")
    return pipe_table(heads, rows, heads[1:])
