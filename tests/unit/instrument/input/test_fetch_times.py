"""How long a data set computes and how long it waits, in this process and in workers."""

from __future__ import annotations

import gc
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as calls
from torch.utils.data import DataLoader, Dataset

from instrumented import CLASSES, FEATURES, instrumented, loop, model, script_task
from nfold.core.measurement import FetchStats
from nfold.core.variant import Variant
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.input import fetch_times
from nfold.instrument.input.fetch_times import (
    NO_FETCHES,
    FetchTimer,
    ThreadUsage,
    fetch_difference,
    thread_usage,
)
from repeated import repeated

pytestmark = pytest.mark.skipif(
    thread_usage() is None, reason="the kernel tells nothing of its queues"
)
BATCH = 4


class Slow(Dataset[Any]):
    """Every sample waits and computes for so long."""

    def __init__(self, waits_s: float = 0.0, computes_s: float = 0.0, file: Path | None = None):
        self._waits_s, self._computes_s, self._file = waits_s, computes_s, file

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._waits_s)
        end = time.thread_time() + self._computes_s
        while time.thread_time() < end:
            pass
        if self._file is not None:
            self._file.read_bytes()
        return torch.zeros(FEATURES), index % CLASSES


def _fetches(data: Slow, **how: Any) -> tuple[FetchStats, FetchStats]:
    """Of all windows, and what was seen after the warm-up."""

    def training() -> None:
        module, loader = model(), DataLoader(data, batch_size=BATCH, **how)
        loop(loader, module, torch.optim.SGD(module.parameters(), lr=0.1))

    found = instrumented(training, script_task())
    gc.collect()
    assert found.samples is not None
    windows = [window.fetches for window in found.samples.windows]
    each = [one for one in windows if one is not None]
    assert len(each) == len(windows)
    assert found.profile.fetches is not None
    total = FetchStats(
        batches=sum(one.batches for one in each),
        seconds=sum(one.seconds for one in each),
        waited_s=sum(one.waited_s for one in each),
        read_bytes=sum(one.read_bytes for one in each),
    )
    return total, found.profile.fetches


@pytest.mark.parametrize("workers", [0, 2])
@repeated
def test_sleeping_dataset_waits(workers: int) -> None:
    found, seen = _fetches(Slow(waits_s=0.002), num_workers=workers)
    for one in (found, seen):
        assert one.batches > 0
        assert 0.5 * one.batches * BATCH * 0.002 <= one.waited_s <= one.seconds


@pytest.mark.parametrize("workers", [0, 2])
@repeated
def test_computing_dataset_does_not_wait(workers: int) -> None:
    found, _ = _fetches(Slow(computes_s=0.002), num_workers=workers)
    assert found.seconds >= found.batches * BATCH * 0.002
    assert found.waited_s < 0.2 * found.seconds


def test_read_bytes_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "sample"
    file.write_bytes(bytes(50_000))
    found, _ = _fetches(Slow(file=file))
    assert 1 <= found.read_bytes / (found.batches * BATCH * 50_000) < 1.2


def test_only_a_thread_that_slept_has_waited() -> None:
    begun = ThreadUsage(wall_s=1.0, core_s=1.0, delayed_s=0.0, sleeps=3, read_bytes=0, disk_bytes=0)

    def later(sleeps: int, delayed_s: float = 0.0) -> ThreadUsage:
        return ThreadUsage(
            wall_s=2.0, core_s=1.25, delayed_s=delayed_s, sleeps=sleeps, read_bytes=7, disk_bytes=5
        )

    assert later(3).since(begun) == (1.0, 0.0, 7, 5)
    assert later(4).since(begun) == (1.0, 0.75, 7, 5)
    assert later(4, delayed_s=0.5).since(begun) == (1.0, 0.25, 7, 5)


def test_windows_share_no_fetch() -> None:
    totals = [(2.0, 1.0, 0.5, 70.0, 7.0), (3.0, 2.0, 0.5, 140.0, 7.0)]
    first, second = (
        fetch_difference(before, now) for before, now in pairwise([NO_FETCHES, *totals])
    )
    assert first == FetchStats(batches=2, seconds=1.0, waited_s=0.5, read_bytes=70, disk_bytes=7)
    assert second == FetchStats(batches=1, seconds=1.0, waited_s=0.0, read_bytes=70, disk_bytes=0)
    assert fetch_difference(NO_FETCHES, NO_FETCHES) is None


def test_input_without_a_dataset_has_no_fetches() -> None:
    def training() -> None:
        module = model()
        batches = [(torch.zeros(4, FEATURES), torch.zeros(4, dtype=torch.long))] * 8
        loop(batches, module, torch.optim.SGD(module.parameters(), lr=0.1))

    found = instrumented(training, script_task())
    assert found.samples is not None
    assert found.profile.fetches is None
    assert {window.fetches for window in found.samples.windows} == {None}


def test_fetches_of_a_recreated_dataset_are_counted() -> None:
    """16 batches a pass; an evaluation over another one, of the same kind, is not."""

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(6):
            loader = DataLoader(Slow(), batch_size=BATCH)
            loop(loader, module, optimizer, epochs=1)
            del loader
            with torch.no_grad():
                assert len(list(DataLoader(Slow(), batch_size=BATCH))) == 16

    found = instrumented(training, script_task(steps=60)).samples
    assert found is not None
    fetches = [window.fetches for window in found.windows if window.fetches is not None]
    assert len(fetches) == len(found.windows)
    assert sum(one.batches for one in fetches) == sum(window.steps for window in found.windows)


def test_reused_id_of_a_dataset_is_ignored() -> None:
    def given(data: Slow) -> tuple[int, Any]:
        """Its number, and a loader that has given its batches."""
        loader = DataLoader(data, batch_size=BATCH)
        assert len(list(loader)) == 16
        return id(data), loader

    patches, timer = Patches(), FetchTimer()
    timer.install(patches)
    try:
        _, training = given(Slow())
        assert timer.total(training)[0] == 16
        number, evaluation = given(Slow())
        del evaluation
        gc.collect()
        made = [Slow() for _ in range(10_000)]
        same = next(data for data in made if id(data) == number)
        assert timer.total(DataLoader(same, batch_size=BATCH))[0] == 16
        assert timer.total(given(same)[1])[0] == 32
    finally:
        patches.undo()


class Asking(Dataset[Any]):
    """Every sample tells whether what makes it is watched: a tensor's methods, or its modules."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        hooks = (calls._global_forward_pre_hooks, calls._global_forward_hooks)
        there = (torch.Tensor.contiguous, torch.Tensor.item, torch.Tensor.__bool__)
        watches = there != USUAL or any(hooks)
        return torch.full((FEATURES,), float(watches)), index % CLASSES


USUAL = (torch.Tensor.contiguous, torch.Tensor.item, torch.Tensor.__bool__)


@pytest.mark.parametrize(
    ("workers", "told", "host_syncs"),
    [(0, True, True), (1, True, True), (1, False, True), (1, True, False)],
)
def test_workers_forked_in_the_warm_up_have_no_hooks(
    workers: int, told: bool, host_syncs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where the kernel tells nothing of what they wait for, or where nobody waits for reads."""
    given: list[float] = []
    if not told:
        monkeypatch.setattr(fetch_times, "thread_usage", lambda: None)

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loader = DataLoader(
            Asking(), batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0
        )
        for _ in range(10):
            for batch, labels in loader:
                given.append(batch.max().item())
                loss: Any = torch.nn.functional.cross_entropy(module(batch), labels)
                loss.backward()
                optimizer.step()

    instrumented(training, script_task(variant=Variant(host_syncs=host_syncs)))
    assert given[0] == (0.0 if workers else 1.0)
    assert given[-1] == 0.0
