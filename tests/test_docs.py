"""The documents tell the truth: commands run, every subcommand is there, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from nfold.bench.reports import FIELD_REPORTS

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
LIMIT_S = 300


def commands_to_run(text: str) -> list[str]:
    """The lines of every block after a ``run`` mark; of a console block, those with a prompt."""
    lines = [line for block in TO_RUN.findall(text) for line in block.splitlines()]
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return prompted or [line for line in lines if line and not line.startswith("#")]


def slug(heading: str) -> str:
    """The anchor that a heading gets: lower case, spaces to hyphens, punctuation dropped."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def broken_links(document: Path) -> list[str]:
    """Links of a document that lead nowhere; of an external one only the form is looked at."""
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


def written_reference(folder: Path) -> str:
    """docs/commands.md as the commands of today would have it."""
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


def test_the_reference_is_what_the_commands_say(tmp_path: Path) -> None:
    """Where this fails: make docs."""
    assert (ROOT / "docs" / "commands.md").read_text() == written_reference(tmp_path)


def test_every_subcommand_is_in_the_reference_and_in_the_readme(tmp_path: Path) -> None:
    subcommands = COMMAND.findall(written_reference(tmp_path))
    assert {"bench", "report", "env"} <= set(subcommands)
    readme = (ROOT / "README.md").read_text()
    assert [name for name in subcommands if f"`nfold {name}" not in readme] == []


def test_the_readme_names_no_subcommand_that_does_not_exist(tmp_path: Path) -> None:
    existing = set(COMMAND.findall(written_reference(tmp_path)))
    readme = (ROOT / "README.md").read_text()
    shown = "\n".join(FENCED_TEXT.findall(readme))
    named = re.findall(r"^nfold ([a-z]+)", shown, re.MULTILINE)
    named += re.findall(r"`nfold ([a-z]+)", FENCED.sub("", readme))
    assert set(named) <= existing


@pytest.mark.integration
@pytest.mark.timeout(LIMIT_S)
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    """One after the other in one empty folder, as a reader would."""
    commands = commands_to_run((ROOT / "README.md").read_text())
    assert {command.split()[1] for command in commands} >= {"bench", "report", "env"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "report.html").stat().st_size > 0
    assert (tmp_path / "nfold-results" / "nfold.db").exists()


def test_every_field_report_has_its_command_in_its_document() -> None:
    text = (ROOT / "docs" / "field-reports.md").read_text()
    commands = "\n".join(FENCED_TEXT.findall(text))
    named = re.findall(r"^nfold (?:bench|report) --report ([\w-]+)", commands, re.MULTILINE)
    assert set(named) == set(FIELD_REPORTS)
    sections = re.findall(r"^## \d.*\n\n```sh\nnfold bench --report ([\w-]+)$", text, re.MULTILINE)
    assert sections == list(FIELD_REPORTS)


def test_a_run_mark_is_understood() -> None:
    text = "<!-- run -->\n```sh\n# why\na 1\nb\n```\n```sh\nnot this\n```\n"
    assert commands_to_run(text) == ["a 1", "b"]
    console = "<!-- run -->\n```console\n$ a 1\nits output\n```\n"
    assert commands_to_run(console) == ["a 1"]
