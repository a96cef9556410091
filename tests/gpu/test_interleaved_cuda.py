"""Interleaved variants of a workload in one run on two GPUs, also in CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from made import plan
from nfold import workloads
from nfold.core.measurement import Measurement
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.launch.launch_spec import RunOptions
from nfold.launch.workload_run import run, split_by_variant
from nfold.telemetry.machine_inspection import inspect_machine

HOST = inspect_machine()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.skipif(len(HOST.gpus) < 2, reason="needs two GPUs"),
]
STEPS = 40
MODULE = """
import numpy as np, torch, nfold
from torch import nn

DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(0, 256, (2000, 8, 8, 3), dtype=np.uint8)
LABELS = (IMAGES.mean((1, 2))).argmax(1)

def images():
    return nfold.Training(
        model=nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
                            nn.Linear(576, 3)),
        train=(IMAGES[:1750], LABELS[:1750]), test=(IMAGES[1750:], LABELS[1750:]),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
        augmentation=(("flip", 0),),
    )
"""
REAL, RESIDENT = Variant(), Variant(input="resident")
INPUTS = (REAL, Variant(input="replayed"), RESIDENT)
EXCHANGES = (
    RESIDENT,
    Variant(input="resident", exchange="none"),
    Variant(input="resident", exchange="barrier"),
)


def _run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *variants: Variant,
    held: Variant | None = None,
    **changes: Any,
) -> tuple[Measurement, list[Measurement]]:
    """A run of two GPUs, and what it says of each of its slots."""
    monkeypatch.chdir(folder)
    (folder / "turned_cuda.py").write_text(MODULE)
    workload = workloads.with_fingerprint(Workload.parse("turned_cuda:images"))
    fields = {"batch": 96, "steps": STEPS, "warmup_steps": 12, "workers": 1, "input": "loader"}
    requested = plan(HOST, **{"device": "cuda", "devices": 2, **fields, **changes})
    options = RunOptions(results=folder)
    whole = run(
        workload, requested, held, machine=HOST, options=options, interleaved_variants=variants
    )
    assert whole.status == "ok", whole.cause
    found = split_by_variant(whole, variants)
    for one in found:
        assert [sum(w.steps for w in rank.windows) for rank in one.ranks] == [STEPS] * 2
        assert [len(rank.step_ms) for rank in one.ranks] == [STEPS] * 2
    return whole, found


def _kinds(found: Measurement) -> set[str]:
    return {caveat.kind for caveat in found.warnings}


@pytest.mark.parametrize(
    ("step", "strategy"),
    [("eager", "ddp"), ("eager", "nfold"), ("captured", "nfold"), ("compiled+captured", "nfold")],
)
def test_every_exchange_has_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, strategy: str
) -> None:
    """Ranks agree before the first slot; what follows has steps of every kind on both GPUs."""
    whole, found = _run(
        tmp_path, monkeypatch, REAL, *EXCHANGES, step=step, strategy=strategy, precision="bf16"
    )
    assert {one.folder for one in found} == {whole.folder}
    assert not {"parameters_differ", "same_samples"} & set().union(*map(_kinds, found))
    assert len({rank.parameter_checksum for rank in whole.ranks}) == 1
    for rank in whole.ranks:
        assert ((rank.graph_bytes or 0) > 0) == ("captured" in step)
        assert (rank.data_bytes or 0) > 0


@pytest.mark.parametrize("step", ["eager", "captured", "compiled+captured"])
def test_weights_are_equal_at_the_end_where_every_slot_exchanges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    whole, _ = _run(tmp_path, monkeypatch, *INPUTS, step=step, strategy="nfold")
    assert len({rank.parameter_checksum for rank in whole.ranks}) == 1


@pytest.mark.parametrize("step", ["eager", "captured"])
def test_synchronised_batch_norm_has_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    own = Variant(synchronised_batch_norm=False)
    one_device = own.merge(EXCHANGES[1])
    whole, found = _run(
        tmp_path, monkeypatch, REAL, own, one_device, step=step, batch_norm="synchronised"
    )
    assert len({rank.parameter_checksum for rank in whole.ranks}) == 1
    assert not set().union(*map(_kinds, found)) & {"parameters_differ"}
    # Gradients are exchanged in every slot here, whatever statistics are.
    exchanging, _ = _run(tmp_path, monkeypatch, REAL, own, step=step, batch_norm="synchronised")
    assert len({rank.parameter_checksum for rank in exchanging.ranks}) == 1


def test_replicas_wait_for_each_other_between_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Variant(independent=True)
    variants = (held.merge(one) for one in INPUTS)
    whole, _ = _run(tmp_path, monkeypatch, *variants, held=held, step="captured", strategy="nfold")
    assert [rank.rank for rank in whole.ranks] == [0, 1]
    assert all(set(rank.slots) == {0, 1, 2} for rank in whole.ranks)
