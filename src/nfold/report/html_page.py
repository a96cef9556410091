"""One self-contained HTML file: no script, nothing fetched, readable offline and on paper."""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
from markupsafe import Markup

from nfold import __version__
from nfold.analysis import cell_labels
from nfold.analysis import sections as sections_module
from nfold.analysis.part_timings import part_timings
from nfold.analysis.sections import ReportSection
from nfold.core.format import format_bytes, pluralize, terminal_safe
from nfold.core.machine import Machine
from nfold.explain.result.budget import Budget
from nfold.explain.result.conclusion import write_conclusion
from nfold.fieldreports.sheets import FieldReport
from nfold.report import (
    chart_elements,
    explanation,
    figures,
    operation_parts,
    summary_sentences,
    tables,
)
from nfold.report.chart_elements import (
    AXIS_LABEL_FORMAT,
    MUTED,
    SERIES,
    TEXT,
    apply_size_and_style,
    base_chart,
)
from nfold.report.figures import Figure, FigureRenderer

NUMERIC_AXES = (
    "devices",
    "batch",
    "workers",
    "cores_per_device",
    "epochs",
    "steps",
    "warmup_steps",
    "seed",
)
"""Axes whose values stand on the right of their column."""
LOAD_FIGURE_NOTE = (
    "The band is what was timed. A device that waits while the host's cores are busy is starved; "
    "waiting with idle cores has another cause. Of a CPU device, the load is that of its rank with "
    "the loader workers, in % of the device's own cores: telemetry does not tell the two apart."
)
TEMPLATES = resources.files("nfold.report").joinpath("templates")


@dataclass(frozen=True, kw_only=True)
class SectionView:
    """A section as the template shows it."""

    section: ReportSection
    anchor: str
    headline: tuple[str, ...]
    table: tables.CellTable
    parts: operation_parts.PartsTable | None
    figures: tuple[Figure, ...]
    watched: str
    """The run that ``over_time`` shows; empty where there is no telemetry."""
    watched_cell: str
    over_time: tuple[Figure, ...]


def report_page(
    sections: Sequence[ReportSection],
    results_folder: Path,
    cell: str | None = None,
    field: FieldReport | None = None,
) -> str:
    """The report of all sections as one HTML document, a field report before them."""
    views = [
        _view(section, results_folder, f"s{number}", cell)
        for number, section in enumerate(sections, start=1)
    ]
    machines = {section.machine.id: section.machine for section in sections}
    style = load_style_sheet()
    return load_template("report.html.j2").render(
        views=views,
        field=field,
        loads=figures.load_figures(sections, results_folder, "f") if field else [],
        about_loads=LOAD_FIGURE_NOTE,
        machines=[(machine.summary, machine_rows(machine)) for machine in machines.values()],
        style=Markup(style),  # noqa: S704  # our own file and colours
        policy=content_security_policy(style),
        version=__version__,
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        runs=sum(len(c.measurements) for section in sections for c in section.cells),
    )


def _view(
    section: ReportSection, results_folder: Path, anchor: str, cell: str | None
) -> SectionView:
    timings = part_timings(section.results)
    watched = sections_module.find_telemetry_run(section, results_folder, cell)
    name, over_time = "", list[Figure]()
    if watched is not None:
        name, over_time = figures.telemetry_figures(section, watched, f"{anchor}t")
    return SectionView(
        section=section,
        anchor=anchor,
        headline=tuple(summary_sentences.headline_sentences(section.results, timings)),
        table=tables.build_table(section.results, causes_in_lines=True),
        parts=operation_parts.parts_table(timings),
        figures=tuple(figures.section_figures(section, timings, anchor)),
        watched=name if over_time else "",
        watched_cell=watched.measurement.cell if watched else "",
        over_time=tuple(over_time),
    )


def load_style_sheet() -> str:
    """The one style sheet of a page."""
    return TEMPLATES.joinpath("style.css").read_text(encoding="utf-8") + _dark_figures()


def load_template(name: str) -> jinja2.Template:
    """A page's template: everything that it shows is escaped, but for drawings."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nfold.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals["numeric"] = NUMERIC_AXES
    environment.filters["inert"] = terminal_safe
    environment.filters["drawn"] = _drawn
    environment.filters["axis_name"] = cell_labels.axis_name
    return environment.get_template(name)


def _drawn(figure: Figure) -> Markup:
    return Markup(figure.svg)  # noqa: S704


def content_security_policy(style: str) -> str:
    """Nothing may run or be fetched; the one style sheet is named by its hash (CSP level 2)."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _dark_figures() -> str:
    rules = [
        f'.figure [{kind}="{light}"]{{{kind}:{dark}}}'
        for light, dark in chart_elements.DARK_COLOURS.items()
        for kind in ("fill", "stroke")
    ]
    return f"@media screen and (prefers-color-scheme:dark){{{''.join(rules)}}}\n"


def machine_rows(machine: Machine) -> list[tuple[str, str]]:
    """What the machine is, as (name, value), without what it does not say."""
    kinds = {f"{link.kind} {link.detail}".strip() for link in machine.links}
    pcie = {gpu.pcie for gpu in machine.gpus if gpu.pcie}
    facts = [
        ("GPUs", _gpus(machine)),
        ("links between GPUs", ", ".join(sorted(kinds))),
        ("PCIe", ", ".join(sorted(pcie))),
        ("driver", machine.driver or ""),
        ("processor", f"{machine.cpu}, {machine.cores} cores usable"),
        ("memory", format_bytes(machine.memory_bytes)),
        ("shared memory", format_bytes(machine.shm_bytes) if machine.shm_bytes else ""),
        ("system", machine.os),
        ("Python", machine.python),
        ("software", ", ".join(f"{k} {v}" for k, v in sorted(machine.versions.items()))),
        ("limits", ", ".join(f"{k} {v}" for k, v in sorted(machine.limits.items()))),
    ]
    return [(name, terminal_safe(text)) for name, text in facts if text]


def _gpus(machine: Machine) -> str:
    kinds: dict[tuple[str, int | None], int] = {}
    for gpu in machine.gpus:
        kinds[gpu.name, gpu.memory_bytes] = kinds.get((gpu.name, gpu.memory_bytes), 0) + 1
    named = [
        (many, name, format_bytes(size) if size else "") for (name, size), many in kinds.items()
    ]
    return ", ".join(f"{many} × {name} {size}".strip() for many, name, size in named)


BAR_HEIGHT = 30
MIN_REST_SHARE = 0.005
"""Of the goal: a smaller rest has no bar."""
TOTAL_COLOUR, LOSS_COLOUR, NOT_ATTRIBUTED_COLOUR = SERIES[0], SERIES[2], SERIES[6]


@dataclass(frozen=True, kw_only=True)
class WaterfallBar:
    """One bar: where it begins and ends, in milliseconds, and its colour."""

    name: str
    start: float
    end: float
    colour: str
    text: str


def waterfall_bars(budget: Budget) -> list[WaterfallBar]:
    """The goal, what is added to it (named causes, other rows, the rest), what was achieved.

    On one device nothing is in no row. Before the goal of several stands what one loses by itself.
    """
    at, several = budget.goal_ms, budget.devices > 1
    made = [*_of_one(budget), _end(budget.goal_label, at)]
    for row in (
        row for row in (budget.rows if several else budget.one_device_rows) if row.significant
    ):
        made.append(_loss(row.cause, at, row.lost_ms.value))
        at = made[-1].end
    rests = (("other rows", budget.not_significant_ms), ("unexplained", budget.not_attributed_ms))
    for name, rest in rests if several else rests[:1]:
        made.append(_loss(name, at, rest.value, NOT_ATTRIBUTED_COLOUR))
        at = made[-1].end
    return [*made, _end("achieved", at)]


def _of_one(budget: Budget) -> list[WaterfallBar]:
    named, bound = [row for row in budget.one_device_rows if row.significant], budget.device_bound
    if budget.devices == 1 or budget.scaling != "weak" or bound is None or not named:
        return []
    at = bound.step_ms.value
    made = [_end("compute alone", at)]
    for row in named:
        made.append(_loss(f"{row.cause} on 1 device", at, row.lost_ms.value))
        at = made[-1].end
    rest = budget.goal_ms - at
    small = abs(rest) < MIN_REST_SHARE * budget.goal_ms
    return (
        made if small else [*made, _loss("other rows on 1 device", at, rest, NOT_ATTRIBUTED_COLOUR)]
    )


def starts_from_one_device(budget: Budget) -> bool:
    """Whether N devices are counted from a step of one whose losses have names."""
    return bool(_of_one(budget))


def _end(name: str, value: float) -> WaterfallBar:
    return WaterfallBar(name=name, start=0, end=value, colour=TOTAL_COLOUR, text=f"{value:.2f}")


def _loss(name: str, at: float, cost: float, colour: str = LOSS_COLOUR) -> WaterfallBar:
    return WaterfallBar(name=name, start=at, end=at + cost, colour=colour, text=f"{cost:+.2f}")


def waterfall_chart(budget: Budget) -> Any:
    """The bars one below the other, each beginning where the one before ends."""
    made = waterfall_bars(budget)
    rows = [
        {
            "name": b.name,
            "start": b.start,
            "end": b.end,
            "text": b.text,
            "colour": b.colour,
            "right": max(b.start, b.end),
        }
        for b in made
    ]
    names = [bar.name for bar in made]
    top = 1.18 * max(float(str(row["right"])) for row in rows)
    axis = alt.Axis(ticks=False, domain=False, labelLimit=170, labelColor=TEXT)
    milliseconds = alt.Axis(labelExpr=AXIS_LABEL_FORMAT, tickCount=5, domain=False, ticks=False)
    scale = alt.Scale(domain=[0, top], nice=False)
    base = base_chart(rows).encode(y=alt.Y("name:N", title=None, sort=names, axis=axis))
    colour = alt.Color("colour:N", scale=None, legend=None)
    drawn = base.mark_bar(height={"band": 0.7}).encode(
        x=alt.X("start:Q", title=None, axis=milliseconds, scale=scale), x2="end:Q", color=colour
    )
    texts = base.mark_text(align="left", dx=6, color=TEXT).encode(
        x=alt.X("right:Q", scale=scale), text="text:N"
    )
    ideal = base_chart([{"x": budget.goal_ms}])
    line = ideal.mark_rule(strokeDash=[3, 3], color=MUTED).encode(x=alt.X("x:Q", scale=scale))
    return apply_size_and_style(alt.layer(drawn, line, texts), height=40 + BAR_HEIGHT * len(rows))


def waterfall_figure(budget: Budget) -> Figure:
    """The picture, drawn."""
    n = budget.devices
    start = f"From a step at {n}-fold speed" if n > 1 else "From the compute of a step"
    if starts_from_one_device(budget):
        start = f"From the compute of one device's step, which is one at {n}-fold speed,"
    note = f"{start} to the one achieved; what is lost lies between."
    return FigureRenderer("budget").render(
        waterfall_chart(budget), f"a step on {pluralize(n, 'device')} [ms]", note
    )


def explanation_page(budget: Budget) -> str:
    """The picture, the same tables as in the terminal, and the ids of all runs behind them."""
    style = load_style_sheet()
    return load_template("explain.html.j2").render(
        budget=budget,
        title=explanation.explanation_title(budget),
        sentences=write_conclusion(budget),
        tables=[
            ("", explanation.SPEED_HEADS, explanation.speed_rows(budget)),
            *(
                (head, explanation.COST_HEADS, rows)
                for head, rows in explanation.cost_tables(budget)
            ),
        ],
        runs=explanation.run_ids(budget),
        numbers=explanation.NUMERIC_HEADS,
        notes=explanation.explanation_notes(budget),
        picture=waterfall_figure(budget),
        style=Markup(style),  # noqa: S704  # our own file and colours
        policy=content_security_policy(style),
        version=__version__,
    )
