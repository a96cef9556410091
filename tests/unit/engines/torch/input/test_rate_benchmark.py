"""Rates of a loader's workers, measured in forks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from made import machine
from nfold import workloads
from nfold.core.errors import MachineUnfit
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.data import photographs
from nfold.engines.base import Task
from nfold.engines.torch.batch import Batch
from nfold.engines.torch.input import rate_benchmark
from nfold.engines.torch.input.dataloader import BatchKey, build_batch
from photos import folders
from repeated import repeated

PAUSE_S = 0.01


class Slow(Dataset[Batch]):
    """Takes a while for every batch, and no core."""

    def __getitem__(self, key: BatchKey) -> Batch:
        time.sleep(PAUSE_S)
        return build_batch(key, (torch.zeros(1),))


class Broken(Dataset[Batch]):
    """Fails."""

    def __getitem__(self, key: BatchKey) -> Batch:
        raise OSError("gone")


@repeated
def test_a_worker_is_as_fast_as_its_calls_whatever_the_others_do() -> None:
    found = rate_benchmark.measure_worker(Slow(), 100, 3)
    fastest = rate_benchmark.WORKER_BATCH / PAUSE_S
    assert found.low <= found.value <= found.high <= fastest
    assert found.high > fastest / 5


def test_a_worker_that_fails_is_an_error() -> None:
    with pytest.raises(MachineUnfit, match="worker process failed"):
        rate_benchmark.measure_worker(Broken(), 100, 2)


def test_the_rates_of_a_plan_are_of_workers_and_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NFOLD_DATA", str(folders(tmp_path / "data")))
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))
    photographs.load()
    seen: list[Task] = []

    def rate_of(task: Task, share: int) -> float:
        seen.append(task)
        return float(share)

    monkeypatch.setattr(rate_benchmark, "measure_device", rate_of)
    host = machine()
    workload = Workload.parse("inception_v3:size=75,classes=2")
    plan = Plan(device="cpu", devices=2, batch=6).resolve(
        host, workloads.info(workload.name).defaults
    )
    task = Task(workload=workload, plan=plan, machine=host)
    found = rate_benchmark.measure_rates(task)
    assert (found.decoder, found.device, seen) == (None, 3.0, [task])
    assert 0 < found.worker.low <= found.worker.value <= found.worker.high
