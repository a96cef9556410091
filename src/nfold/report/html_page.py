"""The report as one self-contained HTML file without scripts or requests."""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nfold import __version__
from nfold.analysis import cell_labels
from nfold.analysis import sections as sections_module
from nfold.analysis.part_timings import part_timings
from nfold.analysis.sections import ReportSection
from nfold.core.format import format_bytes, terminal_safe
from nfold.core.machine import Machine
from nfold.fieldreports.sheets import FieldReport
from nfold.report import chart_elements, figures, tables
from nfold.report.figures import Figure

# Axes whose values are right-aligned.
NUMERIC_AXES = (
    *("devices", "batch", "workers", "cores_per_device"),
    *("epochs", "steps", "warmup_steps", "seed"),
)
LOAD_FIGURE_NOTE = (
    "The band marks the timed windows. A device that waits while the cores of the host are busy "
    "waits for input; with idle cores it waits for something else. The load of a CPU device is the "
    "load of its rank with the loader workers, in % of the cores of the device."
)
TEMPLATES = resources.files("nfold.report").joinpath("templates")


def report_page(
    sections: Sequence[ReportSection],
    results_folder: Path,
    cell: str | None = None,
    field: FieldReport | None = None,
) -> str:
    """Return the report as one HTML document, with the field report, if any, first."""
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
) -> dict[str, Any]:
    timings = part_timings(section.results)
    watched = sections_module.find_telemetry_run(section, results_folder, cell)
    name, over_time = "", list[Figure]()
    if watched is not None:
        name, over_time = figures.telemetry_figures(section, watched, f"{anchor}t")
    return {
        "section": section,
        "anchor": anchor,
        "headline": sections_module.headline_sentences(section.results, timings),
        "table": tables.build_table(section.results, causes_in_lines=True),
        "parts": tables.parts_table(timings),
        "figures": figures.section_figures(section, timings, anchor),
        "watched": name,
        "watched_cell": watched.measurement.cell if watched else "",
        "over_time": over_time,
    }


def load_style_sheet() -> str:
    """Return the style sheet of a page, with the dark colours of its figures."""
    rules = [
        f'.figure [{kind}="{light}"]{{{kind}:{dark}}}'
        for light, dark in chart_elements.DARK_COLOURS.items()
        for kind in ("fill", "stroke")
    ]
    dark_figures = f"@media screen and (prefers-color-scheme:dark){{{''.join(rules)}}}\n"
    return TEMPLATES.joinpath("style.css").read_text(encoding="utf-8") + dark_figures


def load_template(name: str) -> jinja2.Template:
    """Load a template, which escapes everything except figures."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nfold.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals["numeric"] = NUMERIC_AXES
    environment.filters["inert"] = terminal_safe
    environment.filters["drawn"] = lambda figure: Markup(figure.svg)  # noqa: S704
    environment.filters["axis_name"] = cell_labels.axis_name
    return environment.get_template(name)


def content_security_policy(style: str) -> str:
    """Return the policy: no scripts, no requests, one style sheet by its hash (CSP level 2)."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def machine_rows(machine: Machine) -> list[tuple[str, str]]:
    """Return the machine as (name, value) pairs, without empty values."""
    gpus = Counter(
        f"{gpu.name} {format_bytes(gpu.memory_bytes) if gpu.memory_bytes else ''}".strip()
        for gpu in machine.gpus
    )
    kinds = {f"{link.kind} {link.detail}".strip() for link in machine.links}
    pcie = {gpu.pcie for gpu in machine.gpus if gpu.pcie}
    facts = [
        ("GPUs", ", ".join(f"{many} × {name}" for name, many in gpus.items())),
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
