"""The budget as a picture and in words: bars that follow each other, nothing that acts."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from explaining import explained
from nfold.core.stats import Interval
from nfold.engines.simulated import Scenario
from nfold.explain.result.conclusion import write_conclusion
from nfold.report import explanation, html_page
from nfold.report import explanation as explanation_module
from nfold.report import html_page as explained_page

SICK = Scenario(
    compute_ms_per_sample=0.1, exchange_ms=3.0, straggler_ms=2.0, straggler_rank=1, latency_ms=1.0
)
BUDGET = explained(SICK)


def test_every_bar_begins_where_the_one_before_ends() -> None:
    found = html_page.waterfall_bars(BUDGET)
    rests = ["other rows", "unexplained"]
    names = ["2-fold", "link", "imbalance", "synchronization", *rests, "achieved"]
    assert [bar.name for bar in found] == names
    for before, after in pairwise(found[:-1]):
        assert after.start == before.end
    assert found[-1].end == pytest.approx(16)
    assert found[0].end == pytest.approx(10)


def test_what_one_device_loses_stands_before_n_fold() -> None:
    """Ranks with a batch each: a step of one device is one at N-fold speed."""
    starved = Scenario(compute_ms_per_sample=0.1, input_ms_per_sample=0.05, exchange_ms=3.0)
    found = explained(starved, "weak", input="loader")
    drawn = html_page.waterfall_bars(found)
    names = [bar.name for bar in drawn]
    assert names[:3] == ["compute alone", "input on 1 device", "2-fold"]
    assert names[3:] == ["link", "other rows", "unexplained", "achieved"]
    assert drawn[1].end == pytest.approx(drawn[2].end)
    assert drawn[1].start == drawn[0].end
    page = explained_page.explanation_page(found)
    assert "From the compute of one device" in page
    assert '<td class="change">' in page
    assert not html_page.starts_from_one_device(BUDGET)


def test_the_picture_has_the_numbers_and_no_script() -> None:
    page = explained_page.explanation_page(BUDGET)
    assert "+3.00" in page
    assert "16.00" in page
    assert "<script" not in page
    assert page.count("<svg") == 1


def test_hostile_names_are_inert() -> None:
    hostile = dataclasses.replace(BUDGET, target="</title><script>alert(1)</script>\x1b[31m")
    page = explained_page.explanation_page(hostile)
    assert "<script" not in page
    assert "\x1b" not in page
    assert "<script" not in explanation_module.explanation_markdown(hostile).replace(
        "\\<script", ""
    )


def test_the_three_sentences_stand_in_the_page_and_in_markdown() -> None:
    said = write_conclusion(BUDGET)
    assert len(said) == 3
    assert said[0].startswith("Most is lost to link")
    assert "1.54 ×" in said[2]
    assert said[0] in explained_page.explanation_page(BUDGET)
    assert "link" in explanation_module.explanation_markdown(BUDGET)


@pytest.mark.parametrize(("high", "told"), [(0.15, False), (0.3, True)])
def test_where_the_noise_hides_a_part_of_a_step_nothing_is_said_to_be_well(
    high: float, *, told: bool
) -> None:
    healthy = explained(Scenario(compute_ms_per_sample=0.1))
    step_ms = healthy.n_devices.step_ms.value
    others = Interval(value=0.01 * step_ms, low=-high * step_ms, high=high * step_ms)
    said = write_conclusion(dataclasses.replace(healthy, not_significant_ms=others))
    assert len(said) == 3
    assert said[1].startswith("Change nothing yet: measure longer") == told
    assert ("There is nothing to change." in said) != told


def test_healthy_runs_need_no_change() -> None:
    healthy = explained(Scenario(compute_ms_per_sample=0.1))
    assert write_conclusion(healthy)[1] == "There is nothing to change."
    assert explanation.finding_rows(healthy.rows, healthy) == []


@pytest.mark.parametrize("name", ["not_significant_ms", "not_attributed_ms"])
@pytest.mark.parametrize(("low", "high"), [(5.5, 6.5), (2.0, 10.0)])
def test_what_has_no_name_is_not_called_healthy(name: str, low: float, high: float) -> None:
    rest: dict[str, Any] = {name: Interval(6.0, low, high)}
    said = write_conclusion(dataclasses.replace(BUDGET, rows=(), one_device_rows=(), **rest))
    assert said[0] == (
        "6.00 ms, 38% of a step, is missing to 2-fold. No single cause is above the noise of "
        "these runs."
    )
    assert "a larger --budget" in said[1]


def test_what_is_in_rows_without_a_name_is_told_first_where_it_is_most() -> None:
    named = BUDGET.significant[0]
    hidden = dataclasses.replace(named, cause="threads", significant=False)
    rest = Interval(6.0, 5.5, 6.5)
    rows = (named, hidden)
    said = write_conclusion(
        dataclasses.replace(BUDGET, rows=rows, one_device_rows=(), not_significant_ms=rest)
    )
    assert said[0].startswith("Most, 6.00 ms (5.50 to 6.50) of a step on 2 devices, is in rows ")
    assert "(threads 3.00 ms)" in said[0]
    assert said[1].startswith("Of what is above it most is lost to link")
    less = dataclasses.replace(BUDGET, not_significant_ms=Interval(2.0, 1.5, 2.5))
    assert write_conclusion(less)[0].startswith("Most is lost to link")


def test_a_change_that_costs_more_than_it_wins_is_not_advised() -> None:
    """Copies of a script may be faster than one process, and not once they exchange."""
    first = BUDGET.significant[0]
    worse = Interval(0.4, 0.3, 1.9)
    rows = tuple(
        dataclasses.replace(row, predicted_speedup=worse) if row.cause == first.cause else row
        for row in BUDGET.rows
    )
    alone = dataclasses.replace(BUDGET, rows=rows[:1], one_device_rows=())
    assert alone.fix_is_slower(rows[0])
    assert not BUDGET.fix_is_slower(first)
    said = write_conclusion(alone)
    assert said[0].startswith(f"Most is lost to {first.cause}")
    assert said[1].startswith(f"Its change does not pay here: {first.fix} would make it 0.40 ×")
    assert "of one device; it is " in said[1]
    assert said[2].startswith("2 devices are ")
    assert [line[-1] for line in explanation.finding_rows(rows[:1], alone)][:1] == [""]
    other = dataclasses.replace(first, cause="threads", fix="fewer threads")
    both = write_conclusion(dataclasses.replace(alone, rows=(rows[0], other)))
    assert both[2] == "Change for threads: fewer threads."


def test_small_costs_are_told_together() -> None:
    small = Scenario(
        compute_ms_per_sample=0.1,
        exchange_ms=0.12,
        latency_ms=0.12,
        contention_ms=0.12,
        straggler_ms=0.12,
        straggler_rank=1,
    )
    found = explained(small)
    assert not found.significant
    assert found.not_significant_ms.value == pytest.approx(0.48)
    assert found.not_attributed_ms.value == pytest.approx(0, abs=1e-9)
    said = write_conclusion(found)
    assert said[0].startswith("0.48 ms, 5% of a step, is missing to 2-fold. Measured were ")
    assert " 0.12 ms, none by itself above the noise of these runs; together they " in said[0]


def test_devices_that_cannot_help_are_told_so() -> None:
    slow = explained(Scenario(compute_ms_per_sample=0.1, exchange_ms=25.0))
    said = write_conclusion(slow)
    assert said[0].startswith("2 devices cannot help at batch 200: they are 0.57 ×")
    assert said[1].startswith("They do from a batch of about 500 on")
    assert "10,000 samples/s" in said[2]


def test_nothing_is_not_less_than_nothing() -> None:
    assert (
        explanation.format_range_in_words(Interval(-0.001, -0.004, 0.002)) == "0.00 (0.00 to 0.00)"
    )
    assert explanation.format_range_in_words(Interval(-0.01, None, None)) == "-0.01"
