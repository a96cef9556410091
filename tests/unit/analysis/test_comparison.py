"""Speedup: which cell is a baseline of which, and the ratio with its interval."""

from __future__ import annotations

from typing import Any

import pytest

from made import machine
from nfold.analysis.cells import Cell, group_cells
from nfold.analysis.comparison import compare_all, compare_with_baseline
from nfold.core.measurement import Measurement
from nfold.core.stats import Interval
from timed import timed

GPUS: dict[str, Any] = {"device": "cuda", "gpus": 4, "cores": 64, "workers": 2}


def cell(*measurements: Measurement) -> Cell:
    return Cell(measurements=measurements)


def on_gpus(devices: int, batch: int = 64, **more: Any) -> Measurement:
    """A GPU run in which every device takes 1 s for its 100 samples."""
    seconds = [[1.0] for _ in range(devices)]
    return timed(*seconds, devices=devices, batch=batch, **{**GPUS, **more})


def test_the_same_global_batch_is_strong_scaling() -> None:
    (found,) = compare_all([cell(on_gpus(1)), cell(on_gpus(4)), cell(on_gpus(1, batch=16))])
    assert found.scaling == "strong"
    assert found.baseline.first.plan.batch == 64
    assert found.speedup == Interval(4.0)
    assert found.efficiency == Interval(1.0)


def test_the_same_batch_per_device_is_weak_scaling() -> None:
    found = compare_all([cell(on_gpus(1, batch=16)), cell(on_gpus(2, 32)), cell(on_gpus(4, 64))])
    assert [(c.scaling, c.cell.first.plan.devices) for c in found] == [("weak", 2), ("weak", 4)]
    assert found[1].speedup.value == 4.0


def test_a_batch_that_does_not_divide_has_no_weak_baseline() -> None:
    assert compare_with_baseline(cell(on_gpus(4, batch=66)), [cell(on_gpus(1, batch=16))]) is None


def test_one_device_is_compared_with_nothing() -> None:
    assert compare_all([cell(on_gpus(1)), cell(on_gpus(1, batch=32))]) == []


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "bf16", "layout": "channels_first"},
        {"layout": "channels_last"},
        {"seed": 1},
        {"epochs": 2},
        {"input": "resident"},
        {"workload": "mnist"},
        {"device": "cpu"},
        {"machine": machine(gpus=8, cores=64)},
    ],
)
def test_another_plan_workload_or_machine_is_no_baseline(change: dict[str, Any]) -> None:
    assert compare_with_baseline(cell(on_gpus(4)), [cell(on_gpus(1, **change))]) is None


def test_device_dependent_fields_may_differ() -> None:
    """One device runs ``single`` with all cores; several run ddp or dp with a share each."""
    baseline = cell(on_gpus(1, workers=8))
    for strategy in ("ddp", "dp"):
        assert compare_with_baseline(cell(on_gpus(4, strategy=strategy)), [baseline]) is not None


def test_cpu_devices_compare_only_at_the_same_share() -> None:
    def on_cpu(devices: int, share: int) -> Cell:
        times = [[1.0] for _ in range(devices)]
        return cell(timed(*times, devices=devices, cores=4, cores_per_device=share))

    two = on_cpu(2, share=2)
    assert compare_with_baseline(two, [on_cpu(1, share=4)]) is None
    found = compare_with_baseline(two, [on_cpu(1, share=4), on_cpu(1, share=2)])
    assert found is not None
    assert found.baseline.first.plan.cores_per_device == 2
    assert found.speedup.value == 2.0


def test_untimed_cells_are_not_compared() -> None:
    whole, failed = cell(on_gpus(4)), cell(on_gpus(4, status="oom"))
    assert compare_with_baseline(failed, [cell(on_gpus(1))]) is None
    assert compare_with_baseline(whole, [cell(on_gpus(1, status="crashed"))]) is None
    assert compare_with_baseline(cell(timed(devices=4, **GPUS)), [cell(on_gpus(1))]) is None


def test_windows_give_the_speedup_an_interval() -> None:
    one = timed([1.0, 1.1, 1.2, 1.0], devices=1, **GPUS)
    two = timed([1.0, 1.2, 1.1, 1.0], [1.1, 1.0, 1.0, 1.0], devices=2, **GPUS)
    (found,) = compare_all(group_cells([one, two]))
    speedup, efficiency = found.speedup, found.efficiency
    assert speedup.low is not None
    assert speedup.high is not None
    assert speedup.low < speedup.value < speedup.high
    assert efficiency == Interval(speedup.value / 2, speedup.low / 2, speedup.high / 2)


def repeats(times: dict[int, float], **more: Any) -> Cell:
    """One window per repeat: repeat → seconds, in the order given."""
    made = [timed([s], repeat=repeat, **{**GPUS, **more}) for repeat, s in times.items()]
    return cell(*made)


def test_repeats_are_paired_so_that_a_shared_drift_cancels() -> None:
    one = repeats({0: 1.0, 1: 2.0, 2: 4.0}, devices=1)
    two = repeats({0: 0.5, 1: 1.0, 2: 2.0}, devices=2)
    found = compare_with_baseline(two, [one])
    assert found is not None
    assert found.speedup == Interval(2.0, 2.0, 2.0)


def test_a_repeat_is_paired_with_its_own_neighbour() -> None:
    """A failed repeat and a rerun later must not shift the pairs: in each the ratio is 2."""
    one = repeats({1: 2.0, 2: 4.0, 3: 8.0, 0: 1.0}, devices=1)
    two = repeats({0: 0.5, 2: 2.0, 3: 4.0}, devices=2)
    found = compare_with_baseline(two, [one])
    assert found is not None
    assert found.speedup == Interval(2.0, 2.0, 2.0)


def test_json_names_both_and_gives_both_ratios() -> None:
    one, two = on_gpus(1, id="one"), on_gpus(2, id="two")
    (found,) = compare_all(group_cells([one, two]))
    assert found.to_json() == {
        "baseline": "one",
        "id": "two",
        "scaling": "strong",
        "speedup": {"value": 2.0, "low": None, "high": None},
        "efficiency": {"value": 1.0, "low": None, "high": None},
        "warnings": [],
    }


def on_cpus(devices: int, workers: int, seconds: float) -> Cell:
    times = [[seconds] for _ in range(devices)]
    return cell(timed(*times, devices=devices, cores=8, cores_per_device=4, workers=workers))


def caveats(found: Cell, *among: Cell) -> list[str]:
    comparison = compare_with_baseline(found, among)
    assert comparison is not None
    return [caveat.kind for caveat in comparison.caveats]


def test_a_baseline_with_the_same_workers_is_preferred() -> None:
    two, other, same = on_cpus(2, 4, 1.0), on_cpus(1, 0, 1.52), on_cpus(1, 4, 1.0)
    comparison = compare_with_baseline(two, [other, same])
    assert comparison is not None
    assert comparison.baseline is same
    assert comparison.caveats == ()


def test_different_workers_and_superlinear_speedup_are_caveats() -> None:
    two = on_cpus(2, 4, 1.0)
    assert caveats(two, on_cpus(1, 0, 1.52)) == ["different_workers", "superlinear"]
    assert caveats(two, on_cpus(1, 4, 1.52)) == ["superlinear"]
    assert caveats(two, on_cpus(1, 0, 0.9)) == ["different_workers"]


def test_workers_do_not_matter_without_a_loader() -> None:
    two, one = on_gpus(2, input="resident"), on_gpus(1, input="resident", workers=0)
    assert caveats(cell(two), cell(one)) == []
