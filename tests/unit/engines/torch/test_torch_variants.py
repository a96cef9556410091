"""How a variant changes the task of a rank, and which variants are refused."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from made import arrays, machine, plan, task
from nfold.core.measurement import RankSamples
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.base import Observer
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.torch.communication import gradient_exchange
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.input import batch_source
from nfold.engines.torch.input.batch_source import build_source
from nfold.engines.torch.variant_support import RankObserver, apply_variant, refusal

HOST = Devices((torch.device("cpu"),))


def _task(variant: Variant | None, rank: int = 0, **changes: Any) -> Any:
    made = task(rank=rank, world_size=2, **changes)
    return dataclasses.replace(made, requested_variant=variant)


def test_without_a_variant_nothing_is_replaced() -> None:
    plain = _task(None, rank=1, batch=8, steps=3)
    assert apply_variant(plain) is plain
    real = build_source(arrays(20), plain, (), HOST)
    assert batch_source.replay_source(real, plain, HOST) is real
    assert gradient_exchange.select_all_reduce(ActiveVariant(plain)) is dist.all_reduce
    assert gradient_exchange.select_ddp_hook(ActiveVariant(plain), None) is None
    assert gradient_exchange.select_ddp_hook(ActiveVariant(plain), "compress") == "compress"


def test_an_independent_rank_has_a_world_of_its_own() -> None:
    own = apply_variant(_task(Variant(independent=True), rank=1, batch=16))
    assert (own.rank, own.world_size, own.local_rank) == (0, 1, 1)
    assert (own.plan.devices, own.plan.strategy, own.plan.batch) == (1, "single", 8)


def test_a_rank_takes_another_s_device_or_share() -> None:
    own = apply_variant(_task(Variant(devices=(1, 0)), rank=1))
    assert (own.rank, own.local_rank) == (1, 0)
    own = apply_variant(_task(Variant(data_shares=(1, 0)), rank=1))
    assert (own.rank, own.local_rank) == (0, 1)
    one_device = apply_variant(dataclasses.replace(task(), requested_variant=Variant(device=1)))
    assert (one_device.rank, one_device.local_rank) == (0, 1)


def test_a_rank_in_another_s_place_reports_as_itself() -> None:
    class Noting(Observer):
        def __init__(self) -> None:
            self.ranks: list[int] = []
            self.awaited: list[int] = []

        def wait_for_other_ranks(self, step: int) -> None:
            self.awaited.append(step)

        def save(self, samples: RankSamples, *, epoch_ended: bool = False) -> None:
            self.ranks.append(samples.rank)

    log = Noting()
    renamed = RankObserver(log, 1)
    renamed.save(RankSamples(rank=0, device="cpu"))
    renamed.wait_for_other_ranks(7)
    assert (log.ranks, log.awaited) == ([1], [7])


@pytest.mark.parametrize("kind", ["replayed", "resident"])
def test_the_first_batches_come_again_and_again(kind: Any) -> None:
    requested = _task(Variant(input=kind), batch=8, steps=7, warmup_steps=0)
    real = build_source(arrays(24), requested, (), HOST)
    first = [batch.tensors[1].tolist() for batch in real]
    found = batch_source.replay_source(real, requested, HOST)
    again = [batch.tensors[1].tolist() for batch in found]
    assert len(again) == len(found) == 7
    # An epoch has three batches of 8; a real run shuffles anew after them.
    assert again[:3] == first[:3]
    assert all(a == b for a, b in zip(again, again[3:], strict=False))
    assert any(a != b for a, b in pairwise(again))
    assert (found.data_bytes > 0) == (kind == "resident")


def test_resident_data_have_nothing_to_replay() -> None:
    one_device = task(batch=8, steps=3, input="resident")
    requested = dataclasses.replace(one_device, requested_variant=Variant(input="replayed"))
    real = build_source(arrays(24), requested, (), HOST)
    assert batch_source.replay_source(real, requested, HOST) is real


def test_nothing_is_exchanged_at_once() -> None:
    send = gradient_exchange.select_all_reduce(ActiveVariant(_task(Variant(exchange="none"))))
    values = torch.ones(3)
    assert send(values, async_op=True).wait() is None
    assert values.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("variant", "device", "expected"),
    [
        (Variant(), "cuda", None),
        (Variant(input="resident"), "cuda", None),
        (Variant(input="resident"), "cpu", "nothing is copied"),
        (Variant(independent=True), "cuda", "only its input"),
        (Variant(input="resident", captured=True), "cuda", "only its input"),
    ],
)
def test_of_an_operation_only_the_input_can_be_changed(
    variant: Variant, device: str, expected: str | None
) -> None:
    requested = plan(machine(gpus=2, cores=2), devices=2, device=device)
    reason = refusal(variant, Workload(name="conv2d"), requested)
    assert (reason is None) if expected is None else (reason is not None and expected in reason)


@pytest.mark.parametrize(
    ("variant", "changes", "expected"),
    [
        (Variant(captured=True), {}, "needs a GPU"),
        (Variant(augmentation=False), {}, "nothing is augmented"),
        (Variant(exchange="none"), {"devices": 1}, "one device"),
        (Variant(pinned=False), {"device": "cuda"}, "only CPU devices"),
        (Variant(captured=True), {"device": "cuda", "strategy": "ddp"}, "strategy nfold"),
        (Variant(broadcast_buffers=False), {}, "none are broadcast"),
        (Variant(host_syncs=False), {"device": "cuda"}, "the host reads nothing"),
        (Variant(expandable_segments=True), {"device": "cuda"}, "default allocator"),
        (Variant(channels_last=True), {"layout": "channels_first"}, "the plan sets the layout"),
        (Variant(compiled="default"), {"step": "eager"}, "the plan sets how"),
        (Variant(independent=True, exchange_after_backward=True), {"device": "cuda"}, "itself"),
        (Variant(), {}, None),
        (Variant(exchange="none", input="replayed"), {}, None),
    ],
)
def test_refused_variants_of_a_workload_have_a_reason(
    variant: Variant, changes: dict[str, Any], expected: str | None
) -> None:
    host = machine(gpus=2, cores=2)
    requested = plan(host, **{"devices": 2, "device": "cpu", **changes})
    reason = refusal(variant, Workload(name="digits"), requested)
    assert (reason is None) if expected is None else (reason is not None and expected in reason)


@pytest.mark.parametrize(
    ("variant", "changes", "expected"),
    [
        (Variant(captured=True), {}, "the step of train.py belongs to the script"),
        (Variant(augmentation=False), {}, "cannot be separated"),
        (Variant(pinned=False), {"device": "cuda"}, "only CPU devices"),
        (Variant(devices=(1, 0)), {"device": "cuda", "strategy": "dp"}, "one rank"),
        (Variant(exchange="none"), {"devices": 1}, "one device"),
        (Variant(input="resident", exchange="barrier", broadcast_buffers=False), {}, None),
        (Variant(gradient_compression="fp16"), {"strategy": "ddp"}, None),
        (Variant(host_syncs=False), {"device": "cuda"}, None),
        (Variant(expandable_segments=True), {"device": "cuda"}, None),
    ],
)
def test_refused_variants_of_a_script_have_a_reason(
    variant: Variant, changes: dict[str, Any], expected: str | None
) -> None:
    requested = plan(machine(gpus=2, cores=2), **{"devices": 2, "device": "cpu", **changes})
    reason = refusal(variant, Workload(name="train.py", script=("train.py",)), requested)
    assert (reason is None) if expected is None else (reason is not None and expected in reason)
