"""Every variant in real processes on CPU devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nfold import data
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.launch.workload_run import run, split_by_variant
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.workloads import info
from warm_runs import warm_options

pytestmark = pytest.mark.integration
DIGITS = Workload.parse("digits:samples=96")
CHECKPOINT = "checkpoint"
NO_EXCHANGE = Variant(exchange="none")


def _measured(
    tmp_path: Path,
    variant: Variant | None,
    variants: tuple[Variant, ...] = (),
    **changes: Any,
) -> Measurement:
    host = inspect_machine()
    if host.cores < 2:
        pytest.skip("two CPU devices need two cores")
    data.prepare("digits", None)
    requested = {"device": "cpu", "devices": 2, "batch": 32, "steps": 6, "warmup_steps": 1}
    plan = Plan(**{**requested, **changes}).resolve(host, info("digits").defaults)
    options = warm_options(tmp_path, checkpoint_folder=tmp_path / CHECKPOINT)
    return run(DIGITS, plan, variant, machine=host, options=options, interleaved_variants=variants)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "nfold"])
@pytest.mark.parametrize("exchange", ["none", "barrier"])
def test_without_gradients_the_ranks_part_without_an_error(
    tmp_path: Path, strategy: str, exchange: Any
) -> None:
    variant = Variant(input="replayed", exchange=exchange)
    found = _measured(tmp_path, variant, strategy=strategy)
    assert found.status == "ok", found.cause
    assert found.variant == variant
    assert len({rank.parameter_checksum for rank in found.ranks}) == 2
    assert not {"parameters_differ", "same_samples"} & {d.kind for d in found.warnings}
    assert [sum(w.samples for w in rank.windows) for rank in found.ranks] == [96, 96]


def test_independent_copies_are_two_trainings_of_one_device(tmp_path: Path) -> None:
    found = _measured(tmp_path, Variant(independent=True), epochs=1, steps=None)
    assert found.status == "ok", found.cause
    assert [rank.rank for rank in found.ranks] == [0, 1]
    # Each goes through all of the data, a share of the batch at a time.
    assert [rank.sample_hashes[0][0] for rank in found.ranks] == [96, 96]
    assert not {"same_samples"} & {caveat.kind for caveat in found.warnings}
    assert not (tmp_path / CHECKPOINT).exists()


@pytest.mark.slow
def test_ranks_change_devices_and_shares(tmp_path: Path) -> None:
    usual = _measured(tmp_path, None)
    turned = _measured(tmp_path, Variant(data_shares=(1, 0), devices=(1, 0)))
    assert turned.status == "ok", turned.cause
    hashes = [rank.sample_hashes[0] for rank in usual.ranks]
    assert [rank.sample_hashes[0] for rank in turned.ranks] == hashes[::-1]
    sums = {rank.parameter_checksum for rank in turned.ranks}
    assert len(sums) == 1


def test_a_single_device_may_be_any(tmp_path: Path) -> None:
    requested: dict[str, Any] = {"devices": 1, "cores_per_device": 1, "batch": 16}
    variant = Variant(device=1, input="resident", threads=1)
    found = _measured(tmp_path, variant, **requested)
    assert found.status == "ok", found.cause
    assert found.ranks[0].rank == 0
    unpinned = _measured(tmp_path, Variant(pinned=False), **requested)
    assert unpinned.status == "ok", unpinned.cause
    refused = _measured(tmp_path, Variant(captured=True), **requested)
    assert refused.status == "unsupported"
    assert refused.cause is not None
    assert "needs a GPU" in refused.cause.text


@pytest.mark.parametrize(
    ("held", "changes"),
    [
        (Variant(), {"strategy": "nfold", "workers": 1}),
        pytest.param(Variant(), {"strategy": "ddp", "accumulate": 2}, marks=pytest.mark.slow),
        (Variant(independent=True), {}),
    ],
    ids=str,
)
def test_variants_are_interleaved_in_one_run(tmp_path: Path, held: Variant, changes: Any) -> None:
    replayed = Variant(input="replayed")
    one_device, barrier = replayed.merge(NO_EXCHANGE), replayed.merge(Variant(exchange="barrier"))
    requested = (Variant(), replayed) if held else (Variant(), replayed, one_device, barrier)
    variants = tuple(held.merge(one) for one in requested)
    whole = _measured(tmp_path, held or None, variants=variants, steps=8, **changes)
    assert whole.status == "ok", whole.cause
    assert [rank.rank for rank in whole.ranks] == [0, 1]
    for one, variant in zip(split_by_variant(whole, variants), variants, strict=True):
        assert (one.variant or Variant()) == variant
        assert [sum(w.steps for w in rank.windows) for rank in one.ranks] == [8, 8]
        assert not {"parameters_differ", "same_samples"} & {d.kind for d in one.warnings}
    assert len({rank.parameter_checksum for rank in whole.ranks}) == 1
