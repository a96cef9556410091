"""One self-contained HTML file: no script, nothing fetched, readable offline and on paper."""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from nfold import __version__
from nfold.inert import inert
from nfold.machine import Machine
from nfold.report import axes, figures, headline, ink, parts, query, tables
from nfold.report.field.base import FieldReport
from nfold.report.figures import Figure
from nfold.report.query import Section
from nfold.report.words import memory

NUMERIC = (
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
ABOUT_LOADS = (
    "The band is what was timed. A device that waits while the host's cores are busy is starved; "
    "waiting with idle cores has another cause. Of a CPU device, the load is that of its rank with "
    "the loader workers, in % of the device's own cores: telemetry does not tell the two apart."
)
TEMPLATES = resources.files("nfold.report").joinpath("templates")


@dataclass(frozen=True, kw_only=True)
class View:
    """A section as the template shows it."""

    section: Section
    anchor: str
    headline: tuple[str, ...]
    table: tables.Table
    parts: parts.PartsTable | None
    figures: tuple[Figure, ...]
    watched: str
    """The run that ``over_time`` shows; empty where there is no telemetry."""
    watched_cell: str
    over_time: tuple[Figure, ...]


def page(
    sections: Sequence[Section],
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
    style = style_sheet()
    return template("report.html.j2").render(
        views=views,
        field=field,
        loads=figures.loads_of(sections, results_folder, "f") if field else [],
        about_loads=ABOUT_LOADS,
        machines=[(machine.summary, machine_facts(machine)) for machine in machines.values()],
        style=Markup(style),  # noqa: S704  # our own file and colours
        policy=policy(style),
        version=__version__,
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        runs=sum(len(c.measurements) for section in sections for c in section.cells),
    )


def _view(section: Section, results_folder: Path, anchor: str, cell: str | None) -> View:
    timings = parts.timings(section.results)
    watched = query.watched(section, results_folder, cell)
    name, over_time = "", list[Figure]()
    if watched is not None:
        name, over_time = figures.over_time(section, watched, f"{anchor}t")
    return View(
        section=section,
        anchor=anchor,
        headline=tuple(headline.headline(section.results, timings)),
        table=tables.table(section.results, causes_in_lines=True),
        parts=parts.table(timings),
        figures=tuple(figures.figures(section, timings, anchor)),
        watched=name if over_time else "",
        watched_cell=watched.measurement.cell if watched else "",
        over_time=tuple(over_time),
    )


def style_sheet() -> str:
    """The one style sheet of a page."""
    return TEMPLATES.joinpath("style.css").read_text(encoding="utf-8") + _dark_figures()


def template(name: str) -> jinja2.Template:
    """A page's template: everything that it shows is escaped, but for drawings."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nfold.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals["numeric"] = NUMERIC
    environment.filters["inert"] = inert
    environment.filters["drawn"] = _drawn
    environment.filters["axis_name"] = axes.name
    return environment.get_template(name)


def _drawn(figure: Figure) -> Markup:
    """The one kind of value that is not escaped: a drawing that ``svg.render`` has cleaned."""
    return Markup(figure.svg)  # noqa: S704


def policy(style: str) -> str:
    """Nothing may run or be fetched; the one style sheet is named by its hash (CSP level 2)."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _dark_figures() -> str:
    """Rules that exchange a figure's colours on a dark screen; paper stays light."""
    rules = [
        f'.figure [{kind}="{light}"]{{{kind}:{dark}}}'
        for light, dark in ink.DARK.items()
        for kind in ("fill", "stroke")
    ]
    return f"@media screen and (prefers-color-scheme:dark){{{''.join(rules)}}}\n"


def machine_facts(machine: Machine) -> list[tuple[str, str]]:
    """What the machine is, as (name, value), without what it does not say."""
    kinds = {f"{link.kind} {link.detail}".strip() for link in machine.links}
    pcie = {gpu.pcie for gpu in machine.gpus if gpu.pcie}
    facts = [
        ("GPUs", _gpus(machine)),
        ("links between GPUs", ", ".join(sorted(kinds))),
        ("PCIe", ", ".join(sorted(pcie))),
        ("driver", machine.driver or ""),
        ("processor", f"{machine.cpu}, {machine.cores} cores usable"),
        ("memory", memory(machine.memory_bytes)),
        ("shared memory", memory(machine.shm_bytes) if machine.shm_bytes else ""),
        ("system", machine.os),
        ("Python", machine.python),
        ("software", ", ".join(f"{k} {v}" for k, v in sorted(machine.versions.items()))),
        ("limits", ", ".join(f"{k} {v}" for k, v in sorted(machine.limits.items()))),
    ]
    return [(name, inert(text)) for name, text in facts if text]


def _gpus(machine: Machine) -> str:
    kinds: dict[tuple[str, int | None], int] = {}
    for gpu in machine.gpus:
        kinds[gpu.name, gpu.memory_bytes] = kinds.get((gpu.name, gpu.memory_bytes), 0) + 1
    named = [(many, name, memory(size) if size else "") for (name, size), many in kinds.items()]
    return ", ".join(f"{many} × {name} {size}".strip() for many, name, size in named)
