"""``nfold tune`` on real processes of two CPU devices."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.source_edit import SetKeywords
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.launch.handoff import HandoffFolder
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.tune.runs.losses import LossReference, first_losses
from nfold.tune.source_patch import make_patch
from warm_runs import warm_options

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).parent / "scripts" / "slow_samples.py"
PLAIN_SCRIPT = SCRIPT.with_name("plain_loop.py")


def measure(
    folder: Path, script: Path, sources: tuple[tuple[str, str], ...] = ()
) -> tuple[Measurement, int]:
    """Run the script briefly; return the measurement, and the workers of its DataLoader."""
    host = inspect_machine()
    if host.cores < 2:
        pytest.skip("a CPU device needs a core of its own")
    plan = Plan(
        device="cpu", devices=2, cores_per_device=1, steps=20, warmup_steps=4, strategy="ddp"
    )
    found = run(
        Workload.from_script(str(script)),
        plan,
        Variant(random_seed=1),
        machine=host,
        options=warm_options(folder, edited_sources=sources),
    )
    assert found.status == "ok", found.cause
    assert found.folder is not None
    profile = HandoffFolder(folder / found.folder).reports.read_profiles()[0]
    assert profile.loader is not None
    return found, profile.loader.num_workers


def test_an_edited_copy_runs_in_place_of_the_script_and_trains_the_same(tmp_path: Path) -> None:
    script = Path(shutil.copy(SCRIPT, tmp_path))
    source = script.read_text()
    line = source[: source.index("DataLoader(data")].count("\n") + 1
    edit = SetKeywords(
        location=f"{script.name}:{line}", function="DataLoader", keywords=(("num_workers", "2"),)
    )
    (edited,) = make_patch([edit], tmp_path).files
    copy = tmp_path / "copy.py"
    copy.write_bytes(edited.edited)
    original, workers = measure(tmp_path / "results", script)
    changed, more_workers = measure(tmp_path / "results", script, ((str(script), str(copy)),))
    assert (workers, more_workers) == (0, 2)
    assert script.read_text() == source
    reference = LossReference((first_losses(original),))
    assert len(reference.runs[0]) == 20
    assert reference.objection(first_losses(changed), "same") is None


@pytest.mark.slow(parts=16)
@pytest.mark.timeout(600)
def test_what_tune_keeps_can_be_applied_and_taken_back(tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path / "train.py")
    original = (tmp_path / "train.py").read_bytes()
    nfold = [sys.executable, "-m", "nfold"]
    command = [*nfold, "tune", "train.py", "--devices", "cpu:2", "--budget", "4m", "--json"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    result = json.loads(found.stdout)
    assert found.returncode == (0 if result["verified"] or not result["kept"] else 3)
    assert (tmp_path / "train.py").read_bytes() == original
    assert {"workers"} <= {one["name"] for one in result["tried"]}
    if not result["verified"]:
        pytest.skip(f"the host is too busy for a verified gain: {result['gain']}")
    assert "workers" in {one["name"] for one in result["kept"]}
    patch = result["files"]["patch"]
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    assert b"num_workers=" in (tmp_path / "train.py").read_bytes()
    subprocess.run(["git", "apply", "-R", patch], cwd=tmp_path, check=True)
    assert (tmp_path / "train.py").read_bytes() == original


CONVERTED_LINES = [
    "+import nfold",
    '-    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")',
    "+    run = nfold.Run()",
    '+    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")',
    "+    loader = run.loader(loader)",
    "+    model, optimizer = run.prepare(model, optimizer)",
    '-        torch.save(model.state_dict(), Path("model.pt"))',
    "+        if run.is_main:",
    '+            torch.save(model.state_dict(), Path("model.pt"))',
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plain_script_is_converted_to_two_devices_and_back(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    shutil.copy(PLAIN_SCRIPT, script)
    original = script.read_bytes()
    tune = [sys.executable, "-m", "nfold", "tune", "train.py"]
    command = [*tune, "--devices", "cpu:2", "--budget", "5m", "--apply", "--json"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    result = json.loads(found.stdout)
    first = result["tried"][0]
    assert first["name"] == "conversion"
    assert first["outcome"] in ("kept", "no gain", "not tried"), first["reason"]
    assert first["tried_for"].endswith("4 of its 8 samples on each device")
    if not result["verified"] or first["outcome"] != "kept":
        pytest.skip(f"the host is too busy for a verified gain: {result['tried']}")
    assert [one["name"] for one in result["kept"]] == ["conversion"]
    assert result["losses"].startswith("first 20 losses differ by ")
    assert "means" not in result["losses"]
    assert result["gain"]["low"] > 1
    assert "toml" not in result["files"]
    assert result["files"]["run"] == "nfold run --devices 2 train.py"
    changed = [
        line
        for line in (tmp_path / result["files"]["patch"]).read_text().splitlines()
        if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")
    ]
    assert changed == CONVERTED_LINES
    assert script.read_bytes() != original
    subprocess.run([*tune, "--revert"], cwd=tmp_path, check=True)
    assert script.read_bytes() == original
    subprocess.run(["git", "apply", "--check", result["files"]["patch"]], cwd=tmp_path, check=True)
