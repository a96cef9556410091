"""Experiments that take turns in one process of a script."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from instrumented import dataset, instrumented, loop, model, script_task
from nfold.core.interleave import MAX_CYCLES, SETTLE_STEPS, schedule_slots
from nfold.core.variant import Variant
from nfold.engines.base import Observer
from repeated import repeated

REAL, REPLAYED = Variant(), Variant(input="replayed")
WAIT_S = 0.05


class Noted:
    """A hook of a script's own that notes in which step it is called."""

    def __init__(self) -> None:
        self.called: list[int] = []
        self.steps = 0

    # Not annotated: DistributedDataParallel refuses annotations that are text.
    def hook(self, state, bucket):  # type: ignore[no-untyped-def]
        self.called.append(self.steps)
        return default_hooks.allreduce_hook(state, bucket)


def _task(*turns: Variant, steps: int = 8, **changes: Any) -> Any:
    return dataclasses.replace(script_task(steps=steps, **changes), interleaved_variants=turns)


def _train_without_end(given: list[bytes]) -> None:
    """Train, and append the samples of every batch to ``given``."""
    module, loader = model(), DataLoader(dataset(640), batch_size=8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    while True:
        for samples, labels in loader:
            given.append(samples.numpy().tobytes())
            nn.functional.cross_entropy(module(samples), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def test_each_slot_has_its_steps_and_windows() -> None:
    given: list[bytes] = []
    task = _task(REPLAYED, REAL)
    found = instrumented(lambda: _train_without_end(given), task).samples
    assert found is not None
    assert len(found.slots) == len(found.windows)
    steps = [sum(w.steps for w, t in zip(found.windows, found.slots, strict=True) if t == turn)
             for turn in (0, 1)]  # fmt: skip
    assert steps == [8, 8]
    assert len(found.step_ms) == 16
    first = task.plan.warmup_steps
    by_turn: dict[int | None, list[bytes]] = {}
    for part in schedule_slots(task.interleaved_variants, task.plan):
        by_turn.setdefault(part.variant_index, []).extend(given[first : first + part.steps])
        first += part.steps
    assert first == len(given)
    assert len(set(by_turn[0])) <= 16
    assert len(set(by_turn[1])) == 8


def test_real_pass_continues_after_a_replay() -> None:
    """The script sees as many batches in a pass as its loader has, whatever is replayed."""
    passes: list[int] = []

    def training() -> None:
        module, loader = model(), DataLoader(dataset(), batch_size=8, num_workers=1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        while True:
            passes.append(0)
            for samples, labels in loader:
                passes[-1] += 1
                nn.functional.cross_entropy(module(samples), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    found = instrumented(training, _task(REAL, REPLAYED, steps=20))
    # The workers end here, and not in whatever test comes next.
    gc.collect()
    assert found.samples is not None
    assert set(passes[:-1]) == {8}
    assert len(found.samples.step_ms) == 40


@repeated
def test_first_wait_of_each_real_slot_is_in_no_window() -> None:
    """Its first batch takes a worker so long; a replayed pass waits for nothing."""

    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            time.sleep(WAIT_S if index == 0 else 0)
            return self.tensors[0][index], self.tensors[1][index]

    def training() -> None:
        module = model()
        loader = DataLoader(Slow(*dataset(32).tensors), batch_size=8, num_workers=1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(loader, module, optimizer)

    found = instrumented(training, _task(REAL, REPLAYED, steps=40)).samples
    gc.collect()
    assert found is not None
    waits: dict[int, list[float]] = {0: [], 1: []}
    for window, turn in zip(found.windows, found.slots, strict=True):
        if window.epoch_gap is not None:
            assert window.epoch_gap.steps == 4
            waits[turn].append(window.epoch_gap.seconds)
    assert len(waits[0]) > 4
    assert len(waits[1]) > 4
    assert min(waits[0]) >= WAIT_S
    assert min(waits[1]) < WAIT_S


@pytest.mark.usefixtures("group")
def test_exchange_is_interleaved() -> None:
    """With a hook of the script's own: it is called in the turns with an exchange, only there."""
    noted = Noted()
    reduced: list[bool] = []

    def training() -> None:
        module = DistributedDataParallel(model())
        module.register_comm_hook(dist.group.WORLD, noted.hook)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        while True:
            for samples, labels in DataLoader(dataset(), batch_size=8):
                nn.functional.cross_entropy(module(samples), labels).backward()  # type: ignore[no-untyped-call]
                reduced.append(bool(module.broadcast_buffers))
                noted.steps += 1
                optimizer.step()

    task = _task(
        REAL, Variant(exchange="none"), Variant(exchange="barrier", broadcast_buffers=False)
    )
    found = instrumented(training, task).samples
    assert found is not None
    at, real = task.plan.warmup_steps, set(range(task.plan.warmup_steps))
    left_out: set[int] = set()
    for part in schedule_slots(task.interleaved_variants, task.plan):
        here = set(range(at, at + part.steps))
        real |= here if part.variant_index == 0 else set()
        left_out |= here if part.variant_index not in (None, 0) else set()
        at += part.steps
    assert real <= set(noted.called)
    assert not left_out & set(noted.called)
    assert all(reduced[step] for step in real)
    assert not any(reduced[step] for step in left_out)


@pytest.mark.usefixtures("group")
def test_destroying_the_process_group_ends_the_run() -> None:
    """Also before all turns were taken; with too few steps, the group goes as the script says."""
    after: list[str] = []

    def training() -> None:
        module = DistributedDataParallel(model())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(DataLoader(dataset(), batch_size=8), module, optimizer, epochs=3)
        dist.destroy_process_group()
        after.append("tidied up")

    found = instrumented(training, _task(REAL, Variant(exchange="none"), steps=100)).samples
    assert found is not None
    assert set(found.slots) == {0}
    assert len(found.step_ms) == 24 - 4
    assert not after
    assert instrumented(training, _task(REAL, steps=100, warmup_steps=22)).samples is not None
    assert after


@pytest.mark.usefixtures("group")
def test_gradients_are_exchanged_once_or_per_micro_batch() -> None:
    noted = Noted()

    def training() -> None:
        module = DistributedDataParallel(model())
        module.register_comm_hook(dist.group.WORLD, noted.hook)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        while True:
            for number, (samples, labels) in enumerate(DataLoader(dataset(), batch_size=8)):
                nn.functional.cross_entropy(module(samples), labels).backward()  # type: ignore[no-untyped-call]
                if number % 2:
                    noted.steps += 1
                    optimizer.step()

    task = _task(REAL, Variant(exchange_each_micro_batch=False), accumulate=2)
    found = instrumented(training, task)
    assert (found.profile.accumulation, found.profile.gradient_exchanges) == (2, 2)
    times, at = Counter(noted.called), task.plan.warmup_steps
    for part in schedule_slots(task.interleaved_variants, task.plan):
        if part.variant_index is not None:
            expected = 2 - part.variant_index
            assert [times[step] for step in range(at, at + part.steps)] == [expected] * part.steps
        at += part.steps


def test_threads_are_interleaved() -> None:
    own = torch.get_num_threads()
    seen: list[int] = []

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        torch.set_num_threads(3)
        loop(_Noted(seen), module, optimizer)

    try:
        task = _task(REAL, Variant(threads=1))
        assert instrumented(training, task).samples is not None
    finally:
        torch.set_num_threads(own)
    assert set(seen) == {1, 3}
    assert seen[: task.plan.warmup_steps + 2] == [3] * (task.plan.warmup_steps + 2)
    assert seen[task.plan.warmup_steps + 2 + SETTLE_STEPS] == 1


class _Noted:
    """A loader that notes how many threads there are."""

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen
        self._of = DataLoader(dataset(), batch_size=8)

    def __iter__(self) -> Any:
        for batch in self._of:
            self._seen.append(torch.get_num_threads())
            yield batch


def test_interleaved_replay_waits_for_idle_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(Observer, "wait_for_idle_children", lambda _: waited.append(1))

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(DataLoader(dataset(640), batch_size=8), module, optimizer)

    turns = (Variant(), Variant(input="replayed"), Variant(input="resident"))
    instrumented(training, dataclasses.replace(script_task(steps=20), interleaved_variants=turns))
    # Once where each kind of replay is collected, and whenever the real input goes.
    assert len(waited) == 1 + MAX_CYCLES // 2
    waited.clear()
    alone = dataclasses.replace(script_task(steps=8), requested_variant=Variant(input="replayed"))
    instrumented(training, alone)
    assert waited == []


@pytest.mark.usefixtures("group")
def test_two_wrapped_models_have_no_repeated_exchange() -> None:
    """As in a GAN, whose step takes two batches: nobody sums them."""

    def training() -> None:
        modules = [DistributedDataParallel(model()) for _ in range(2)]
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
        while True:
            for number, (samples, labels) in enumerate(DataLoader(dataset(), batch_size=8)):
                module, optimizer = modules[number % 2], optimizers[number % 2]
                nn.functional.cross_entropy(module(samples), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    seen = instrumented(training, script_task()).profile
    assert seen.accumulation == 2
    assert seen.gradient_exchanges == 1


def test_windows_of_replayed_batches_name_them() -> None:
    """Both kinds of replay have the same batches, so that their steps can be compared."""
    task = _task(REAL, REPLAYED, Variant(input="resident"), steps=40)
    given: list[bytes] = []
    found = instrumented(lambda: _train_without_end(given), task).samples
    assert found is not None
    batches: dict[int, set[bytes]] = {}
    for slot, window in zip(found.slots, found.windows, strict=True):
        assert len(window.batch_indices) == (0 if slot == 0 else window.steps)
        for step, index in enumerate(window.batch_indices, start=window.first_step):
            batches.setdefault(index, set()).add(given[step])
    assert {index: len(same) for index, same in batches.items()} == dict.fromkeys(range(16), 1)
