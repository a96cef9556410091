"""nfold explain on the simulated framework: the table, the JSON, the report, wrong requests."""

from __future__ import annotations

import dataclasses
import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from explaining import explained, ladder, target
from nfold.cli import explain_command, progress
from nfold.cli.commands import app
from nfold.cli.explain_command import parse_seconds
from nfold.cli.render import _block, print_explanation
from nfold.core.errors import NfoldError, RunFailure, UsageError
from nfold.core.measurement import FailureCause, Measurement
from nfold.engines.simulated import Scenario
from nfold.explain.design import Trial
from nfold.store.store import Store

SCRIPT = {"compute_ms_per_sample": 0.1, "exchange_ms": 3.0, "samples_per_epoch": 1000}
SIMULATED = ["--framework", "simulated", "--device", "cuda", "--devices", "2", "--batch", "200"]


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NFOLD_SIMULATED", json.dumps(SCRIPT))
    return monkeypatch


def _explain(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments])


def _refused(*arguments: str) -> NfoldError:
    error = _explain(*arguments).exception
    assert isinstance(error, NfoldError)
    return error


def test_the_table_says_what_costs_what_to_change_and_what_to_expect(tmp_path: Path) -> None:
    found = _explain("digits", *SIMULATED, "--plain")
    assert found.exit_code == 0, found.exception
    assert max(map(len, found.stdout.splitlines())) <= 100
    for text in ("1 device", "2-fold would be", "unexplained", "Where 3.00 ms"):
        assert text in found.stdout
    said = " ".join(found.stdout.split())
    assert "Most is lost to link" in said
    assert "23 % of a step on 2 devices. Change: send less" in said
    assert "Expect 2.00 × of one device instead of 1.54 ×" in said
    assert "left)" in found.stderr
    page = (tmp_path / "nfold-results" / "explain.html").read_text()
    assert "<svg" in page
    assert "<script" not in page
    assert "+3.00" in page
    assert "link" in (tmp_path / "nfold-results" / "explain.md").read_text()


def test_a_line_to_change_is_told_whole_however_narrow_the_terminal() -> None:
    written = StringIO()
    line = "benchmarks/diagnosis/scripts/with_accelerate.py:44"
    _block(Console(width=40, file=written), [("synchronization", "what", "1.00", "2.00 ×", line)])
    assert line in "".join(written.getvalue().split())


def test_code_to_change_stands_in_one_line_below_the_table() -> None:
    written = StringIO()
    code = "train.py:38: send half: model.register_comm_hook(None, bf16_compress_hook)"
    rows = [("link", "gradient bytes", "13.63", "0.96 ×", code), ("unexplained", "", "0.1", "", "")]
    _block(Console(width=100, file=written), rows)
    text = written.getvalue()
    assert text.index("unexplained") < text.index("What to change\n  link")
    assert code in text
    assert text.count("unexplained") == 1
    written = StringIO()
    _block(Console(width=100, file=written), rows[1:])
    assert "What to change" not in written.getvalue()


def test_a_change_that_helps_both_is_told_below_the_first_table_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Scenario(compute_ms_per_sample=0.1, samples_per_epoch=2000, epoch_gap_ms=30.0)
    found = explained(script)
    assert [row.cause for row in found.rows if row.significant] == ["epoch-boundary"]
    assert [row.cause for row in found.one_device_rows if row.significant] == ["epoch-boundary"]
    print_explanation(found, plain=True)
    assert capsys.readouterr().out.count("What to change") == 1


def _intervals(rows: list[dict[str, Any]]) -> bool:
    return all({"value", "low", "high"} == set(row["lost_ms"]) for row in rows)


def test_json_has_the_versioned_form_and_a_rerun_measures_nothing_anew() -> None:
    found = _explain("digits", *SIMULATED, "--json", "--no-report")
    said = json.loads(found.stdout)
    assert list(said) == [
        "schema",
        "target",
        "plan",
        "devices",
        "one_device",
        "n_devices",
        "speedup",
        "device_bound",
        "budget",
        "single_device_budget",
        "named",
        "interactions",
        "others_ms",
        "unexplained_ms",
        "at_least",
        "wrong",
        "warnings",
    ]
    assert (said["schema"], said["target"], said["devices"]) == (1, "digits", 2)
    assert said["one_device"]["samples_per_s"]["value"] == pytest.approx(10_000)
    assert said["speedup"]["value"] == pytest.approx(20 / 13)
    row = said["budget"][0]
    assert {"cause", "lost_ms", "predicted_speedup", "fix", "evidence"} <= set(row)
    assert row["predicted_samples_per_s"]["value"] == pytest.approx(20_000)
    assert (row["named"], row["proven"]) == (True, False)
    assert row["cause"] == "link"
    assert row["lost_ms"]["value"] == pytest.approx(3)
    assert row["predicted_speedup"]["value"] == pytest.approx(2)
    assert _intervals([*said["budget"], *said["single_device_budget"]])
    assert not Path("nfold-results/explain.html").exists()
    with Store.open_readonly(Path("nfold-results")) as store:
        before = {measurement.id for measurement in store.measurements()}
    assert set(row["evidence"]) <= before
    again = json.loads(_explain("digits", *SIMULATED, "--json", "--no-report").stdout)
    assert again["budget"] == said["budget"]
    with Store.open_readonly(Path("nfold-results")) as store:
        assert {measurement.id for measurement in store.measurements()} == before


def test_what_was_measured_before_is_said_to_be() -> None:
    first, second = (_explain("digits", *SIMULATED, "--no-report", "--plain") for _ in range(2))
    assert progress.STORED_RESULTS_NOTE not in first.stderr
    assert "(measured 2" not in first.stderr
    assert second.stderr.count(progress.STORED_RESULTS_NOTE) == 1
    lines = [line for line in second.stderr.splitlines() if line.startswith("[")]
    assert lines
    assert all("(measured 2" in line for line in lines)
    anew = _explain("digits", *SIMULATED, "--no-report", "--plain", "--again")
    assert progress.STORED_RESULTS_NOTE not in anew.stderr


def test_a_report_of_the_results_shows_plans_only() -> None:
    _explain("digits", *SIMULATED, "--no-report")
    found = CliRunner().invoke(app, ["report", "--json"])
    kept = json.loads(found.stdout)["measurements"]
    with Store.open_readonly(Path("nfold-results")) as store:
        everything = store.measurements()
    assert 0 < len(kept) < len(everything)
    assert {m["id"] for m in kept} == {m.id for m in everything if not m.variant}


def test_a_failing_plan_is_one_sentence(planted: pytest.MonkeyPatch) -> None:
    planted.setenv("NFOLD_SIMULATED", '{"failures": [{"kind": "crash", "step": 3}]}')
    error = _refused("digits", *SIMULATED)
    assert isinstance(error, RunFailure)
    assert "planted crash in step 3" in str(error)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["digits", "--device", "cpu"], "allowed are cpu:1, cpu:2, ...; next: --devices cpu:2"),
        (["digts", "--devices", "cpu:2"], "workload 'digts'"),
        (["conv2d", "--devices", "cpu:2", "--framework", "jax"], "nfold bench conv2d"),
        (["digits", *SIMULATED, "--budget", "soon"], "allowed are times above 0"),
        (["digits", *SIMULATED, "--budget", "0s"], "allowed are times above 0"),
        (["digits", "--framework", "simulated", "--devices", "cuda:2,cuda:4"], "one value"),
        (["digits", *SIMULATED, "--scaling", "sideways"], "weak, strong"),
    ],
)
def test_a_wrong_request_says_what_is_allowed(arguments: list[str], said: str) -> None:
    error = _refused(*arguments)
    assert isinstance(error, UsageError)
    assert said in str(error)


@pytest.mark.parametrize(
    ("text", "value"), [("90s", 90), ("3m", 180), ("1h", 3600), ("45", 45), ("1.5m", 90)]
)
def test_times_are_read(text: str, value: float) -> None:
    assert parse_seconds(text) == value


def test_stopped_before_there_is_a_speedup_it_says_so(planted: pytest.MonkeyPatch) -> None:
    planted.setattr(explain_command, "_run", lambda *_: None)
    found = _explain("digits", *SIMULATED)
    assert found.stdout == ""
    assert "next: the same command, which goes on from here" in found.stderr


def _outcome(rung: Trial, measurement: Measurement) -> str:
    """What the line of a run says came out."""
    said: list[str] = []
    shown: Any = SimpleNamespace(print_line=said.append, show_live=lambda _: None)
    lines = progress.ExplainProgress(shown)
    lines.started([rung], 0, 9.0)
    lines.finished([rung], 0, [measurement], 8.0)
    (line,) = said
    return line.partition(": ")[2].partition(" (")[0]


def test_a_line_of_a_run_tells_what_lies_between_its_epochs() -> None:
    """More workers may only move what is waited for there."""
    whole = Trial(plan=ladder().plan.edit(steps=None, epochs=3))
    plain, with_gap = (
        _outcome(
            whole, target(Scenario(compute_ms_per_sample=0.1, epoch_gap_ms=gap)).measure(whole, 0)
        )
        for gap in (0.0, 400.0)
    )
    assert plain == "10.00 ms a step"
    assert with_gap.startswith("10.00 ms a step and ")
    assert with_gap.endswith(" between epochs")


def test_a_line_of_a_run_tells_what_comes_after_some_steps_only() -> None:
    rung = Trial(plan=ladder().plan.edit(steps=100))
    done = target(Scenario(compute_ms_per_sample=0.1, host_gap_ms=60.0)).measure(rung, 0)
    assert _outcome(rung, done) == "10.00 ms a step and 3.00 after some only"


def test_a_line_of_a_run_says_that_a_turn_never_came() -> None:
    rung = ladder().actual()
    done = target(Scenario(compute_ms_per_sample=0.1)).measure(rung, 0)
    ranks = tuple(dataclasses.replace(rank, windows=()) for rank in done.ranks)
    failed = dataclasses.replace(done, status="oom", cause=FailureCause(text="no room"))
    words = [_outcome(rung, one) for one in (dataclasses.replace(done, ranks=ranks), failed)]
    assert words == ["had no turn before the script ended", "oom: no room"]


def test_a_line_of_a_run_tells_what_its_plan_has_of_its_own() -> None:
    said: list[str] = []
    shown: Any = SimpleNamespace(print_line=said.append, show_live=said.append)
    lines, whole = progress.ExplainProgress(shown), ladder()
    clock = target(Scenario(compute_ms_per_sample=0.1))
    for rung in (
        whole.actual(),
        whole.baseline,
        whole.with_plan(workers=3),
        whole.with_plan(batch=400),
    ):
        lines.started([rung], 0, 9.0)
        lines.finished([rung], 0, [clock.measure(rung, 0)], 8.0)
    # The live line has the time first, a printed one the number of the run.
    words = [line.partition("· " if "left ·" in line else "] ")[2] for line in said]
    assert [one.partition(" · ")[0] for one in words] == [
        *["2 devices, batch 200"] * 2,
        *["1 device, batch 200"] * 2,
        *["2 devices, batch 200, workers 3"] * 2,
        *["2 devices, batch 400"] * 2,
    ]
