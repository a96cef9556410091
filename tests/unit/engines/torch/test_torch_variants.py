"""What a rank is told under an ablation, and what stands in for parts of its training."""

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
from nfold.engines.torch.communication import exchange_variants
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.input import batch_source
from nfold.engines.torch.input.batch_source import build_source
from nfold.engines.torch.variant_support import (
    RankObserver,
    apply_variant,
    script_refusal,
    workload_refusal,
)

HOST = Devices((torch.device("cpu"),))


def _task(ablation: Variant | None, rank: int = 0, **changes: Any) -> Any:
    made = task(rank=rank, world_size=2, **changes)
    return dataclasses.replace(made, requested_variant=ablation)


def test_without_an_ablation_nothing_is_put_in_place_of_anything() -> None:
    plain = _task(None, rank=1, batch=8, steps=3)
    assert apply_variant(plain) is plain
    real = build_source(arrays(20), plain, (), HOST)
    assert batch_source.replay_source(real, plain, HOST) is real
    assert exchange_variants.select_all_reduce(ActiveVariant(plain)) is dist.all_reduce
    assert exchange_variants.select_ddp_hook(ActiveVariant(plain), None) is None
    assert exchange_variants.select_ddp_hook(ActiveVariant(plain), "compress") == "compress"


def test_an_independent_rank_is_alone_with_its_share() -> None:
    own = apply_variant(_task(Variant(independent=True), rank=1, batch=16))
    assert (own.rank, own.world_size, own.local_rank) == (0, 1, 1)
    assert (own.plan.devices, own.plan.strategy, own.plan.batch) == (1, "single", 8)


def test_a_rank_takes_another_s_device_or_share() -> None:
    own = apply_variant(_task(Variant(devices=(1, 0)), rank=1))
    assert (own.rank, own.local_rank) == (1, 0)
    own = apply_variant(_task(Variant(data_shares=(1, 0)), rank=1))
    assert (own.rank, own.local_rank) == (0, 1)
    alone = apply_variant(dataclasses.replace(task(), requested_variant=Variant(device=1)))
    assert (alone.rank, alone.local_rank) == (0, 1)


def test_a_rank_in_another_s_place_reports_as_itself() -> None:
    class Noting(Observer):
        def __init__(self) -> None:
            self.ranks: list[int] = []
            self.awaited: list[int] = []

        def wait_for_other_ranks(self, step: int) -> None:
            self.awaited.append(step)

        def save(self, samples: RankSamples, *, epoch_ended: bool = False) -> None:
            self.ranks.append(samples.rank)

    noting = Noting()
    renamed = RankObserver(noting, 1)
    renamed.save(RankSamples(rank=0, device="cpu"))
    renamed.wait_for_other_ranks(7)
    assert (noting.ranks, noting.awaited) == ([1], [7])


@pytest.mark.parametrize("kind", ["replayed", "resident"])
def test_the_first_batches_come_again_and_again(kind: Any) -> None:
    asked = _task(Variant(input=kind), batch=8, steps=7, warmup_steps=0)
    real = build_source(arrays(24), asked, (), HOST)
    first = [batch.tensors[1].tolist() for batch in real]
    found = batch_source.replay_source(real, asked, HOST)
    again = [batch.tensors[1].tolist() for batch in found]
    assert len(again) == len(found) == 7
    # An epoch has three batches of 8; a real run shuffles anew after them.
    assert again[:3] == first[:3]
    assert all(a == b for a, b in zip(again, again[3:], strict=False))
    assert any(a != b for a, b in pairwise(again))
    assert (found.data_bytes > 0) == (kind == "resident")


def test_resident_data_have_nothing_to_replay() -> None:
    alone = task(batch=8, steps=3, input="resident")
    asked = dataclasses.replace(alone, requested_variant=Variant(input="replayed"))
    real = build_source(arrays(24), asked, (), HOST)
    assert batch_source.replay_source(real, asked, HOST) is real


def test_nothing_is_exchanged_at_once() -> None:
    send = exchange_variants.select_all_reduce(ActiveVariant(_task(Variant(exchange="none"))))
    values = torch.ones(3)
    assert send(values, async_op=True).wait() is None
    assert values.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("ablation", "device", "said"),
    [
        (Variant(), "cuda", None),
        (Variant(input="resident"), "cuda", None),
        (Variant(input="resident"), "cpu", "nothing is copied"),
        (Variant(independent=True), "cuda", "only its input"),
        (Variant(input="resident", captured=True), "cuda", "only its input"),
    ],
)
def test_of_an_operation_only_the_input_can_be_left_out(
    ablation: Variant, device: str, said: str | None
) -> None:
    asked = plan(machine(gpus=2, cores=2), devices=2, device=device)
    reason = workload_refusal(ablation, Workload(name="conv2d"), asked)
    assert (reason is None) if said is None else (reason is not None and said in reason)


@pytest.mark.parametrize(
    ("ablation", "changes", "said"),
    [
        (Variant(captured=True), {}, "needs a GPU"),
        (Variant(augmentation=False), {}, "nothing is augmented"),
        (Variant(exchange="none"), {"devices": 1}, "one device"),
        (Variant(pinned=False), {"device": "cuda"}, "only CPU devices"),
        (Variant(captured=True), {"device": "cuda", "strategy": "ddp"}, "strategy nfold"),
        (Variant(broadcast_buffers=False), {}, "none are broadcast"),
        (Variant(host_syncs=False), {"device": "cuda"}, "the host reads nothing"),
        (Variant(expandable_segments=True), {"device": "cuda"}, "as it is"),
        (Variant(channels_last=True), {"layout": "channels_first"}, "its plan's"),
        (Variant(compiled="default"), {"step": "eager"}, "its plan's"),
        (Variant(independent=True, exchange_after_backward=True), {"device": "cuda"}, "itself"),
        (Variant(), {}, None),
        (Variant(exchange="none", input="replayed"), {}, None),
    ],
)
def test_what_torch_cannot_take_away_says_why(
    ablation: Variant, changes: dict[str, Any], said: str | None
) -> None:
    host = machine(gpus=2, cores=2)
    asked = plan(host, **{"devices": 2, "device": "cpu", **changes})
    reason = workload_refusal(ablation, Workload(name="digits"), asked)
    assert (reason is None) if said is None else (reason is not None and said in reason)


@pytest.mark.parametrize(
    ("ablation", "changes", "said"),
    [
        (Variant(captured=True), {}, "the step of train.py is the script's own"),
        (Variant(augmentation=False), {}, "cannot be told apart"),
        (Variant(pinned=False), {"device": "cuda"}, "only CPU devices"),
        (Variant(devices=(1, 0)), {"device": "cuda", "strategy": "dp"}, "one rank"),
        (Variant(exchange="none"), {"devices": 1}, "one device"),
        (Variant(input="resident", exchange="barrier", broadcast_buffers=False), {}, None),
        (Variant(exchange="half"), {"strategy": "ddp"}, None),
        (Variant(host_syncs=False), {"device": "cuda"}, None),
        (Variant(expandable_segments=True), {"device": "cuda"}, None),
    ],
)
def test_what_cannot_be_taken_from_a_script_says_why(
    ablation: Variant, changes: dict[str, Any], said: str | None
) -> None:
    asked = plan(machine(gpus=2, cores=2), **{"devices": 2, "device": "cpu", **changes})
    reason = script_refusal(ablation, Workload(name="train.py", script=("train.py",)), asked)
    assert (reason is None) if said is None else (reason is not None and said in reason)
