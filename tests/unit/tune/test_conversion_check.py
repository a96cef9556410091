"""What makes a converted script another training than the original, and what does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nfold.core.measurement import Measurement
from nfold.tune.conversion.conversion_check import ConversionCheck, samples_per_step
from nfold.tune.runs.losses import sample_hash
from timed import rank, timed

LOSSES = tuple((step, 2.0 - step / 20) for step in range(1, 21))


def run(devices: int, *, batch: int = 64, **changes: Any) -> Measurement:
    """Return a run of equal shares of a batch; the samples of a warm-up have a sum of hashes."""
    share = batch // devices
    digests = {1: ["a"], 2: ["4", "6"]}[devices]
    ranks = []
    for number in range(devices):
        found = rank(
            number,
            [1.0, 1.0],
            sample_hashes=((share, digests[number]),),
            losses=LOSSES,
            batches_per_epoch=10,
        )
        windows = (dataclasses.replace(w, samples=w.steps * share) for w in found.windows)
        ranks.append(dataclasses.replace(found, windows=tuple(windows), **changes))
    return dataclasses.replace(timed(), ranks=tuple(ranks))


def check(all_devices: Measurement, *, is_ordered: bool = True, **changes: Any) -> ConversionCheck:
    runs = {"original": run(1), "one_device": run(1), "all_devices": all_devices, **changes}
    return ConversionCheck(**runs, is_ordered=is_ordered)


def scaled_losses(factor: float) -> tuple[tuple[int, float], ...]:
    return tuple((step, factor * loss) for step, loss in LOSSES)


def test_equal_samples_and_losses() -> None:
    assert samples_per_step(run(2)) == 64
    assert sample_hash(run(2)) == sample_hash(run(1)) == 10
    found = check(run(2))
    assert found.objection() is None
    assert found.summary == "first 20 losses differ by 0 of the largest on 1 device and by 0 on 2"


def test_a_smaller_last_batch_may_not_be_observed() -> None:
    assert check(run(2, batch=66, sample_hashes=())).objection() is None


def test_losses_of_another_order_are_compared_by_their_mean() -> None:
    found = check(run(2), is_ordered=False)
    assert found.objection() is None
    assert found.summary == "means of losses compared: the samples come in another order"


def test_losses_that_differ_on_all_devices_only() -> None:
    found = check(run(2, losses=scaled_losses(0.95)))
    assert found.objection() is None
    assert found.summary == (
        "first 20 losses differ by 0 of the largest on 1 device and by 0.05 on 2; their means agree"
    )


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({"batch": 128}, "on 2 devices a step has 128 samples in place of 64"),
        ({"batches_per_epoch": 20}, "on 2 devices a pass has 20 steps in place of 10"),
        ({"sample_hashes": ((32, "1"),)}, "on 2 devices the first steps have other samples"),
        ({"losses": scaled_losses(0.5)}, "on 2 devices its mean loss differs by -50 %"),
        ({"losses": ()}, "on 2 devices has no losses that are known"),
    ],
)
def test_another_training(changes: dict[str, Any], objection: str) -> None:
    assert check(run(2, **changes)).objection() == objection


def test_an_original_without_losses_is_compared_by_its_samples() -> None:
    found = check(run(2, losses=()), original=run(1, losses=()), one_device=run(1, losses=()))
    assert found.objection() is None
    assert found.summary.startswith("losses were not compared")
