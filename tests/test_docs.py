"""The documents match the program: commands and snippets run, tables are complete, links work."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import nfold
from nfold.fieldreports.catalog import FIELD_REPORTS

ROOT = Path(__file__).resolve().parents[1]
TREES = ("docs", "benchmarks", "examples", "tests", "src")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(file for tree in TREES for file in (ROOT / tree).rglob("*.md"))]
)
FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
FENCED_TEXT = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
TO_RUN = re.compile(r"^<!-- run -->\n```(?:sh|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)]*)\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
COMMAND = re.compile(r"^## `nfold (\w+)", re.MULTILINE)
SNIPPET = re.compile(
    r"^<!-- run on 1 and 2 devices -->\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE
)
TABLE_KEYS = re.compile(r"^\| (`[^|]*`) \|", re.MULTILINE)
USER_PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
README_LINES = 120
GLOSSARY_TERMS = 60
LINE_WIDTH = 120
RETIRED = (
    *("rung", "ladder", "doubt", "doubts", "ablation", "left out", "first look", "taking turns"),
    *("turn left", "is told", "was told", "says of itself"),
)
"""Terms that the project has replaced; the page `docs/glossary.md` has the present ones."""
LIMIT_S = 300


def commands_to_run(text: str) -> list[str]:
    """Return the lines of every block after a ``run`` mark; in a console block, those with a prompt."""
    lines = [line for block in TO_RUN.findall(text) for line in block.splitlines()]
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return prompted or [line for line in lines if line and not line.startswith("#")]


def slug(heading: str) -> str:
    """Return the anchor of a heading: lower case, spaces to hyphens, no punctuation."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def broken_links(document: Path) -> list[str]:
    """Return the links whose target does not exist; of external links only the form is checked."""
    text = FENCED.sub("", document.read_text())
    return [link for link in LINK.findall(text) if not _lives(document, link)]


def _lives(document: Path, link: str) -> bool:
    parts = urlsplit(link)
    if parts.scheme:
        return parts.scheme in ("https", "mailto") and bool(parts.netloc) and " " not in link
    target = (document.parent / unquote(parts.path)).resolve() if parts.path else document
    if not target.exists() or link.startswith("/"):
        return False
    if not parts.fragment:
        return True
    headings = HEADING.findall(FENCED.sub("", target.read_text()))
    return parts.fragment in {slug(heading) for heading in headings}


def generated_reference(folder: Path) -> str:
    """Return docs/commands.md as ``make docs`` generates it."""
    file = folder / "commands.md"
    command = [sys.executable, "tools/commands.py", str(file)]
    subprocess.run(command, cwd=ROOT, check=True)
    return file.read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_are_live(document: Path) -> None:
    assert broken_links(document) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# The `other` one, here\n```\n# not a heading\n```\n")
    document = tmp_path / "a.md"
    good = ["other.md", "other.md#the-other-one-here", "https://example.org/a", "#top"]
    bad = ["gone.md", "other.md#gone", "other.md#not-a-heading", "http://x", "/etc/passwd"]
    links = [f"[text]({link})" for link in good + bad]
    document.write_text("# Top\n" + "\n".join(links) + "\n```\n[in code](gone.md)\n```\n")
    assert broken_links(document) == bad


def test_the_reference_is_up_to_date(tmp_path: Path) -> None:
    """If this fails, run ``make docs``."""
    assert (ROOT / "docs" / "commands.md").read_text() == generated_reference(tmp_path)


def test_every_subcommand_is_in_the_reference_and_in_the_readme(tmp_path: Path) -> None:
    subcommands = COMMAND.findall(generated_reference(tmp_path))
    assert {"bench", "report", "env"} <= set(subcommands)
    readme = (ROOT / "README.md").read_text()
    assert [name for name in subcommands if f"`nfold {name}" not in readme] == []


def test_the_readme_names_no_subcommand_that_does_not_exist(tmp_path: Path) -> None:
    existing = set(COMMAND.findall(generated_reference(tmp_path)))
    readme = (ROOT / "README.md").read_text()
    shown = "\n".join(FENCED_TEXT.findall(readme))
    named = re.findall(r"^nfold ([a-z]+)", shown, re.MULTILINE)
    named += re.findall(r"`nfold ([a-z]+)", FENCED.sub("", readme))
    assert set(named) <= existing


def environment() -> dict[str, str]:
    """Return the environment of this process with nfold's script first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path}


@pytest.mark.slow(parts=8)
@pytest.mark.integration
@pytest.mark.timeout(LIMIT_S)
def test_marked_commands_run(tmp_path: Path) -> None:
    """One after the other in one empty folder, as a reader would run them."""
    commands = commands_to_run((ROOT / "docs" / "bench.md").read_text())
    assert {command.split()[1] for command in commands} == {"bench", "report", "env"}
    for command in commands:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "report.html").stat().st_size > 0
    assert (tmp_path / "nfold-results" / "nfold.db").exists()


@pytest.mark.slow(parts=8)
@pytest.mark.integration
@pytest.mark.timeout(LIMIT_S)
def test_the_first_snippet_has_the_same_accuracy_on_one_and_two_devices(tmp_path: Path) -> None:
    snippets = SNIPPET.findall((ROOT / "docs" / "own-script.md").read_text())
    assert len(snippets) == 1
    (tmp_path / "train.py").write_text(snippets[0])
    lines = [_accuracies(tmp_path, f"cpu:{devices}") for devices in (1, 2)]
    assert len(lines[0]) == 3
    assert lines[0] == lines[1]


def _accuracies(folder: Path, devices: str) -> list[str]:
    command = ["nfold", "run", "--devices", devices, "train.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=True
    )
    return re.findall(r"accuracy (\S+)", done.stdout)


@pytest.mark.integration
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("command", ["explain digits --budget 2s", "bench digits --steps 20"])
def test_the_keys_of_json_are_documented(tmp_path: Path, command: str) -> None:
    common = ["--framework", "simulated", "--devices", "2", "--json", "--no-report"]
    done = subprocess.run(
        ["nfold", *command.split(), *common],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert _keys(json.loads(done.stdout)) - documented("json.md") == set()


def documented(page: str) -> set[str]:
    """Return the names in backquotes in the first column of every table of a page."""
    cells = TABLE_KEYS.findall((ROOT / "docs" / page).read_text())
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def _keys(value: Any, *, inside: bool = False) -> set[str]:
    """Return the keys of the object, and those of the objects in its lists of findings."""
    keys = set(value)
    for name in () if inside else ("budget", "single_device_budget", "measurements"):
        for entry in value.get(name, ()):
            keys |= _keys(entry, inside=True)
    return keys


def test_every_plan_field_is_documented() -> None:
    fields = {field.name for field in dataclasses.fields(nfold.Plan)}
    assert documented("plan.md") == fields


def test_the_readme_fits_on_a_screen_and_the_glossary_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
    rows = re.findall(r"^\| \S", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(rows) - 1 <= GLOSSARY_TERMS


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_pages_have_short_lines_and_present_terms(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) >= LINE_WIDTH] == []
    if page.name == "commands.md":  # generated from the commands
        return
    text = " ".join(FENCED.sub("", page.read_text()).lower().split())
    assert [term for term in RETIRED if re.search(rf"\b{term}\b", text)] == []


def test_user_pages_have_no_links_to_decisions() -> None:
    pages = [page for page in USER_PAGES if page.parent.name == "docs"]
    assert [page.name for page in pages if "](decisions/" in page.read_text()] == []


def test_every_field_report_has_its_command_in_its_document() -> None:
    text = (ROOT / "docs" / "field-reports.md").read_text()
    commands = "\n".join(FENCED_TEXT.findall(text))
    named = re.findall(r"^nfold (?:bench|report) --report ([\w-]+)", commands, re.MULTILINE)
    assert set(named) == set(FIELD_REPORTS)
    sections = re.findall(
        r"^## \d.*\n\n```sh\n(?:pip .*\n)?nfold bench --report ([\w-]+)$", text, re.MULTILINE
    )
    assert sections == list(FIELD_REPORTS)


def test_run_marks_are_parsed() -> None:
    text = "<!-- run -->\n```sh\n# why\na 1\nb\n```\n```sh\nnot this\n```\n"
    assert commands_to_run(text) == ["a 1", "b"]
    console = "<!-- run -->\n```console\n$ a 1\nits output\n```\n"
    assert commands_to_run(console) == ["a 1"]
