"""``nfold tune`` repairs scripts with one fault each on two CPU devices, and takes it back.

Runs are shorter than usual, and only the remedy of the fault is tried. The budget is for a busy host.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nfold.cli.app import app
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.tune import remedies, search
from nfold.tune.remedies import Remedy, choose_remedies
from nfold.tune.runs import verification
from nfold.tune.settings_file import TunedSettings

pytestmark = [pytest.mark.integration, pytest.mark.slow(parts=64), pytest.mark.timeout(1200)]
SCRIPTS = Path(__file__).parent / "scripts"
BUDGET = "15m"
SHORTER = {"RUN_S": 1.5, "EXPLAIN_FRACTION": 0.15, "AGAIN_FRACTION": 0.02}
USELESS = ("ddp_static_graph", "garbage_collection_frozen")  # for the healthy script

# The fault, the remedy, and what the patch adds to the file.
FAULTS = [
    ("tuned/anomalies.py", "anomaly_detection", "set_detect_anomaly(False)"),
    ("slow_samples.py", "workers", "num_workers="),
    ("tuned/short_epochs.py", "loader_persistent_workers", "persistent_workers=True"),
    ("tuned/collected.py", "garbage_collection_frozen", "gc.freeze()"),
    ("tuned/many_threads.py", "threads", "set_num_threads(1)"),
    ("tuned/large_buffers.py", "broadcast_buffers", "broadcast_buffers=False"),
    ("tuned/exchanged_often.py", "exchange_each_micro_batch", ".require_backward_grad_sync = "),
]


class TunedScript:
    """A copy of a script in a folder of its own that is no git checkout."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = Path(shutil.copy(SCRIPTS / name, folder / "train.py"))
        self.original = self.file.read_bytes()

    def tune(self, *options: str) -> tuple[int, dict[str, Any]]:
        command = ["tune", "train.py", "--devices", "cpu:2", "--budget", BUDGET, "--json"]
        done = CliRunner().invoke(app, [*command, *options])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, json.loads(done.stdout)

    def revert(self) -> None:
        assert CliRunner().invoke(app, ["tune", "train.py", "--revert"]).exit_code == 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if inspect_machine().cores < 2:
        pytest.skip("a CPU device needs a core of its own")
    for name, value in SHORTER.items():
        monkeypatch.setattr(search, name, value)
    monkeypatch.setattr(verification, "MAX_PAIRS", 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def try_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def choose(*arguments: Any) -> list[Remedy]:
        return [one for one in choose_remedies(*arguments) if one.name in names]

    monkeypatch.setattr(search, "choose_remedies", choose)


@pytest.mark.parametrize(("name", "remedy", "edit"), FAULTS)
def test_a_fault_is_repaired_verified_and_reverted(
    name: str, remedy: str, edit: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_only(monkeypatch, remedy)
    script = TunedScript(folder, name)
    code, result = script.tune("--apply")
    outcomes = {one["name"]: one["outcome"] for one in result["tried"]}
    assert remedy in outcomes
    if "not tried" in outcomes.values() or not result["verified"]:
        pytest.skip(f"the host is too busy: {outcomes}, {result['gain']}")
    assert code == 0
    assert [one["name"] for one in result["kept"]] == [remedy]
    assert result["gain"]["value"] > 1.3
    assert "applied to" in result["files"], result["files"]
    assert edit in script.file.read_text()
    assert edit not in script.original.decode()
    assert Path(result["files"]["report"]).exists()
    script.revert()
    assert script.file.read_bytes() == script.original


def test_what_is_allowed_is_kept_and_applied_by_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    permitted = ("activation_checkpointing", "batch")
    try_only(monkeypatch, *permitted)
    monkeypatch.setattr(remedies, "MAX_BATCH_FACTOR", 2)
    script = TunedScript(folder, "tuned/recomputed.py")
    assert script.tune()[1]["tried"] == []
    _, result = script.tune("--allow", "memory,batch")
    if not result["verified"]:
        pytest.skip(f"the host is too busy: {result['tried']}, {result['gain']}")
    assert {one["name"]: one["value"] for one in result["kept"]} == dict(
        zip(permitted, (False, 32), strict=True)
    )
    assert result["gain"]["value"] > 2
    assert "learning rate × 2" in result["files"]["by hand"]
    assert (
        "+    loader = DataLoader(data, batch_size=16,"
        in Path(result["files"]["patch"]).read_text()
    )
    settings = TunedSettings.read(Path(result["files"]["toml"])).run_remedies()
    assert settings.batch == 16
    assert not settings.variant.activation_checkpointing


def test_a_healthy_script_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_only(monkeypatch, *USELESS)
    script = TunedScript(folder, "tuned/healthy.py")
    code, result = script.tune("--apply")
    assert result["tried"]
    assert result["kept"] == []
    assert code == 0
    assert script.file.read_bytes() == script.original
