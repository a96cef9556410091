"""Keras's back ends through the command: one device works like many, the samples are torch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nfold.core.measurement import Measurement
from nfold.store.store import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def _bench(results: Path, *arguments: str) -> list[Measurement]:
    command = [sys.executable, "-m", "nfold", "bench", "digits:samples=101", *arguments]
    more = ["--epochs", "1", "--no-report", "--plain", "--results", str(results)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with Store.open(results) as store:
        return sorted(store.measurements(), key=lambda m: (m.plan.framework, m.plan.devices or 0))


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[int, str], ...]:
    """The samples that PyTorch trains on, 25 a step and one in the last."""
    results = tmp_path_factory.mktemp("torch")
    (one,) = _bench(results, "--framework", "torch", "--devices", "cpu:1", "--batch", "25")
    return one.ranks[0].sample_hashes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "how"),
    [
        ("tensorflow", ["--input", "loader", "--batch", "25"]),
        ("jax", ["--input", "resident", "--batch", "24", "--steps-per-execution", "2"]),
    ],
)
def test_two_devices_train_as_one(
    framework: str, how: list[str], hashed: tuple[tuple[int, str], ...], tmp_path: Path
) -> None:
    """Batches that do not divide, a last one that leaves a device without a sample."""
    pytest.importorskip(framework)
    one, two = _bench(tmp_path, "--framework", framework, "--devices", "cpu:1,cpu:2", *how)
    assert [m.status for m in (one, two)] == ["ok", "ok"]
    assert [m.plan.strategy == "single" for m in (one, two)] == [True, False]
    assert len(one.ranks) == len(two.ranks) == 1
    for measurement in (one, two):
        (rank,) = measurement.ranks
        assert rank.sample_hashes == hashed
        assert sum(window.steps for window in rank.windows) == len(rank.step_ms)
        assert (rank.parameter_count, rank.epochs[0].samples) == (49_738, 101)
        assert (rank.peak_memory_bytes or 0) > 2**27
    first, second = one.ranks[0], two.ranks[0]
    assert second.device == "cpu:0, cpu:1"
    assert [step for step, _ in first.losses] == [step for step, _ in second.losses]
    pairs = zip(first.losses, second.losses, strict=True)
    assert all(a == pytest.approx(b, rel=1e-4) for (_, a), (_, b) in pairs)
    assert first.epochs[0].accuracy == second.epochs[0].accuracy


def test_what_cannot_run_is_a_row_with_a_reason(tmp_path: Path) -> None:
    found = _bench(tmp_path, "--framework", "tensorflow", "--layout", "channels_first")
    assert [m.status for m in found] == ["unsupported"]
    assert found[0].cause is not None
    assert "NHWC" in found[0].cause.text
