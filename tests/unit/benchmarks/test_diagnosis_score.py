"""The score of a diagnosis: slope, error, confusion, healthy runs."""

from __future__ import annotations

import diagnose
import pytest
from diagnosis_score import Case, confusion, error, right_first, slope, table


def _case(cause: str, injected: float, attributed: float, *named: str) -> Case:
    return Case(
        cause=cause,
        injected_ms=injected,
        attributed_ms=attributed,
        step_ms=20.0,
        unexplained_ms=1.0,
        named=named,
    )


CASES = [
    _case("link", 1.0, 1.2, "link"),
    _case("link", 3.0, 3.0, "threads", "link"),
    _case("link", 5.0, 4.8, "link"),
    _case("", 0.0, 0.0),
    _case("", 0.0, 0.0, "input"),
]


def test_a_slope_is_that_of_the_doses() -> None:
    assert slope(CASES[:3]) == pytest.approx(0.9)
    assert slope(CASES[:1]) is None


def test_errors_are_parts_of_the_step() -> None:
    assert error(CASES[:3]) == pytest.approx(0.4 / 3 / 20)


def test_the_first_cause_counts_from_a_twentieth_of_a_step_on() -> None:
    assert right_first(CASES) == pytest.approx(2 / 3)
    assert right_first(CASES[3:]) is None
    assert confusion(CASES)["link", "threads"] == 1
    assert confusion(CASES)["nothing", "input"] == 1


def test_the_table_has_it_all() -> None:
    text = "\n".join(table(CASES))
    assert "| link | 3 | 0.900 |" in text
    assert "Healthy runs with a cause named: 1 of 2." in text


def test_injected_costs_are_found_on_the_simulated_framework() -> None:
    asked = ["--cause", "link", "--cause", "input", "--doses", "3", "--healthy", "1"]
    found = diagnose.main([*asked, "--budget", "1m"])
    assert [case.named[:1] for case in found] == [("link",), ("input",), ()]
    for case in found[:2]:
        assert case.attributed_ms == pytest.approx(case.injected_ms, abs=0.05 * case.step_ms)
