from __future__ import annotations

import dataclasses

import pytest

import measured
import measured_grids
from nfold.analysis.cells import group_cells
from nfold.analysis.comparison import compute_results
from nfold.analysis.part_timings import PartTiming, part_timings
from nfold.core.measurement import Measurement, OperationPart, RankSamples
from nfold.report import tables


def timings(*made: Measurement) -> list[PartTiming]:
    return part_timings(compute_results(group_cells(made)))


def one(
    *found: OperationPart, devices: int = 1, other: tuple[OperationPart, ...] = ()
) -> Measurement:
    ranks = [RankSamples(rank=0, device="cuda:0", parts=found)]
    if other:
        ranks.append(RankSamples(rank=1, device="cuda:1", parts=other))
    return measured.measurement(
        workload="conv2d", devices=devices, batch=840, steps=30, ranks=tuple(ranks)
    )


def exact(name: str, *ms: float, **more: object) -> OperationPart:
    part = measured.part(name, 1.0)
    return dataclasses.replace(part, seconds=tuple(value / 1e3 for value in ms), **more)  # type: ignore[arg-type]  # fields of Part


def test_a_call_takes_as_long_as_on_its_slowest_rank() -> None:
    made = one(exact("copy", 1, 5, 1), devices=2, other=(exact("copy", 3, 2, 3),))
    (timing,) = timings(made)
    assert timing.ms.value == pytest.approx(3.0)


def test_bytes_become_a_rate_and_a_first_call_has_none() -> None:
    first, copy = timings(
        one(exact("first call", 900, bytes=10**9), exact("copy", 2, 2, bytes=10**8))
    )
    assert first.bytes_per_s is None
    assert copy.bytes_per_s == pytest.approx(5e10)


def test_a_baseline_on_fewer_images_is_scaled_up_and_says_so() -> None:
    part = exact("scipy", 10, 10, images=84, baseline=True, note="on 84 of 840 images")
    (timing,) = timings(one(part))
    assert timing.ms.value == pytest.approx(100)
    assert timing.notes == ("on 84 of 840 images, scaled up to the batch",)
    assert timing.bytes_per_s is None


def test_parts_go_down_and_devices_across_with_baselines_once() -> None:
    made = tables.parts_table(timings(*measured_grids.operation_grid((1, 2))))
    assert made is not None
    heads, rows = tables.flatten_parts_table(made)
    assert heads == ["part [ms]", "1 device", "2 devices"]
    names = [row[0] for row in rows]
    assert names[0] == "first call"
    assert names[-3:] == [
        "scipy.signal.convolve2d, 1 core",
        "scipy.ndimage.convolve, 1 core",
        "torch on the CPU, 64 cores",
    ]
    assert rows[1][1].endswith("GB/s")
    assert rows[-1][1].endswith("²")
    assert rows[-1][2] == ""
    assert made.notes == ("with 1 warm-up", "on 420 of 840 images, scaled up to the batch")


def test_a_part_that_a_cell_does_not_have_is_a_dash() -> None:
    made = tables.parts_table(
        timings(one(exact("copy", 1), exact("only here", 1)), one(exact("copy", 1), devices=2))
    )
    assert made is not None
    _, rows = tables.flatten_parts_table(made, compact=True)
    assert rows[1] == ["only here", "1.00", "–"]


def test_training_has_no_parts() -> None:
    assert tables.parts_table(timings(measured.measurement())) is None


def test_cells_on_as_many_devices_are_not_mixed() -> None:
    made = [
        measured.measurement(
            workload="conv2d",
            devices=1,
            batch=840,
            steps=30,
            framework=framework,
            ranks=(RankSamples(rank=0, device="0", parts=(exact("copy only", ms, ms),)),),
        )
        for framework, ms in (("tensorflow", 2.0), ("jax", 6.0))
    ]
    found = {timing.column: timing.ms.value for timing in timings(*made)}
    assert sorted(found.values()) == pytest.approx([2.0, 6.0])
    assert all(any(name in column for column in found) for name in ("tensorflow", "jax"))
