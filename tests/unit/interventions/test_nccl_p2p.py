"""NCCL without direct copies: a variable in the environment of new processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from made import machine, plan
from nfold.core.interleave import SWITCHABLE_FIELDS
from nfold.core.variant import Variant
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import spec_for_plan

OFF = Variant(nccl_p2p=False)
HOST = machine(gpus=2, cores=2)


def test_the_variable_is_set_before_ranks_start(tmp_path: Path) -> None:
    folder = HandoffFolder(tmp_path)
    requested = plan(HOST, device="cuda", devices=2)
    assert spec_for_plan(folder, requested, 2, variant=OFF).environment["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_P2P_DISABLE" not in spec_for_plan(folder, requested, 2).environment
    assert "nccl_p2p" not in SWITCHABLE_FIELDS


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": "cpu"}, "gloo"),
        ({"devices": 1, "strategy": "single"}, "no other"),
        ({"strategy": "dp"}, "one process"),
        ({}, ""),
    ],
)
def test_a_refusal_has_a_reason(changes: dict[str, object], expected: str) -> None:
    requested = plan(HOST, **{"device": "cuda", "devices": 2, "strategy": "ddp", **changes})
    assert expected in (OFF.refusal(requested) or "")
    assert bool(OFF.refusal(requested)) == bool(expected)
