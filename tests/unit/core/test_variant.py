"""Ablations: the empty one changes no id, an unknown one is not read by mistake."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from made import machine, plan
from nfold.core.errors import UsageError
from nfold.core.measurement import cell_id
from nfold.core.serialization import deserialize, serialize
from nfold.core.variant import Variant
from nfold.core.workload import Workload

HOST = machine(gpus=4, cores=16)


def test_the_default_variant_has_no_interventions() -> None:
    assert Variant().to_dict() == {}
    assert Variant.from_dict({}) == Variant()
    assert not Variant()
    assert str(Variant()) == "no interventions"


def test_the_id_without_interventions_is_that_of_older_stores() -> None:
    requested = (Workload(name="digits"), plan(HOST, batch=64))
    older = json.dumps(["digits", requested[1].id, {}, HOST.id], sort_keys=True)
    assert cell_id(*requested, None, HOST) == hashlib.sha256(older.encode()).hexdigest()[:10]
    assert cell_id(*requested, None, HOST) == cell_id(*requested, Variant(), HOST)
    assert cell_id(*requested, None, HOST) != cell_id(*requested, Variant(input="replayed"), HOST)


def test_only_interventions_are_written() -> None:
    made = Variant(input="replayed", devices=(1, 0), threads=2)
    assert made.to_dict() == {"input": "replayed", "threads": 2, "devices": [1, 0]}
    assert Variant.from_dict(made.to_dict()) == made
    assert deserialize(Variant, serialize(made)) == made
    assert str(made) == "input replayed, threads 2, devices (1, 0)"


def test_an_entry_of_a_newer_nfold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown entries \['update'\]"):
        Variant.from_dict({"update": "skipped"})
    with pytest.raises(ValueError, match="'cached' is not one of real, replayed, resident"):
        Variant.from_dict({"input": "cached"})


@pytest.mark.parametrize("wrong", [{"devices": (0, 2)}, {"data_shares": (1, 1)}, {"threads": 0}])
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="allowed"):
        Variant(**wrong)


def test_merge_combines_interventions() -> None:
    both = Variant(input="replayed").merge(Variant(exchange="barrier"))
    assert both == Variant(input="replayed", exchange="barrier")
    assert Variant(exchange="none").merge(Variant(exchange="barrier")).exchange == "barrier"
    assert both.ranks_synchronize
    assert not Variant(exchange="none").ranks_synchronize
    assert not Variant(independent=True).ranks_synchronize


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        (Variant(exchange="none"), {"devices": 1}, "one device exchanges"),
        (Variant(independent=True), {"devices": 1}, "no other"),
        (Variant(exchange="barrier"), {"devices": 2, "strategy": "dp"}, "DataParallel"),
        (
            Variant(gradient_compression="bf16"),
            {"devices": 2, "strategy": "nfold"},
            "only DistributedDataParallel",
        ),
        (Variant(independent=True), {"devices": 2, "strategy": "dp"}, "one process"),
        (Variant(input="replayed"), {"devices": 2, "input": "resident"}, "on the device"),
        (Variant(device=1), {"devices": 2}, "plan on one device"),
        (Variant(synchronised_batch_norm=False), {"devices": 2}, "not synchronised"),
        (Variant(captured=True), {"devices": 2, "step": "captured"}, "already"),
        (Variant(devices=(1, 0)), {"devices": 4}, "not an order of 4 devices"),
        (Variant(broadcast_buffers=False), {"devices": 1}, "one device broadcasts"),
        (Variant(find_unused_parameters=False), {"devices": 1}, "exchanges no gradients"),
        (
            Variant(find_unused_parameters=False),
            {"devices": 2, "strategy": "dp"},
            "only DistributedDataParallel",
        ),
        (Variant(broadcast_buffers=False), {"devices": 2, "strategy": "dp"}, "whole module"),
        (Variant(host_syncs=False), {"device": "cpu"}, "no host read waits"),
        (Variant(expandable_segments=True), {"device": "cpu"}, "has no segments"),
        (Variant(channels_last=True), {"layout": "channels_last"}, "channels_last already"),
        (Variant(compiled="default"), {"step": "compiled"}, "compiled already"),
        (Variant(exchange_after_backward=True), {"device": "cuda"}, "not independent exchange"),
    ],
)
def test_impossible_interventions_are_refused_with_a_reason(
    variant: Variant, changes: dict[str, Any], message: str
) -> None:
    reason = variant.refusal(plan(HOST, **{"device": "cuda", **changes}))
    assert reason is not None
    assert message in reason


def test_possible_interventions_are_not_refused() -> None:
    complete = plan(HOST, device="cuda", devices=2, batch_norm="synchronised")
    for variant in (
        Variant(),
        Variant(input="resident", exchange="none", synchronised_batch_norm=False),
        Variant(independent=True, threads=1, pinned=False),
        Variant(devices=(1, 0), data_shares=(1, 0), augmentation=False, captured=True),
        Variant(broadcast_buffers=False, host_syncs=False),
    ):
        assert variant.refusal(complete) is None
