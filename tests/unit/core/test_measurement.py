"""Measurements: through JSON and back with every field, and what a cell is."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest

from made import machine, plan
from nfold.core.machine import GpuInfo, GpuLink, Machine
from nfold.core.measurement import (
    INTERRUPTED_STATUSES,
    STATUSES,
    Caveat,
    Epoch,
    EpochGap,
    FailureCause,
    FetchStats,
    HostGapLocation,
    Measurement,
    OperationPart,
    ParameterPart,
    ParameterState,
    RankSamples,
    Window,
    cell_id,
)
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from timed import timed

HOST = Machine(
    cpu="CPU",
    cores=4,
    memory_bytes=2**34,
    shm_bytes=2**26,
    os="Linux",
    python="3.11",
    driver="570",
    gpus=(GpuInfo(index=0, name="GPU", memory_bytes=2**34, uuid="u", pcie="gen5 x16"),),
    links=(GpuLink(first=0, second=1, kind="nvlink", detail="NV18"),),
    versions={"torch": "2.13.0"},
    limits={"open files": "1024"},
)
FETCHES = FetchStats(batches=5, seconds=0.75, waited_s=0.5, read_bytes=2**13, disk_bytes=2**12)
RANK = RankSamples(
    rank=1,
    device="cuda:1",
    first_step_ms=850.5,
    warmup_steps=10,
    windows=(
        Window(
            start_s=1.5,
            seconds=0.25,
            steps=5,
            samples=80,
            first_step=10,
            fetches=FETCHES,
            epoch_gap=EpochGap(seconds=0.5, steps=9, waited_s=0.25),
            queue_drain_s=0.125,
            exchange_wait_s=0.375,
            batch_indices=(0, 1, 2, 0, 1),
            clock_mhz=1755.0,
            throttle_reason="at its power limit",
        ),
    ),
    step_ms=(49.5, 50.25),
    host_gaps_ms=(0.25, 21.5),
    host_gap_locations=(
        HostGapLocation(
            kind="between passes", location="train.py:9", seconds=0.5, callee="evaluate()"
        ),
    ),
    epoch_starts=(9, 18),
    slots=(1, 0),
    epochs=(Epoch(seconds=2.5, samples=1437, train_loss=0.75, accuracy=0.9),),
    losses=((10, 2.25), (20, 1.5)),
    parts=(
        OperationPart(
            name="copy", seconds=(0.5, 0.25), images=840, bytes=4, baseline=True, note="pinned"
        ),
    ),
    peak_memory_bytes=2**20,
    data_bytes=2**10,
    reserved_memory_bytes=2**31,
    graph_bytes=2**12,
    sample_hashes=((80, "00ff"),),
    parameter_checksum="abcd",
    parameter_sample=(0.5, -1e-9),
    parameter_states=(
        ParameterState(
            step=50,
            parts=(ParameterPart(name="head", checksum="ab", sample=(0.5,), trained_from=12),),
        ),
    ),
    batch_hashes=("0f", "1e"),
    input_hashes=("2d", "3c"),
    generator_states=("4b", "5a"),
    indexed_samples=((3, 77),),
    sampler_epochs=(0, 1),
    batches_per_epoch=28,
    skipped_batches=2,
    left_at="train.py:9",
    parameter_count=8490,
    caveats=(("few_windows", "only one"),),
)
FULL = Measurement(
    id="0123-0-abcdef",
    workload=Workload.parse("wide_resnet:depth=10,width=1"),
    plan=plan(machine(cores=4), devices=2, seed=7, precision="bf16"),
    machine=HOST,
    status="oom",
    variant=Variant(
        input="replayed",
        exchange="barrier",
        independent=True,
        device=1,
        augmentation=False,
        synchronised_batch_norm=False,
        captured=True,
        threads=3,
        pinned=False,
        devices=(1, 0),
        data_shares=(1, 0),
        broadcast_buffers=False,
        host_syncs=False,
        anomaly_detection=False,
        exchange_each_micro_batch=False,
        find_unused_parameters=False,
        expandable_segments=True,
        channels_last=True,
        compiled="default",
        exchange_after_backward=True,
        profiler_steps=True,
        batches_per_epoch=7,
    ),
    repeat=3,
    cause=FailureCause(text="no room", rank=1, step=5, signal=9, stalled_s=1.5, out_of_step=True),
    ranks=(RANK,),
    energy_joules=12.5,
    warnings=(Caveat(kind="throttled", text="GPU 0 was throttled", value=0.9),),
    started_at="2026-11-21T06:00:00+00:00",
    wall_seconds=61.5,
    folder="measurements/0123-0-abcdef",
)


def through_json(measurement: Measurement) -> Measurement:
    return Measurement.from_dict(json.loads(json.dumps(measurement.to_dict())))


OWN = dataclasses.replace(
    FULL,
    workload=Workload(
        name="a:b", parameters=(("c", 1),), code="0a", imports="0c", variables=(("OMP_X", "1"),)
    ),
)
SCRIPT = dataclasses.replace(
    FULL,
    workload=dataclasses.replace(OWN.workload, name="b.py", script=("b.py", "--lr", "1")),
)


def test_every_field_survives_json() -> None:
    assert through_json(FULL) == FULL
    assert through_json(OWN) == OWN
    assert through_json(SCRIPT) == SCRIPT


def test_a_workload_that_an_older_nfold_wrote_has_no_code() -> None:
    older = FULL.to_dict()
    for name in ("code", "imports", "variables"):
        del older["workload"][name]
    assert Measurement.from_dict(older) == FULL


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"code": "0b"}, False),
        ({"imports": "0b"}, True),
        ({"imports": ""}, True),
        ({"variables": (("OMP_X", "2"),)}, True),
        ({"variables": (("OMP_X", "1"), ("OMP_Y", "1"))}, True),
        ({"variables": ()}, True),
    ],
)
def test_code_imports_and_variables_make_another_cell(changes: dict[str, Any], kept: bool) -> None:
    other = dataclasses.replace(OWN, workload=dataclasses.replace(OWN.workload, **changes))
    assert str(other.workload) == str(OWN.workload) == "a:b:c=1"
    assert other.cell != OWN.cell
    assert (other.checkpoint_id == OWN.checkpoint_id) == kept


def test_this_test_gives_every_field_a_value_of_its_own() -> None:
    """A new field must be added to FULL, or its round trip is not tested."""
    for value in _values(SCRIPT):
        for field in dataclasses.fields(value):
            if field.default is not dataclasses.MISSING and not isinstance(value, type(FULL.plan)):
                assert getattr(value, field.name) != field.default, (type(value), field.name)


def _values(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        inner = [_values(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return [value, *(item for items in inner for item in items)]
    if isinstance(value, tuple):
        return [item for entry in value for item in _values(entry)]
    return []


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_survives_and_decides_whether_a_rerun_skips_it(status: str) -> None:
    measurement = dataclasses.replace(FULL, status=status)  # type: ignore[arg-type]  # each one
    assert through_json(measurement) == measurement
    assert measurement.is_final == (status not in ("interrupted", "killed"))


def test_the_unfinished_are_statuses() -> None:
    assert set(INTERRUPTED_STATUSES) < set(STATUSES)


def test_an_unknown_status_or_entry_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Measurement.status: 'fine' is not one of ok, oom"):
        Measurement.from_dict({**FULL.to_dict(), "status": "fine"})
    with pytest.raises(ValueError, match="unknown entries"):
        Measurement.from_dict({**FULL.to_dict(), "mood": "fine"})
    wrong = {**FULL.to_dict(), "ranks": [{"rank": "1", "device": "cpu:0"}]}
    with pytest.raises(ValueError, match=r"Measurement.ranks\[0\].rank: '1'"):
        Measurement.from_dict(wrong)


def test_repeats_share_a_cell_and_results_do_not_matter_to_it() -> None:
    other = timed([2.0], repeat=4, status="crashed", started_at="later", id="other")
    assert timed([1.0]).cell == other.cell


@pytest.mark.parametrize(
    "change",
    [
        {"workload": "mnist"},
        {"workload": "digits:width=2"},
        {"batch": 32},
        {"seed": 1},
        {"cores": 4},
        {"machine": machine(gpus=1)},
    ],
)
def test_another_question_is_another_cell(change: dict[str, Any]) -> None:
    assert timed(**change).cell != timed().cell


def test_no_variant_equals_the_default_variant() -> None:
    requested = FULL.workload, FULL.plan
    assert cell_id(*requested, None, HOST) == cell_id(*requested, Variant(), HOST)


def test_the_cell_id_is_pinned() -> None:
    """A store written today must be found by tomorrow's nfold."""
    assert dataclasses.replace(FULL, variant=Variant()).cell == "574fec7b11"
    variant = typing.cast(Variant, FULL.variant).without(
        "broadcast_buffers",
        "host_syncs",
        "exchange_each_micro_batch",
        "expandable_segments",
        "exchange_after_backward",
        "profiler_steps",
        "batches_per_epoch",
        "find_unused_parameters",
        "channels_last",
        "compiled",
        "anomaly_detection",
    )
    assert dataclasses.replace(FULL, variant=variant).cell == "5d0e0369be"


def test_statuses_are_the_literal() -> None:
    hints = typing.get_type_hints(Measurement)
    assert typing.get_args(hints["status"]) == STATUSES
