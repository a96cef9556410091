"""Timed explanations: scripts by name, process trees, the table; ratios of four_gpus.py."""

from __future__ import annotations

import dataclasses
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_times
import pytest
import timed_scripts

from nfold.core.machine import Machine
from nfold.core.measurement import Measurement, RankSamples, Window
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.store.store import Store

FOUR_GPUS = Path(__file__).resolve().parents[3] / "benchmarks" / "four_gpus.py"


def test_arguments_follow_a_separator_and_know_the_devices() -> None:
    case = timed_scripts.Case(
        script=Path("train.py"), arguments=("--accumulate={devices}",), cpu=("--batch=2",)
    )
    assert case.command("4") == ["train.py", "--devices", "4", "--", "--accumulate=4"]
    assert case.command("cpu:2")[-2:] == ["--accumulate=2", "--batch=2"]
    assert timed_scripts.Case(script=Path("train.py")).command("4") == [
        "train.py",
        "--devices",
        "4",
    ]


def test_a_script_that_cannot_run_has_a_reason(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    case = timed_scripts.Case(script=script, cpu=None)
    assert "does not exist" in case.missing("2")
    script.touch()
    assert case.missing("2") == ""
    assert case.missing("cpu:2") == "it needs GPUs"
    assert "no_such_module" in dataclasses.replace(case, modules=("no_such_module",)).missing("2")


def test_a_name_injects_a_cost(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    dosed = timed_scripts.dosed_case("ddp+host-work=5#2", "cpu:2", _settled(clock))
    assert dosed is not None
    assert dosed.causes == ("epoch-boundary",)
    assert json.loads(dosed.environment["FAULTS"]) == {"host-work": 5.0}
    assert dosed.command("cpu:2")[1:4] == ["--devices", "cpu:2", "--"]
    healthy = timed_scripts.dosed_case("ddp#1", "cpu:2", clock)
    assert healthy is not None
    assert healthy.causes == ()
    assert json.loads(healthy.environment["FAULTS"]) == {}
    assert timed_scripts.dosed_case("resnet", "cpu:2", clock) is None
    with pytest.raises(SystemExit, match="allowed causes"):
        timed_scripts.dosed_case("ddp+copies=5", "cpu:2", clock)


def _settled(clock: Path) -> Path:
    """A file of readings with the dose, so that nothing is calibrated."""
    readings = {"healthy_ms": 1.0, "settled": {}, "ms": [[["host-work", 5.0], 5.0]]}
    clock.write_text(json.dumps(readings))
    return clock


def test_random_images_have_the_header_of_their_format() -> None:
    content = timed_scripts.idx(3, 28, 28, below=256)
    assert struct.unpack(">4B3I", content[:16]) == (0, 0, 8, 3, 3, 28, 28)
    assert len(content) == 16 + 3 * 28 * 28


def test_overhead_of_a_process_tree_excludes_the_windows_of_all_its_variants(
    tmp_path: Path,
) -> None:
    with Store.open(tmp_path) as store:
        for number, (folder, seconds) in enumerate((("a", 1.0), ("a", 2.0), ("b", 4.0))):
            store.append(_measurement(number, folder, seconds))
    assert sorted(gpu_times.overheads_s(tmp_path)) == [6.0, 7.0]
    assert gpu_times.overheads_s(tmp_path / "nothing") == []


def _measurement(number: int, folder: str, seconds: float) -> Measurement:
    window = Window(start_s=0.0, seconds=seconds, steps=1, samples=1)
    return Measurement(
        id=f"m{number}",
        workload=Workload(name="digits"),
        plan=Plan(steps=1 + number),
        machine=Machine(cpu="cpu", cores=2, memory_bytes=1),
        status="ok",
        repeat=number,
        ranks=(RankSamples(rank=0, device="cpu", windows=(window,)),),
        wall_seconds=10.0,
        folder=folder,
    )


def test_rows_are_read_again_and_show_a_wrong_verdict(tmp_path: Path) -> None:
    row = gpu_times.TimedExplanation(
        script="mnist",
        devices="2",
        device="GPU",
        budget="180s",
        status=0,
        first_verdict_s=41.4,
        complete_s=170.0,
        headline="Most is lost to the link.",
        causes=("link",),
        expected=("input",),
        step_ms=8.0,
        largest=("communication", 4.0, 3.5, 4.25),
        trees=6,
        overhead_s=9.0,
    )
    file = tmp_path / "times.jsonl"
    file.write_text(json.dumps(dataclasses.asdict(row)) + "\n")
    (again,) = gpu_times.read(file)
    assert again.causes == ("link",)
    assert again.cells == (
        *("mnist", "2", "180s", "41", "170", "Most is lost to the link."),
        *("communication 4.00 of 8.00, 0.75", "6 × 9.0", "WRONG: expected input"),
    )
    open_row = dataclasses.replace(again, headline="No cost found yet, ...")
    assert open_row.cells[-1] == "open"


def test_four_gpus_prints_ratios_of_stored_windows(tmp_path: Path) -> None:
    arms = {"tiny run @step": 90, "tiny replicas @step": 100, "tiny ddp": 45}
    runs = [
        {"devices": 2, "windows": [_window(*arm, turn) for arm in arms.items() for turn in (0, 1)]}
    ]
    (tmp_path / "tiny.json").write_text(json.dumps({"runs": runs}))
    done = subprocess.run(
        [sys.executable, str(FOUR_GPUS), "--read", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("tiny on 2"))
    assert "/ tiny replicas @step 0.900" in line
    assert "/ tiny ddp 2.000" in line


def _window(arm: str, samples: int, turn: int) -> dict[str, Any]:
    values = {"round": turn, "arm": arm, "steps": 1, "samples": samples, "seconds": [0.5, 1.0]}
    return {**values, "loss": 1.0, "peak_memory_bytes": 0}
