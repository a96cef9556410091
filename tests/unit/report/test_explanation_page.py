"""The page of an explanation: bars that follow each other, the user's code, nothing that acts."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest

from explaining import explained
from nfold.core.stats import Interval
from nfold.engines.simulated import Scenario
from nfold.explain.result.budget import Change
from nfold.explain.result.view import build_view
from nfold.report.explanation import explanation_markdown, format_interval
from nfold.report.explanation_page import code_excerpt, explanation_page, waterfall_rows

COSTLY = Scenario(
    compute_ms_per_sample=0.1, exchange_ms=3.0, straggler_ms=2.0, straggler_rank=1, latency_ms=1.0
)
BUDGET = explained(COSTLY)
VIEW = build_view(BUDGET)


def test_every_bar_begins_where_the_one_before_ends() -> None:
    assert BUDGET.account is not None
    bars = waterfall_rows(BUDGET.account)
    assert [bar["name"] for bar in bars] == [
        "model compute",
        "gradient communication",
        "waiting for slower ranks",
        "not attributed",
        "measured step",
    ]
    for before, after in pairwise(bars[:-1]):
        assert after["start"] == before["end"]
    assert bars[-2]["end"] == pytest.approx(bars[-1]["end"])
    assert bars[-1]["end"] == pytest.approx(16)


def test_the_page_has_three_pictures_and_no_script() -> None:
    page = explanation_page(VIEW, BUDGET)
    assert page.count("<svg") >= 3
    assert "<script" not in page
    assert VIEW.headline in page
    assert page.index("<details>") < page.index(BUDGET.rows[0].evidence[0])


def test_hostile_names_do_not_act() -> None:
    hostile = dataclasses.replace(BUDGET, target="</title><script>alert(1)</script>\x1b[31m")
    view = build_view(hostile)
    page = explanation_page(view, hostile)
    assert "<script" not in page
    assert "\x1b" not in page
    assert "<script" not in explanation_markdown(view, hostile).replace("\\<script", "")


def test_a_change_shows_three_lines_of_code_on_either_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("".join(f"line {n}\n" for n in range(1, 21)))
    change = Change(row="data-loader", location="train.py:10", code="DataLoader(...)")
    lines = code_excerpt(change).lines
    assert [line.number for line in lines] == list(range(7, 14))
    assert [line.text for line in lines if line.is_target] == ["line 10"]
    gone = dataclasses.replace(change, location="other.py:10")
    assert code_excerpt(gone).lines == ()


def test_an_interval_without_width_is_a_number() -> None:
    assert format_interval(Interval(-0.001, -0.004, 0.002)) == "0.00"
    assert format_interval(Interval(1.0, -0.5, 2.0)) == "1.00 (-0.50 to 2.00)"
    assert format_interval(Interval(1.0, 0.5, 2.0)) == "1.00 (0.50–2.00)"
