"""The score of a diagnosis: slope, error, pairs, confusion, promises, healthy runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import diagnose
import pytest
from diagnosis_score import (
    Case,
    both_first,
    confusion,
    error,
    gains,
    right_first,
    slope,
    table,
    unexplained,
    without_own,
)
from targets import Simulated


def _case(
    injected: dict[str, float],
    attributed: dict[str, float],
    *named: str,
    interaction_ms: float = 0.0,
    speedup: float | None = None,
    predicted: float | None = None,
) -> Case:
    return Case(
        target="made",
        injected=injected,
        attributed=attributed,
        step_ms=20.0,
        unexplained_ms=1.0,
        named=named,
        interaction_ms=interaction_ms,
        speedup=speedup,
        predicted=predicted,
    )


LINKS = [
    _case({"link": 1.0}, {"link": 1.2}, "link"),
    _case({"link": 3.0}, {"link": 3.0}, "threads", "link"),
    _case({"link": 5.0}, {"link": 4.8}, "link", predicted=2.0),
]
HEALTHY = [_case({}, {}, speedup=1.8), _case({}, {}, "input", speedup=1.9)]
PAIRS = [
    _case({"link": 2, "input": 2}, {"link": 0, "input": 1}, "input", interaction_ms=2.5),
    _case({"link": 2, "input": 2}, {"link": 2, "input": 2}, "link", "input"),
]


def test_a_slope_is_that_of_the_doses() -> None:
    assert slope([case.point for case in LINKS]) == pytest.approx(0.9)
    assert slope([case.point for case in LINKS[:1]]) is None


def test_errors_are_parts_of_the_step() -> None:
    assert error(LINKS) == pytest.approx(0.4 / 3 / 20)
    assert unexplained(LINKS) == pytest.approx(0.05)


def test_what_a_healthy_run_loses_is_not_counted_as_injected() -> None:
    healthy = [_case({}, {"link": own, "input": 9.0}) for own in (0.5, 1.0, 7.0)]
    corrected = without_own([*LINKS, *healthy, *PAIRS])
    assert [case.attributed["link"] for case in corrected[:3]] == pytest.approx([0.2, 2.0, 3.8])
    assert corrected[3].point == pytest.approx((4, 0 + 1 + 2.5 - 1.0 - 9.0))
    assert without_own(LINKS) == LINKS


def test_what_two_causes_share_belongs_to_their_pair() -> None:
    assert PAIRS[0].point == (4, 3.5)
    assert PAIRS[0].label == "link + input"


def test_the_first_cause_counts_from_a_twentieth_of_a_step_on() -> None:
    assert right_first([*LINKS, *HEALTHY]) == pytest.approx(2 / 3)
    assert right_first(HEALTHY) is None
    assert right_first([_case({"link": 0.9}, {"link": 0.0})]) is None
    assert confusion(LINKS)["link", "threads"] == 1
    assert confusion(HEALTHY)["nothing", "input"] == 1


def test_both_causes_of_a_pair_are_asked_for() -> None:
    assert right_first(PAIRS) == 1
    assert both_first(PAIRS) == 0.5
    assert both_first(LINKS) is None


def test_a_promise_is_compared_with_healthy_runs() -> None:
    [(case, achieved)] = gains([*LINKS, *HEALTHY])
    assert case.predicted == 2.0
    assert achieved == pytest.approx(1.85)
    assert gains(LINKS) == []


def test_the_table_has_it_all() -> None:
    told = Case(
        target="ddp on 2",
        injected={"input": 2.0},
        attributed={},
        step_ms=20.0,
        unexplained_ms=0.0,
        named=("residual",),
        tool="traceml",
        said="RESIDUAL-HEAVY: so it is",
    )
    silent = _case({"link": 9.0}, {})
    text = "\n".join(table([*LINKS, *HEALTHY, *PAIRS, silent, told]))
    assert "Not tested: 1 of 8." in text
    assert "| link | 3 | 0.900 |" in text
    assert "nfold: healthy runs with a cause named: 1 of 2." in text
    assert "Both causes of a pair first: 50%." in text
    assert "predicted against that of healthy runs: 8.1% apart" in text
    assert "| input | residual | 1 |" in text
    assert "| ddp on 2 | input 2.0 ms | traceml | RESIDUAL-HEAVY: so it is |" in text


@pytest.mark.slow(parts=8)
def test_injected_costs_are_found_on_the_simulated_framework(tmp_path: Path) -> None:
    out = tmp_path / "cases.jsonl"
    asked = ["--cause", "link", "--cause", "input", "--doses", "3", "--healthy", "1"]
    found = diagnose.main([*asked, "--budget", "1m", "--out", str(out)])
    assert {case.label: case.named[:1] for case in found} == {
        "link": ("link",),
        "input": ("input",),
        "nothing": (),
    }
    for case in found:
        injected, attributed = case.point
        assert attributed == pytest.approx(injected, abs=0.05 * case.step_ms)
    assert diagnose.main(["--read", str(out)]) == found


def test_jobs_are_all_doses_pairs_and_healthy_runs() -> None:
    asked = argparse.Namespace(cause=["link", "threads"], doses=[1.0, 2.0], pairs=True, healthy=3)
    asked.seed = 0
    labels = [" + ".join(doses) for doses, _ in diagnose.jobs(asked, Simulated())]
    # The threads of a real script are a switch, the simulated ones have a size.
    assert labels.count("link") == labels.count("threads") == 2
    assert labels.count("imbalance + link") == 2
    assert labels.count("") == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cause", "wind"], "'wind': for simulated allowed are link"),
        (["--on", "cpu:2", "--script", "ddp", "--cause", "copies"], "'copies': for ddp on cpu:2"),
        (["--tool", "traceml"], "next: --script ddp"),
    ],
)
def test_what_cannot_be_injected_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        diagnose.main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("strong", "attributed"), [(True, 2.0), (False, 5.0)])
def test_lost_input_is_in_one_block_or_in_both(strong: bool, attributed: float) -> None:
    found = {
        "n_devices": {"step_ms": {"value": 20.0}},
        "budget": [_row("input", 2.0), _row("link", 4.0)],
        "single_device_budget": [_row("input", 3.0)],
        "named": ["input", "link"],
        "interactions": [{"causes": ["link", "input"], "lost_ms": {"value": 1.0}}],
        "others_ms": {"value": 0.25},
        "unexplained_ms": {"value": 0.5},
        "speedup": {"value": 1.5},
        "plan": {"workers": 4},
        "warnings": [{"kind": "untested_layout", "text": "no time"}],
    }
    case = diagnose.read("made", found, {"input": 4.0}, strong=strong)
    assert case.attributed == {"input": attributed}
    assert case.named == ("input", "link")
    assert (case.predicted, case.interaction_ms, case.said) == (1.9, 0.0, "")
    healthy = diagnose.read("made", found, {}, strong=strong)
    assert healthy.attributed == {"input": attributed, "link": 4.0}
    assert healthy.others_ms == 0.25
    of_n, of_one = _row("input", 2.0) | {"proven": True}, _row("input", 3.0)
    tried = found | {"budget": [of_n], "single_device_budget": [of_one]}
    # The change makes one device as much faster: against one that has it, nothing is gained.
    assert diagnose.read("made", tried, {"input": 4.0}, strong=strong).predicted == 1.0
    untested = diagnose.read("made", found, {"layout": 4.0}, strong=strong)
    assert (untested.attributed, untested.said) == ({}, "untested layout: no time")


def _row(cause: str, value: float) -> dict[str, object]:
    lost = {"value": value, "low": 0.9 * value, "high": 1.1 * value}
    promised = {"value": 1.9}
    told = {"cause": cause, "lost_ms": lost, "predicted_speedup": promised}
    return told | {"named": True, "proven": False}
