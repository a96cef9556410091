"""Interleaved variants in one run of a workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from made import arrays, task
from nfold.core.interleave import (
    RECAPTURE_STEPS,
    SWITCHABLE_FIELDS,
    communication_key,
    schedule_slots,
)
from nfold.core.measurement import RankSamples
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.base import Observer, Task
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.torch.batch import CurrentShare, split_micro_batches
from nfold.engines.torch.batch_norm import (
    BatchNormSwitch,
    SynchronizedMarker,
    synchronize_batch_norm,
)
from nfold.engines.torch.communication import gradient_exchange
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.lr_schedule import ConstantLearningRate
from nfold.engines.torch.step.cuda_graph import WARM_UP_CALLS, CudaGraphRecorder
from nfold.engines.torch.step.training_step import TrainingStep
from nfold.engines.torch.torch_workload import TorchWorkload
from nfold.engines.torch.trainer import Trainer
from nfold.engines.torch.variant_support import switchable_fields

HOST = Devices((torch.device("cpu"),))
REAL, REPLAYED = Variant(), Variant(input="replayed")
ALONE, BARRIER = Variant(exchange="none"), Variant(exchange="barrier")


def _task(*variants: Variant, **changes: Any) -> Task:
    fields = {"batch": 8, "steps": 8, "warmup_steps": 4, "workers": 0, **changes}
    return dataclasses.replace(task(**fields), interleaved_variants=variants)


def _define(_: Task) -> TorchWorkload:
    torch.manual_seed(0)
    return TorchWorkload(
        arrays=arrays(40),
        operations=(),
        model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        loss=nn.functional.cross_entropy,
    )


class Run:
    """A training in this process: what every step was given, and what ``look`` saw there."""

    def __init__(self, requested: Task, look: Callable[[], Any] = lambda: None) -> None:
        self.given: list[list[int]] = []
        self.looked: list[Any] = []
        trainer = Trainer(requested, HOST, _define)
        usual = trainer.step

        def step(batch: Any) -> Tensor:
            self.given.append(batch.tensors[1].tolist())
            self.looked.append(look())
            return usual(batch)

        trainer.step = step  # type: ignore[method-assign]
        self.samples: RankSamples = trainer.run(Observer())
        trainer.close()

    def in_slots(self, requested: Task) -> Iterator[tuple[int | None, list[int]]]:
        """Every slot with its steps, settling ones as None."""
        at = requested.plan.warmup_steps or 0
        for part in schedule_slots(requested.interleaved_variants, requested.plan):
            yield part.variant_index, list(range(at, at + part.steps))
            at += part.steps
        assert at == len(self.given)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_real_input_stands_still_while_first_batches_come_again(workers: int) -> None:
    requested = _task(REAL, REPLAYED, Variant(input="resident"), workers=workers)
    run = Run(requested)
    plain = Run(_task(workers=workers, steps=60)).given
    replays = [step for slot, steps in run.in_slots(requested) if slot in (1, 2) for step in steps]
    assert {tuple(run.given[step]) for step in replays} <= set(map(tuple, plain[:5]))
    real = [
        given
        for (slot, steps), after in _with_next(run.in_slots(requested))
        for given in run.given[steps[0] : steps[-1] + 1]
        if (slot if slot is not None else after) == 0
    ]
    assert run.given[:4] + real == plain[: 4 + len(real)]
    assert (run.samples.data_bytes or 0) > 0


def _with_next(parts: Iterator[Any]) -> Iterator[tuple[Any, int | None]]:
    """Every part, and whose slot comes after it."""
    found = list(parts)
    return iter([*zip(found, [slot for slot, _ in found[1:]], strict=False), (found[-1], None)])


def test_each_slot_has_its_windows_and_weights_are_compared_at_the_end() -> None:
    requested = _task(REAL, REPLAYED)
    found, before = Run(requested).samples, Run(_task(steps=2, warmup_steps=2)).samples
    assert len(found.slots) == len(found.windows)
    of_each = zip(found.windows, found.slots, strict=True)
    steps = [0, 0]
    for window, slot in of_each:
        steps[slot] += window.steps
    assert steps == [8, 8]
    assert len(found.step_ms) == 16
    assert found.warmup_steps == 4
    assert found.parameter_checksum != before.parameter_checksum
    assert not before.slots


def test_threads_change_and_come_back() -> None:
    own = torch.get_num_threads()
    requested = _task(REAL, Variant(threads=own + 1))
    try:
        run = Run(requested, torch.get_num_threads)
    finally:
        torch.set_num_threads(own)
    assert set(run.looked[:4]) == {own}
    for slot, steps in run.in_slots(requested):
        if slot is not None:
            assert {run.looked[step] for step in steps} == {own + slot}


@pytest.mark.slow(parts=8)
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("strategy", ["nfold", "ddp"])
def test_the_exchange_of_a_workload_is_switched_off_and_on(
    monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """As rank 0 of two in a group of one: how many elements are sent in a step."""
    sent: list[int] = [0]
    usual = dist.all_reduce

    def all_reduce(tensor: Tensor, *how: Any, **more: Any) -> Any:
        sent.append(tensor.numel())
        return usual(tensor, *how, **more)

    def look() -> int:
        found = sum(sent)
        sent.clear()
        return found

    requested = _task(REAL, ALONE, BARRIER, world_size=2, strategy=strategy)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    run = Run(requested, look)
    # What a look finds was sent in the step before it.
    each: dict[int, set[int]] = {
        slot: set(run.looked[steps[0] + 1 : steps[-1] + 1])
        for slot, steps in run.in_slots(requested)
        if slot is not None and len(steps) > 1
    }
    assert each[1] == {0}
    assert each[2] == {1}
    assert min(each[0]) >= 650
    # Weights are compared before the first slot: later ones exchange no gradients.
    plain = _task(world_size=2, strategy=strategy, steps=2, warmup_steps=2)
    assert run.samples.parameter_checksum == Run(plain).samples.parameter_checksum


def test_the_exchange_is_selected_once_without_interleaving() -> None:
    assert gradient_exchange.select_all_reduce(ActiveVariant(_task())) is dist.all_reduce
    replays_only = ActiveVariant(_task(REAL, REPLAYED))
    assert gradient_exchange.select_all_reduce(replays_only) is dist.all_reduce
    assert gradient_exchange.select_ddp_hook(replays_only, None) is None
    variants = ActiveVariant(_task(REAL, ALONE))
    assert gradient_exchange.select_all_reduce(variants) is not dist.all_reduce


def test_statistics_are_a_device_s_own_and_all_devices_again() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    synchronize_batch_norm(
        module, task(world_size=2, batch_norm="synchronised").plan, CurrentShare(2)
    )
    switch = BatchNormSwitch(module)
    kinds: list[type] = [type(module[1])]
    for synchronised in (False, True):
        switch(synchronized=synchronised)
        kinds.append(type(module[1]))
    assert issubclass(kinds[0], SynchronizedMarker)
    assert kinds == [kinds[0], nn.BatchNorm1d, kinds[0]]


class Graphs:
    """Records nothing: notes what a step is asked for."""

    def __init__(self) -> None:
        self.aside_calls, self.reset = 0, 0

    def run_on_capture_stream(self, call: Callable[[], Any]) -> Any:
        self.aside_calls += 1
        return call()

    def record(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        filled = torch.zeros(())
        test = self

        class Graph:
            def replay(self) -> None:
                filled.copy_(call())

            def reset(self) -> None:
                test.reset += 1

        return Graph(), filled


def test_a_captured_step_has_graphs_of_its_own_for_what_is_exchanged() -> None:
    calls: list[str] = []
    now = ["real"]

    def update(tensors: Any, epoch: Tensor, parts: Any) -> Tensor:
        calls.append(now[0])
        return cast(Tensor, tensors[0].sum())

    graphs = Graphs()
    unused = cast(Any, None)
    recorder = cast(CudaGraphRecorder, graphs)
    step = TrainingStep(
        unused, unused, (), unused, unused, unused, ConstantLearningRate(), unused, recorder
    )
    vars(step)["update"] = update

    def steps(variant: Variant, times: int) -> list[str]:
        now[0] = variant.exchange
        step.switch_exchange(communication_key(variant))
        calls.clear()
        for _ in range(times):
            assert step((torch.ones(4),), torch.tensor(0), split_micro_batches(4, 0, 1, 1)) == 4
        return list(calls)

    # In this file's graphs a replay is one call more.
    assert steps(REAL, WARM_UP_CALLS + 2) == ["real"] * (WARM_UP_CALLS + 2)
    assert graphs.aside_calls == WARM_UP_CALLS
    steps(ALONE, RECAPTURE_STEPS)
    assert graphs.aside_calls == 2 * WARM_UP_CALLS
    steps(REAL, 1)
    steps(REPLAYED, 1)
    steps(ALONE, 1)
    assert graphs.aside_calls == 2 * WARM_UP_CALLS
    step.close()
    assert graphs.reset == 2


def test_as_many_steps_settle_as_it_takes_to_record() -> None:
    """The last of them replays what the one before recorded."""
    assert RECAPTURE_STEPS == WARM_UP_CALLS + 1


OF_SCRIPTS = {
    "broadcast_buffers",
    "host_syncs",
    "anomaly_detection",
    "exchange_each_micro_batch",
    "exchange_after_backward",
}
"""What a workload's own loop has not, so that nothing switches it."""


@pytest.mark.parametrize(
    ("workload", "changes", "without"),
    [
        ("digits", {}, OF_SCRIPTS),
        ("digits", {"step": "compiled"}, OF_SCRIPTS | {"threads"}),
        ("digits", {"epochs": 2, "steps": None}, set(SWITCHABLE_FIELDS)),
        ("digits", {"steps_per_execution": 4}, set(SWITCHABLE_FIELDS)),
        ("conv2d", {}, set(SWITCHABLE_FIELDS)),
    ],
)
def test_what_can_change_between_two_steps(
    workload: str, changes: dict[str, Any], without: set[str]
) -> None:
    plan = task(steps=8).plan.edit(**changes)
    found = set(switchable_fields(Workload(name=workload), plan))
    assert found.isdisjoint(without)
    if without != set(SWITCHABLE_FIELDS):
        assert {"input", "exchange", "synchronised_batch_norm", "threads"} - without <= found


def test_of_a_script_everything_that_ever_can() -> None:
    script = Workload(name="train.py", script=("train.py",))
    assert switchable_fields(script, task(steps=8).plan) == SWITCHABLE_FIELDS
    assert not switchable_fields(script, task(epochs=1).plan)
