"""Variables of NCCL in the environment of new processes, and where they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from made import machine, plan
from nfold.core.interleave import SWITCHABLE_FIELDS
from nfold.core.script_profile import ScriptProfile
from nfold.core.variant import Variant
from nfold.interventions.communication.nccl_variable import NcclVariable
from nfold.interventions.registry import REGISTRY
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import spec_for_plan

HOST = machine(gpus=2, cores=2)
EXPECTED = [
    (Variant(nccl_p2p=False), "NCCL_P2P_DISABLE", "1"),
    (Variant(nccl_shared_memory_off=True), "NCCL_SHM_DISABLE", "1"),
    (Variant(nccl_algorithm="Ring"), "NCCL_ALGO", "allreduce:ring"),
    (Variant(nccl_algorithm="Tree"), "NCCL_ALGO", "allreduce:tree"),
    (Variant(nccl_protocol="LL"), "NCCL_PROTO", "LL"),
    (Variant(nccl_protocol="Simple"), "NCCL_PROTO", "Simple"),
]


def test_every_variable_is_tested() -> None:
    names = {name for name, each in REGISTRY.items() if isinstance(each, NcclVariable)}
    assert names == {name for variant, _, _ in EXPECTED for name in vars(variant)}


@pytest.mark.parametrize(("variant", "name", "text"), EXPECTED)
def test_the_variable_is_set_before_ranks_start(
    tmp_path: Path, variant: Variant, name: str, text: str
) -> None:
    folder = HandoffFolder(tmp_path)
    requested = plan(HOST, device="cuda", devices=2)
    assert spec_for_plan(folder, requested, 2, variant=variant).environment[name] == text
    assert name not in spec_for_plan(folder, requested, 2).environment
    assert vars(variant).keys().isdisjoint(SWITCHABLE_FIELDS)
    ((intervention, value),) = variant.interventions()
    assert intervention.label(value) == f"{name}={text}"


@pytest.mark.parametrize("variant", [variant for variant, _, _ in EXPECTED])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": "cpu"}, "gloo"),
        ({"devices": 1, "strategy": "single"}, "no other"),
        ({"strategy": "dp"}, "one process"),
        ({}, ""),
    ],
)
def test_a_refusal_has_a_reason(
    variant: Variant, changes: dict[str, object], expected: str
) -> None:
    requested = plan(HOST, **{"device": "cuda", "devices": 2, "strategy": "ddp", **changes})
    assert expected in (variant.refusal(requested) or "")
    assert bool(variant.refusal(requested)) == bool(expected)


@pytest.mark.parametrize(("backend", "useful"), [("nccl", True), ("gloo", False)])
def test_they_are_useful_where_nccl_communicates(backend: str, *, useful: bool) -> None:
    profile = ScriptProfile(backend=backend)
    for variant, _, _ in EXPECTED:
        ((intervention, _),) = variant.interventions()
        assert intervention.is_useful(profile) == useful


def test_all_values_but_the_default_are_tried() -> None:
    requested = plan(HOST, device="cuda", devices=2)
    for each in (Variant.nccl_algorithm, Variant.nccl_protocol):
        tried = each.values_to_try(ScriptProfile(), requested, 2)
        assert {*tried, each.default} == set(get_args(each.value_type))
