"""The way from the original to the result: bars that follow each other, and their page."""

from __future__ import annotations

import dataclasses

import pytest

from explaining import explained
from nfold.cli.tune_report import page_content
from nfold.core.stats import Interval
from nfold.engines.simulated import Scenario
from nfold.explain.design import Trial
from nfold.report.tune_page import tune_page
from nfold.tune.remedies import Remedy
from nfold.tune.result import Tried, TuneResult, Verification
from nfold.tune.waterfall import waterfall_bars

BUDGET = explained(Scenario(compute_ms_per_sample=0.1, exchange_ms=3.0, latency_ms=1.0))
GAINS = {"channels_last": Interval(1.25, 1.2, 1.3), "cudnn_benchmark": Interval(1.6, 1.5, 1.7)}


def result(final_ms: float = 20.0, *more: Tried) -> TuneResult:
    tried = [
        Tried(remedy=Remedy(name=name, value=True), outcome="kept", gain=gain)
        for name, gain in GAINS.items()
    ]
    other = Tried(remedy=Remedy(name="tf32", value=True), outcome="failed", reason="<b>no</b>")
    trial = Trial(plan=BUDGET.plan)
    return TuneResult(
        target="train.py",
        devices=2,
        original=trial,
        final=trial,
        kept=tuple(one.remedy for one in (*tried, *more)),
        tried=(other, *tried, *more),
        verification=Verification(
            gain=Interval(40 / final_ms, 1.8, 2.3), original_ms=40.0, final_ms=final_ms, pairs=3
        ),
        losses="first 20 losses compared",
        budget=BUDGET,
        final_budget=BUDGET,
    )


def test_every_remedy_begins_where_the_one_before_ends() -> None:
    bars = waterfall_bars(result())
    assert [(bar.label, bar.kind) for bar in bars] == [
        ("original", "step"),
        ("channels_last", "remedy"),
        ("cudnn.benchmark", "remedy"),
        ("final", "step"),
        ("left to 2-fold", "left"),
        ("2-fold", "step"),
    ]
    ends = [(bar.start_ms, bar.end_ms) for bar in bars]
    assert ends[1] == (40.0, 32.0)
    assert ends[2] == pytest.approx((32.0, 20.0))
    assert ends[4] == (20.0, BUDGET.ideal_ms.value)


def test_fresh_runs_that_differ_from_the_gains_have_a_bar() -> None:
    (difference,) = [bar for bar in waterfall_bars(result(22.0)) if bar.kind == "difference"]
    assert (difference.start_ms, difference.end_ms) == pytest.approx((20.0, 22.0))


def test_remedies_that_help_only_together_have_one_bar() -> None:
    gain = Interval(1.1, 1.05, 1.15)
    pair = [
        Tried(
            remedy=Remedy(name=name, value=True), outcome="kept", gain=gain, reason="together with"
        )
        for name in ("tf32", "fused_optimizer")
    ]
    bars = waterfall_bars(result(20 / 1.1, *pair))
    remedies = [bar for bar in bars if bar.kind == "remedy"]
    assert len(remedies) == 3
    assert remedies[-1].label.startswith("TF32 and ")
    assert remedies[-1].end_ms == pytest.approx(20 / 1.1)


def test_what_is_left_is_not_shown_if_it_is_unknown() -> None:
    unknown = dataclasses.replace(result(), final_budget=None)
    assert waterfall_bars(unknown)[-1].label == "final"
    unmeasured = Verification(gain=None, original_ms=None, final_ms=None)
    assert waterfall_bars(dataclasses.replace(result(), verification=unmeasured)) == ()


def test_the_page_has_the_waterfall_and_no_script() -> None:
    page = tune_page(page_content(result(), {"toml": "nfold.toml"}))
    assert page.count("<svg") >= 1
    assert "<script" not in page
    assert "<b>no</b>" not in page
    assert "2.00 × faster" in page
    assert page.index("Tried") < page.index("TF32")
