"""nfold explain on the simulated framework: the table, the JSON, the report, wrong requests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from explaining import experiment_design, failed, target
from nfold.cli import explain_command, progress
from nfold.cli.app import app
from nfold.cli.explain_command import parse_seconds
from nfold.core.errors import NfoldError, RunFailure, UsageError
from nfold.core.script_profile import ScriptProfile
from nfold.engines.simulated import Scenario
from nfold.explain.experiment import Experiment
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import TrialResults
from nfold.sandbox.sandbox import WriteReport
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


def test_the_screen_the_page_and_the_stored_values(tmp_path: Path) -> None:
    found = _explain("digits", *SIMULATED, "--plain")
    assert found.exit_code == 0, found.exception
    lines = found.stdout.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    assert "so far: " in found.stderr
    folder = tmp_path / "nfold-results" / "digits"
    page = (folder / "explain.html").read_text()
    assert "<svg" in page
    assert "<script" not in page
    assert "model compute" in (folder / "explain.md").read_text()
    again = _explain("digits", "--show", "--plain")
    assert again.stdout == found.stdout
    assert _explain("--show", "--plain").stdout == found.stdout
    details = _explain("digits", "--show", "--details", "--plain").stdout
    assert "Step account" in details


def test_nothing_stored_to_show_is_a_usage_error() -> None:
    assert isinstance(_refused("digits", "--show"), UsageError)
    assert isinstance(_refused(), UsageError)


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
        "account",
        "changes",
        "several_devices",
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
    assert not Path("nfold-results/digits").exists()
    with Store.open_readonly(Path("nfold-results")) as store:
        before = {measurement.id for measurement in store.measurements()}
    assert set(row["evidence"]) <= before
    again = json.loads(_explain("digits", *SIMULATED, "--json", "--no-report").stdout)
    assert again["budget"] == said["budget"]
    with Store.open_readonly(Path("nfold-results")) as store:
        assert {measurement.id for measurement in store.measurements()} == before


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
        (["digits", "--device", "cpu"], "next: --devices cpu:2"),
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
    assert "next: the same command" in found.stderr


def test_stored_measurements_are_announced_once() -> None:
    first, second = (_explain("digits", *SIMULATED, "--no-report", "--plain") for _ in range(2))
    assert progress.STORED_RESULTS_NOTE not in first.stderr
    assert second.stderr.count(progress.STORED_RESULTS_NOTE) == 1


def test_progress_shows_what_is_known_so_far(planted: pytest.MonkeyPatch) -> None:
    planted.setattr(progress, "PRELIMINARY_TIME_FRACTION", 1e9)
    live: list[str] = []
    printed: list[str] = []
    screen: Any = SimpleNamespace(
        print_line=printed.append,
        print_progress=printed.append,
        show_live=lambda *a: live.extend(a),
    )
    events = progress.ExplainProgress(screen, "digits")
    script = Scenario(compute_ms_per_sample=0.1, exchange_ms=3.0)
    Experiment(target(script), TimeBudget(1000.0), events).run(experiment_design())
    assert "Gradient communication is not hidden by compute: 3.00 of 13.0 ms" in printed[-1]
    assert len(printed) == len(set(printed))
    assert any("2 devices, replayed input" in line or "resident" in line for line in live)


@pytest.mark.parametrize(
    ("wait_ms", "told"),
    [
        (40.0, []),
        (60.0, ["Both devices wait for the data loader: 60.0 of 100.0 ms per step (60 %)"]),
    ],
)
def test_a_probe_run_that_mostly_waits_for_input_is_a_first_conclusion(
    wait_ms: float, told: list[str]
) -> None:
    printed: list[str] = []
    screen: Any = SimpleNamespace(print_progress=printed.append, show_live=lambda *_: None)
    events = progress.ExplainProgress(screen, "train.py")
    profile = ScriptProfile(world_size=2, input_wait_ms=wait_ms)
    design = dataclasses.replace(experiment_design(), profile=profile, step_ms=100.0)
    events.planned(design, TrialResults())
    for left_s in (120.0, 110.0):
        events.started([design.actual()], 0, left_s)
    assert printed == [f"2:00 left · so far: {text}, seen in one run." for text in told]


def test_a_failed_trial_is_one_line() -> None:
    printed: list[str] = []
    screen: Any = SimpleNamespace(print_line=printed.append, show_live=lambda *_: None)
    events = progress.ExplainProgress(screen, "digits")
    trial = experiment_design().actual()
    events.started([trial], 0, 9.0)
    events.finished([trial], 0, [failed(trial, "no room")], 8.0)
    assert printed == ["2 devices: crashed: no room"]


def test_a_file_that_cannot_be_restored_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = "data.txt could not be restored"
    reports = [
        WriteReport(restore_errors=(error,)),
        WriteReport(files=(("log.txt", 5),)),
        WriteReport(),
    ]
    monkeypatch.setattr(explain_command, "clean_up_stale", lambda _: reports)
    options: Any = SimpleNamespace(results=tmp_path)
    first, *others = explain_command.undo_interrupted_runs(options)
    assert "would have written 1 file" in first
    assert others == [error]
