"""inception_v3 as a user runs it: placements as an axis, a bad file, no photographs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nfold.store.store import Store
from photos import SIZES, folders

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
WORKLOAD = "inception_v3:size=75,classes=2,aux=0"
SHORT = ("--batch", "4", "--steps", "2", "--warmup-steps", "1", "--json", "--no-report")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # most of two steps is compiling


def bench(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    place = ("--data", str(tmp_path / "data"), "--results", str(tmp_path / "results"))
    command = (sys.executable, "-m", "nfold", "bench", WORKLOAD, *SHORT, *place, *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow(parts=8)
def test_placements_train_on_the_same_samples_and_a_skipped_file_is_reported(
    tmp_path: Path,
) -> None:
    folders(tmp_path / "data")
    (tmp_path / "data/train/class0/bad.jpg").write_bytes(b"no")
    done = bench(tmp_path, "--devices", "cpu:1", "--augment", "cpu,device", "--skip-bad")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["measurements"]
    assert [each["plan"]["augment"] for each in found] == ["cpu", "device"]
    assert {each["status"] for each in found} == {"ok"}
    with Store.open(tmp_path / "results") as store:
        first, second = (measurement.ranks[0] for measurement in store.measurements())
    assert first.sample_hashes == second.sample_hashes
    # Not their losses: at this size batch norm of 4 samples makes 0.1 of 255 levels a half of it.
    for each in found:
        (warning,) = [w for w in each["warnings"] if w["kind"] == "bad_images"]
        assert "bad.jpg" in warning["text"]


@pytest.mark.slow
def test_jax_trains_on_the_same_samples_and_tells_of_a_skipped_file(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    folders(tmp_path / "data")
    (tmp_path / "data/train/class0/bad.jpg").write_bytes(b"no")
    both = ("--framework", "jax,torch", "--workers", "2", "--augment", "device", "--skip-bad")
    done = bench(tmp_path, "--devices", "cpu:1", *both)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["measurements"]
    assert [each["status"] for each in found] == ["ok"] * 2
    with Store.open(tmp_path / "results") as store:
        hashes = {measurement.ranks[0].sample_hashes for measurement in store.measurements()}
    assert len(hashes) == 1
    for each in found:
        assert "bad_images" in [warning["kind"] for warning in each["warnings"]]


def test_a_bad_file_is_one_error_before_anything_runs(tmp_path: Path) -> None:
    folders(tmp_path / "data", sizes=SIZES[:2])
    (tmp_path / "data/train/class1/1.jpg").write_bytes(b"no")
    done = bench(tmp_path)
    assert done.returncode == 4
    assert "class1/1.jpg" in done.stderr
    assert "--skip-bad" in done.stderr


def test_without_photographs_the_error_names_the_missing_files(tmp_path: Path) -> None:
    done = bench(tmp_path)
    assert done.returncode == 4
    assert "train/CLASS/*.jpg" in done.stderr
