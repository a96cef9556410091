"""What a rank is told under an ablation, and what stands in for parts of its training."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from made import arrays, machine, plan, task
from nfold.ablation import Ablation
from nfold.frameworks.base import Observer
from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.torch import ablate, ablate_exchange
from nfold.frameworks.torch.ablation import Renamed, refusal, script_refusal, seen
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.source import source
from nfold.measurement import RankSamples
from nfold.workload import Workload

HOST = Devices((torch.device("cpu"),))


def _task(ablation: Ablation | None, rank: int = 0, **changes: Any) -> Any:
    made = task(rank=rank, world_size=2, **changes)
    return dataclasses.replace(made, ablation=ablation)


def test_without_an_ablation_nothing_is_put_in_place_of_anything() -> None:
    plain = _task(None, rank=1, batch=8, steps=3)
    assert seen(plain) is plain
    real = source(arrays(20), plain, (), HOST)
    assert ablate.replayed(real, plain, HOST) is real
    assert ablate_exchange.all_reduce(LeftOut(plain)) is dist.all_reduce
    assert ablate_exchange.ddp_hook(LeftOut(plain), None) is None
    assert ablate_exchange.ddp_hook(LeftOut(plain), "compress") == "compress"


def test_an_independent_rank_is_alone_with_its_share() -> None:
    own = seen(_task(Ablation(independent=True), rank=1, batch=16))
    assert (own.rank, own.world_size, own.local_rank) == (0, 1, 1)
    assert (own.plan.devices, own.plan.strategy, own.plan.batch) == (1, "single", 8)


def test_a_rank_takes_another_s_device_or_share() -> None:
    own = seen(_task(Ablation(devices=(1, 0)), rank=1))
    assert (own.rank, own.local_rank) == (1, 0)
    own = seen(_task(Ablation(shares=(1, 0)), rank=1))
    assert (own.rank, own.local_rank) == (0, 1)
    alone = seen(dataclasses.replace(task(), ablation=Ablation(device=1)))
    assert (alone.rank, alone.local_rank) == (0, 1)


def test_a_rank_in_another_s_place_reports_as_itself() -> None:
    class Noting(Observer):
        def __init__(self) -> None:
            self.ranks: list[int] = []
            self.awaited: list[int] = []

        def await_others(self, step: int) -> None:
            self.awaited.append(step)

        def save(self, samples: RankSamples, *, epoch_ended: bool = False) -> None:
            self.ranks.append(samples.rank)

    noting = Noting()
    renamed = Renamed(noting, 1)
    renamed.save(RankSamples(rank=0, device="cpu"))
    renamed.await_others(7)
    assert (noting.ranks, noting.awaited) == ([1], [7])


@pytest.mark.parametrize("kind", ["replayed", "resident"])
def test_the_first_batches_come_again_and_again(kind: Any) -> None:
    asked = _task(Ablation(input=kind), batch=8, steps=7, warmup_steps=0)
    real = source(arrays(24), asked, (), HOST)
    first = [batch.tensors[1].tolist() for batch in real]
    found = ablate.replayed(real, asked, HOST)
    again = [batch.tensors[1].tolist() for batch in found]
    assert len(again) == len(found) == 7
    # An epoch has three batches of 8; a real run shuffles anew after them.
    assert again[:3] == first[:3]
    assert all(a == b for a, b in zip(again, again[3:], strict=False))
    assert any(a != b for a, b in pairwise(again))
    assert (found.data_bytes > 0) == (kind == "resident")


def test_resident_data_have_nothing_to_replay() -> None:
    alone = task(batch=8, steps=3, input="resident")
    asked = dataclasses.replace(alone, ablation=Ablation(input="replayed"))
    real = source(arrays(24), asked, (), HOST)
    assert ablate.replayed(real, asked, HOST) is real


def test_nothing_is_exchanged_at_once() -> None:
    send = ablate_exchange.all_reduce(LeftOut(_task(Ablation(exchange="none"))))
    values = torch.ones(3)
    assert send(values, async_op=True).wait() is None
    assert values.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("ablation", "device", "said"),
    [
        (Ablation(), "cuda", None),
        (Ablation(input="resident"), "cuda", None),
        (Ablation(input="resident"), "cpu", "nothing is copied"),
        (Ablation(independent=True), "cuda", "only its input"),
        (Ablation(input="resident", captured=True), "cuda", "only its input"),
    ],
)
def test_of_an_operation_only_the_input_can_be_left_out(
    ablation: Ablation, device: str, said: str | None
) -> None:
    asked = plan(machine(gpus=2, cores=2), devices=2, device=device)
    reason = refusal(ablation, Workload(name="conv2d"), asked)
    assert (reason is None) if said is None else (reason is not None and said in reason)


@pytest.mark.parametrize(
    ("ablation", "changes", "said"),
    [
        (Ablation(captured=True), {}, "needs a GPU"),
        (Ablation(augmentation=False), {}, "nothing is augmented"),
        (Ablation(exchange="none"), {"devices": 1}, "one device"),
        (Ablation(pinned=False), {"device": "cuda"}, "only CPU devices"),
        (Ablation(captured=True), {"device": "cuda", "strategy": "ddp"}, "strategy nfold"),
        (Ablation(buffers=False), {}, "none are broadcast"),
        (Ablation(host_syncs=False), {"device": "cuda"}, "the host reads nothing"),
        (Ablation(expandable_segments=True), {"device": "cuda"}, "as it is"),
        (Ablation(channels_last=True), {"layout": "channels_first"}, "its plan's"),
        (Ablation(compiled="default"), {"step": "eager"}, "its plan's"),
        (Ablation(independent=True, late_exchange=True), {"device": "cuda"}, "itself"),
        (Ablation(), {}, None),
        (Ablation(exchange="none", input="replayed"), {}, None),
    ],
)
def test_what_torch_cannot_take_away_says_why(
    ablation: Ablation, changes: dict[str, Any], said: str | None
) -> None:
    host = machine(gpus=2, cores=2)
    asked = plan(host, **{"devices": 2, "device": "cpu", **changes})
    reason = refusal(ablation, Workload(name="digits"), asked)
    assert (reason is None) if said is None else (reason is not None and said in reason)


@pytest.mark.parametrize(
    ("ablation", "changes", "said"),
    [
        (Ablation(captured=True), {}, "the step of train.py is the script's own"),
        (Ablation(augmentation=False), {}, "cannot be told apart"),
        (Ablation(pinned=False), {"device": "cuda"}, "only CPU devices"),
        (Ablation(devices=(1, 0)), {"device": "cuda", "strategy": "dp"}, "one rank"),
        (Ablation(exchange="none"), {"devices": 1}, "one device"),
        (Ablation(input="resident", exchange="barrier", buffers=False), {}, None),
        (Ablation(exchange="half"), {"strategy": "ddp"}, None),
        (Ablation(host_syncs=False), {"device": "cuda"}, None),
        (Ablation(expandable_segments=True), {"device": "cuda"}, None),
    ],
)
def test_what_cannot_be_taken_from_a_script_says_why(
    ablation: Ablation, changes: dict[str, Any], said: str | None
) -> None:
    asked = plan(machine(gpus=2, cores=2), **{"devices": 2, "device": "cpu", **changes})
    reason = script_refusal(ablation, Workload(name="train.py", script=("train.py",)), asked)
    assert (reason is None) if said is None else (reason is not None and said in reason)
