"""Ablations: the empty one changes no id, an unknown one is not read by mistake."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from made import machine, plan
from nfold.ablation import Ablation
from nfold.errors import UsageError
from nfold.measurement import cell_id
from nfold.plain import from_plain, to_plain
from nfold.workload import Workload

HOST = machine(gpus=4, cores=16)


def test_the_empty_ablation_leaves_nothing_out() -> None:
    assert Ablation().to_dict() == {}
    assert Ablation.from_dict({}) == Ablation()
    assert not Ablation()
    assert str(Ablation()) == "nothing left out"


def test_the_id_of_a_measurement_without_an_ablation_is_that_of_older_stores() -> None:
    asked = (Workload(name="digits"), plan(HOST, batch=64))
    older = json.dumps(["digits", asked[1].id, {}, HOST.id], sort_keys=True)
    assert cell_id(*asked, None, HOST) == hashlib.sha256(older.encode()).hexdigest()[:10]
    assert cell_id(*asked, None, HOST) == cell_id(*asked, Ablation(), HOST)
    assert cell_id(*asked, None, HOST) != cell_id(*asked, Ablation(input="replayed"), HOST)


def test_only_what_is_left_out_is_written() -> None:
    made = Ablation(input="replayed", devices=(1, 0), threads=2)
    assert made.to_dict() == {"input": "replayed", "threads": 2, "devices": [1, 0]}
    assert Ablation.from_dict(made.to_dict()) == made
    assert from_plain(Ablation, to_plain(made)) == made
    assert str(made) == "input replayed, threads 2, devices (1, 0)"


def test_an_entry_of_a_newer_nfold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown entries \['update'\]"):
        Ablation.from_dict({"update": "skipped"})
    with pytest.raises(ValueError, match="'cached' is not one of real, replayed, resident"):
        Ablation.from_dict({"input": "cached"})


@pytest.mark.parametrize("wrong", [{"devices": (0, 2)}, {"shares": (1, 1)}, {"threads": 0}])
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="allowed"):
        Ablation(**wrong)


def test_two_ablations_leave_out_what_either_does() -> None:
    both = Ablation(input="replayed").merged(Ablation(exchange="barrier"))
    assert both == Ablation(input="replayed", exchange="barrier")
    assert Ablation(exchange="none").merged(Ablation(exchange="barrier")).exchange == "barrier"
    assert both.coupled
    assert not Ablation(exchange="none").coupled
    assert not Ablation(independent=True).coupled


@pytest.mark.parametrize(
    ("ablation", "changes", "said"),
    [
        (Ablation(exchange="none"), {"devices": 1}, "one device exchanges"),
        (Ablation(independent=True), {"devices": 1}, "no other"),
        (Ablation(exchange="barrier"), {"devices": 2, "strategy": "dp"}, "DataParallel"),
        (Ablation(exchange="half"), {"devices": 2, "strategy": "nfold"}, "a hook that sends half"),
        (Ablation(independent=True), {"devices": 2, "strategy": "dp"}, "one process"),
        (Ablation(input="replayed"), {"devices": 2, "input": "resident"}, "on the device"),
        (Ablation(device=1), {"devices": 2}, "plan on one device"),
        (Ablation(synchronised_batch_norm=False), {"devices": 2}, "not synchronised"),
        (Ablation(captured=True), {"devices": 2, "step": "captured"}, "already"),
        (Ablation(devices=(1, 0)), {"devices": 4}, "no order of 4 devices"),
        (Ablation(buffers=False), {"devices": 1}, "one device broadcasts"),
        (Ablation(unused_parameters=False), {"devices": 1}, "only DistributedDataParallel"),
        (
            Ablation(unused_parameters=False),
            {"devices": 2, "strategy": "dp"},
            "only DistributedDataParallel",
        ),
        (Ablation(buffers=False), {"devices": 2, "strategy": "dp"}, "whole module"),
        (Ablation(host_syncs=False), {"device": "cpu"}, "nothing waits"),
        (Ablation(expandable_segments=True), {"device": "cpu"}, "no allocator keeps it"),
        (Ablation(channels_last=True), {"layout": "channels_last"}, "channels_last already"),
        (Ablation(compiled="default"), {"step": "compiled"}, "compiled already"),
        (Ablation(compiled="default"), {"devices": 2, "strategy": "dp"}, "its copies are not"),
        (Ablation(late_exchange=True), {"device": "cuda"}, "not independent exchange"),
    ],
)
def test_what_cannot_be_taken_away_says_why(
    ablation: Ablation, changes: dict[str, Any], said: str
) -> None:
    reason = ablation.refusal(plan(HOST, **{"device": "cuda", **changes}))
    assert reason is not None
    assert said in reason


def test_what_can_be_taken_away_is_not_refused() -> None:
    complete = plan(HOST, device="cuda", devices=2, batch_norm="synchronised")
    for ablation in (
        Ablation(),
        Ablation(input="resident", exchange="none", synchronised_batch_norm=False),
        Ablation(independent=True, threads=1, pinned=False),
        Ablation(devices=(1, 0), shares=(1, 0), augmentation=False, captured=True),
        Ablation(buffers=False, host_syncs=False),
    ):
        assert ablation.refusal(complete) is None
