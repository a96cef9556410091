"""nfold explain on two CPU devices: a sensible answer, whatever the time allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nfold.core.interleave import process_wide
from nfold.core.variant import Variant
from nfold.store.store import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
# On a busy machine the budget is spent before all trials have run; the next explanation goes on.
ATTEMPTS = 4


def _explained(folder: Path, *command: str) -> dict[str, Any]:
    """What ``nfold explain`` says of two CPU devices."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two CPU devices need two cores")
    done = subprocess.run(
        [sys.executable, "-m", "nfold", "explain", *command, "--devices", "cpu:2", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "nfold"])
def test_two_cpu_devices_are_explained(tmp_path: Path, strategy: str) -> None:
    told = ["--batch", "32", "--budget", "60s", "--strategy", strategy]
    trees: dict[str, list[Variant]] = {}
    for _ in range(ATTEMPTS):
        found = _explained(tmp_path, "digits:samples=128", *told)
        trees = _variants_by_run(tmp_path)
        if {"real", "none", "barrier"} in map(_exchanges, trees.values()):
            break
    for variants in trees.values():
        assert len({process_wide(one, ("input", "exchange")) for one in variants}) == 1
    assert {"real", "none", "barrier"} in map(_exchanges, trees.values())
    assert found["one_device"]["samples_per_s"]["value"] > 0
    speedup = found["speedup"]
    assert speedup["low"] <= speedup["value"] <= speedup["high"]
    assert found["wrong"] == []
    untested = {w["kind"] for w in found["warnings"] if w["kind"].startswith("untested_")}
    tested = {row["cause"] for row in found["budget"]}
    assert "undivided-work" in tested
    assert {"untested_network", "untested_storage", "untested_memory"} <= untested
    assert (tmp_path / "nfold-results" / "digits-samples=128" / "explain.md").exists()


def _variants_by_run(folder: Path) -> dict[str, list[Variant]]:
    found: dict[str, list[Variant]] = {}
    with Store.open(folder / "nfold-results") as store:
        for one in store.measurements():
            assert one.folder is not None
            found.setdefault(one.folder, []).append(one.variant or Variant())
    return found


def _exchanges(variants: list[Variant]) -> set[str]:
    return {variant.exchange for variant in variants}


@pytest.mark.slow
def test_an_operation_is_explained_by_its_calls(tmp_path: Path) -> None:
    known: set[str] = set()
    for _ in range(ATTEMPTS):
        found = _explained(tmp_path, "conv2d:copy_only=1", "--batch", "64", "--budget", "60s")
        known = {row["cause"] for row in found["budget"]}
        if len(known) == 2:
            break
    assert known == {"launch-bound", "threads"}
    assert found["n_devices"]["samples_per_s"]["value"] > 0
    reasons = {w["kind"]: w["text"] for w in found["warnings"]}
    assert reasons["untested_link"] == "the devices of an operation do not communicate"
    assert "ended_early" not in reasons
    with Store.open(tmp_path / "nfold-results") as store:
        assert {one.status for one in store.measurements()} == {"ok"}
