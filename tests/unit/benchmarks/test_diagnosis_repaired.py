"""Faulty scripts against repaired ones: what was predicted, what was achieved."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import repaired

import gpu


def _explained(
    one: float, several: float, rows: list[Any], single: list[Any], **more: Any
) -> dict[str, Any]:
    return {
        "one_device": {"samples_per_s": {"value": one}},
        "n_devices": {"samples_per_s": {"value": several}, "step_ms": {"value": 20.0}},
        "budget": rows,
        "single_device_budget": single,
        "named": [row["cause"] for row in (*rows, *single)],
        "interactions": [],
        "others_ms": {"value": 0.0},
        "unexplained_ms": {"value": 1.0},
        "speedup": {"value": several / one},
        "plan": {"workers": 0},
        "wrong": more.get("wrong", []),
        "warnings": [],
    }


def _row(cause: str, gained: float) -> dict[str, Any]:
    return {
        "cause": cause,
        "lost_ms": {"value": 8.0, "low": 7.0, "high": 9.0},
        "predicted_speedup": {"value": gained},
        "predicted_samples_per_s": {"value": 170.0},
        "named": True,
        "fix": f"mend {cause}",
    }


def test_speedups_are_over_one_device_of_the_faulty_script() -> None:
    faulty = _explained(100, 120, [_row("threads", 1.9)], [])
    found = repaired.verdict("ddp", "2", faulty, _explained(150, 190, [], []))
    assert (found.before, found.predicted, found.achieved) == (1.2, 1.7, 1.9)
    assert (found.said, found.right, found.unexplained) == ("mend threads", True, 0.05)


def test_a_fault_of_one_device_is_judged_on_one() -> None:
    faulty = _explained(100, 120, [], [_row("input", 1.5)])
    found = repaired.verdict("single", "2", faulty, _explained(140, 190, [], []))
    assert (found.before, found.predicted, found.achieved) == (1.0, 1.5, 1.4)


def test_wrong_training_is_said_first_and_a_missing_row_is_told() -> None:
    faulty = _explained(100, 120, [_row("link", 1.9)], [], wrong=["the same samples"])
    found = repaired.verdict("with_lightning", "2", faulty, _explained(100, 190, [], []))
    assert (found.said, found.right) == ("the same samples no such row", False)


def test_verdicts_are_read_back(tmp_path: Path) -> None:
    told = repaired.Verdict(script="ddp", devices="2", tool="traceml", named=(), said="BALANCED:")
    (tmp_path / "v.jsonl").write_text(json.dumps(dataclasses.asdict(told)) + "\n")
    assert repaired.main(["--read", str(tmp_path / "v.jsonl")]) == [told]
    assert "| traceml | nothing |" in repaired.table([told])[-1]


def test_a_machine_of_gpus_gets_the_most_important_first(tmp_path: Path) -> None:
    asked = argparse.Namespace(gpus=4, python="python", budget="60s", doses="1,2", healthy=3)
    asked.script, asked.only = ["ddp"], list(gpu.KINDS)
    asked.report, asked.traceml_python, asked.out = ["conv2d", "mnist", "starved"], None, tmp_path
    jobs = gpu.jobs(asked)
    assert [job.name for job in jobs if job.whole] == ["repaired cifar_ddp"]
    assert [job.name for job in jobs][:3] == [
        "repaired cifar_ddp",
        "report conv2d",
        "report mnist",
    ]
    (starved,) = [job for job in jobs if job.name == "report starved"]
    assert starved.command[:4] == ("-m", "nfold", "explain", "inception_v3:repeat=64")
    assert not starved.whole
    assert {"ddp copies", "ddp healthy", "ddp imbalance+link"} < {job.name for job in jobs}


def test_a_job_that_runs_out_of_time_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "LEAST_S", 0.0)
    (tmp_path / "long.py").write_text("import time\ntime.sleep(600)\n")
    job = gpu.Job("long", (str(tmp_path / "long.py"),))
    gpu.run_job(job, [0], [0], time.monotonic() + 1, tmp_path)
    assert "long: out of time" in capsys.readouterr().out
    (tmp_path / "long.log").unlink()
    gpu.run_job(job, [0], [0], time.monotonic() - 1, tmp_path)
    assert "long: no time left" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.log"))
