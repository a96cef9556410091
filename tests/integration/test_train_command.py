"""The train command as a user runs it: killed in mid-epoch, resumed, to the same result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nfold.analysis.cells import epochs
from nfold.core.measurement import Measurement, cell_id
from nfold.engines.checkpoint_folder import newest_checkpoint, read_metadata
from nfold.launch.handoff import HandoffFolder
from nfold.store.store import Store
from nfold.telemetry.machine_inspection import inspect_machine

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
RESULTS_0_1 = Path(__file__).parents[1] / "fixtures" / "results-0.1"
SAMPLES, BATCH, EPOCHS = 400, 8, 6
STEPS = SAMPLES // BATCH
LIMIT_S = 60.0


class Train:
    """``nfold train`` on the digits, its results and checkpoints in folders of one test."""

    def __init__(self, folder: Path, devices: int, accumulate: int = 1) -> None:
        self.folder, self._devices, self._accumulate = folder, devices, accumulate
        self._running: list[subprocess.Popen[str]] = []

    def command(self, results: str, *arguments: str) -> list[str]:
        nfold = [sys.executable, "-m", "nfold", "train", f"digits:samples={SAMPLES}"]
        plan = ["--devices", f"cpu:{self._devices}", "--batch", str(BATCH)]
        plan += ["--accumulate", str(self._accumulate)]
        length = ["--epochs", str(EPOCHS), "--results", results]
        return [*nfold, *plan, *length, *arguments]

    def run(self, results: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = self.command(results, *arguments)
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)

    def start(self, results: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(results, *arguments),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._running.append(process)
        return process

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()

    def stored(self, results: str) -> Measurement:
        with Store.open_readonly(self.folder / results) as store:
            (found,) = store.measurements()
        return found


@pytest.fixture(params=[(1, 1), (2, 1), (2, 2)], ids=["one", "two", "two in parts"])
def train(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Train]:
    started = Train(tmp_path, *request.param)
    yield started
    started.end()


@pytest.fixture
def one_device(tmp_path: Path) -> Iterator[Train]:
    started = Train(tmp_path, 1)
    yield started
    started.end()


def _wait_for_mid_epoch(process: subprocess.Popen[str], results: Path) -> int:
    """Wait until a checkpoint is there and a further epoch has begun; the epochs kept by then."""
    while True:
        assert process.poll() is None, process.communicate()[1]
        kept = [path for path in results.glob("checkpoints/*/run-*") if newest_checkpoint(path)]
        beats = [
            HandoffFolder(path).reports.read_heartbeat(0) for path in results.glob("measurements/*")
        ]
        step = max((beat.step for beat in beats if beat), default=0)
        if kept and STEPS < step < (EPOCHS - 1) * STEPS and step % STEPS > 2:
            found = newest_checkpoint(kept[-1])
            if found is not None and step > int(found.name.removeprefix("step-")):
                return len(read_metadata(found).epochs)
        time.sleep(0.002)


def _results(measurement: Measurement) -> list[Any]:
    """What does not depend on time: losses, accuracies, samples, final parameters."""
    learned = [(epoch.train_loss, epoch.accuracy) for epoch in epochs(measurement)]
    ranks = [(rank.parameter_checksum, rank.sample_hashes) for rank in measurement.ranks]
    return [learned, ranks]


@pytest.mark.slow
def test_after_sigkill_in_mid_epoch_a_rerun_resumes_to_the_same_result(train: Train) -> None:
    whole = train.run("whole")
    assert whole.returncode == 0, whole.stderr
    process = train.start("cut")
    kept = _wait_for_mid_epoch(process, train.folder / "cut")
    tree = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(tree, timeout=LIMIT_S)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    done = train.run("cut")
    assert done.returncode == 0, done.stderr
    first, *lines = done.stderr.splitlines()
    resumed = int(first.removeprefix("resuming after epoch "))
    assert resumed >= kept >= 1
    numbers = [line.split("/")[0] for line in lines if line.startswith("epoch ")]
    assert numbers == [f"epoch {n}" for n in range(resumed + 1, EPOCHS + 1)]
    assert _results(train.stored("cut")) == _results(train.stored("whole"))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_with_a_warning(one_device: Train) -> None:
    shorter = ("--epochs", "2")
    assert one_device.run("results", *shorter).returncode == 0
    whole = one_device.stored("results")
    (attempt,) = one_device.folder.glob("results/checkpoints/*/run-1")
    newest = newest_checkpoint(attempt)
    assert newest is not None
    weights = bytearray((newest / "model-0.safetensors").read_bytes())
    weights[-1] ^= 1
    (newest / "model-0.safetensors").write_bytes(weights)
    again = one_device.run("results", *shorter)
    assert f"step-{2 * STEPS} cannot be read; resuming from step-{STEPS}" in again.stderr
    assert "resuming after epoch 1" in again.stderr
    assert _results(one_device.stored("results")) == _results(whole)


@pytest.mark.slow
def test_what_was_trained_is_shown_and_not_trained_again(one_device: Train) -> None:
    first = one_device.run("results")
    lines = [line for line in first.stderr.splitlines() if line.startswith("epoch ")]
    assert [line.split(":")[0] for line in lines] == [
        f"epoch {n}/{EPOCHS}" for n in range(1, EPOCHS + 1)
    ]
    second = one_device.run("results")
    assert second.returncode == 0
    assert second.stdout == first.stdout
    assert "epoch " not in second.stderr
    accuracy, where = second.stdout.splitlines()
    assert accuracy.startswith("accuracy 0.")
    assert (one_device.folder / where.removeprefix("checkpoint: ")).is_dir()
    document = json.loads(one_device.run("results", "--again", "--json").stdout)
    assert document["status"] == "ok"
    assert len(document["epochs"]) == EPOCHS
    assert document["plan"]["batch"] == BATCH
    assert Path(document["checkpoint"]).parts[-2:] == ("run-2", f"step-{EPOCHS * STEPS}")
    attempts = [path.name for path in one_device.folder.glob("results/checkpoints/*/run-*")]
    assert attempts == ["run-2"]


@pytest.mark.slow(parts=8)
def test_an_interruption_keeps_the_checkpoint_and_reports_the_next_step(one_device: Train) -> None:
    process = one_device.start(
        "results", "--checkpoint-every", "2", "--checkpoint", "kept", "--epochs", "50"
    )
    while not (found := list(one_device.folder.glob("kept/run-1/step-*"))):
        assert process.poll() is None
        time.sleep(0.002)
    assert found[0].name == f"step-{2 * STEPS}"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "the same command resumes" in errors
    assert one_device.stored("results").status == "interrupted"
    other = one_device.run("results", "--checkpoint", "kept", "--seed", "1")
    assert other.returncode == 2
    assert "seed 0, not 1" in other.stderr


@pytest.mark.slow(parts=8)
def test_a_failed_run_reports_why_and_where_its_log_is(one_device: Train) -> None:
    process = one_device.start("results")
    _wait_for_mid_epoch(process, one_device.folder / "results")
    beats = [
        HandoffFolder(path).reports.read_heartbeat(0)
        for path in one_device.folder.glob("results/measurements/*")
    ]
    (pid,) = [beat.pid for beat in beats if beat]
    os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "SIGKILL" in errors
    assert "rank-0.log" in errors
    assert "the same command resumes" in errors


@pytest.mark.slow
def test_a_checkpoint_of_version_0_1_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its identity holds the machine and the epochs, so the copy is given those of this run."""
    monkeypatch.chdir(tmp_path)
    results = shutil.copytree(RESULTS_0_1, tmp_path / "nfold-results")
    arguments = ["digits", "--devices", "cpu:2", "--epochs", "3"]
    with Store.open(results) as store:
        (stored,) = (m for m in store.measurements() if m.plan.epochs == 2)
    machine = inspect_machine()
    plan = stored.plan.edit(epochs=3, cores_per_device=machine.cores // 2)
    cell = cell_id(stored.workload, plan, None, machine)
    (folder,) = (results / "checkpoints").iterdir()
    folder = folder.rename(folder.with_name(cell))
    metadata = folder / "run-1" / "step-24" / "trained.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "cell": cell}))
    command = [sys.executable, "-m", "nfold", "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "resuming after epoch 2" in done.stderr
    newest = newest_checkpoint(folder / "run-1")
    assert newest is not None
    assert newest.name == "step-36"
    losses = [epoch.train_loss for epoch in read_metadata(newest).epochs]
    assert losses[:2] == [2.176296823706657, 0.9548316641698384]
    assert losses[2] is not None
    assert losses[2] < 0.9
