"""The scripts with faults of public threads: small, and their repair is the fix only."""

from __future__ import annotations

import ast
import difflib

import pytest
import traced
from targets import HERE, SCRIPTS

SCRIPTS_WITH_FAULTS = HERE / "scripts"
CHANGED = {
    "ddp": 2,
    "with_lightning": 1,
    "with_accelerate": 6,
    "with_trainer": 1,
    "dataparallel": 23,
    "single": 2,
    "mixed_precision": 3,
    "characters": 1,
    "cifar_ddp": 54,
}
"""Lines that go or come with the fix; from loaders to pictures on the device is the longest way."""


def _lines(name: str) -> list[str]:
    return (SCRIPTS_WITH_FAULTS / f"{name}.py").read_text().splitlines()


@pytest.mark.parametrize("name", CHANGED)
def test_a_fixed_script_differs_by_the_fix_only(name: str) -> None:
    compared = difflib.unified_diff(_lines(name), _lines(f"{name}_fixed"), lineterm="", n=0)
    changed = [line for line in compared if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert len(changed) == CHANGED[name], "\n".join(changed)


@pytest.mark.parametrize("name", CHANGED)
def test_scripts_are_small_and_know_nothing_of_nfold(name: str) -> None:
    for kind in (name, f"{name}_fixed"):
        assert len(_lines(kind)) < 110
        assert "nfold" not in "\n".join(_lines(kind))


def test_every_script_stands_in_the_table() -> None:
    table = (SCRIPTS_WITH_FAULTS / "README.md").read_text()
    assert [name for name in CHANGED if f"{name}.py" not in table] == []


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_loop_is_instrumented_as_documented(kind: str) -> None:
    text = (HERE / "dosed" / SCRIPTS[kind]).read_text()
    made = traced.integrated(text)
    if kind == "lightning":
        assert made == text
        return
    ast.parse(made)
    assert made.count("traceml.trace_step(") == made.count("traceml.init(") == 1
    inside = made.index("traceml.trace_step(")
    assert made.index("for images, labels in loader:") < inside < made.index("optimizer.step()")


def test_a_verdict_is_its_status_and_its_words() -> None:
    told = {"status": "INPUT-BOUND", "summary": "Input took 64%.", "action": "Add workers."}
    said = traced.verdict({"primary_diagnosis": told})
    assert said == ("INPUT-BOUND", "INPUT-BOUND: Input took 64%. Add workers.")
    assert traced.VERDICTS[said[0]] == "input"
    assert traced.verdict({}) == ("NO VERDICT", "NO VERDICT:")
