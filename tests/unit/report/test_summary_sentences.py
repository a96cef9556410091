from __future__ import annotations

import measured
import measured_grids
from nfold.analysis.cells import group_cells
from nfold.analysis.comparison import compute_results
from nfold.analysis.part_timings import part_timings
from nfold.analysis.sections import headline_sentences
from nfold.core.measurement import FailureCause, Measurement
from nfold.report import tables


def said(*made: Measurement) -> str:
    found = compute_results(group_cells(made))
    return " ".join(headline_sentences(found, part_timings(found)))


def test_the_speedup_is_said_first_with_its_interval_and_its_batch() -> None:
    text = said(
        measured.measurement(noise=0.0), measured.measurement(rate=1830, noise=0, devices=2)
    )
    assert text.startswith("2 devices are 1.83× as fast as one (1.83–1.83, 9")
    assert text.endswith(" % efficiency) at batch 128.")


def test_caveats_of_a_comparison_follow_the_efficiency() -> None:
    one = measured.measurement(noise=0, workers=0)
    two = measured.measurement(rate=3040, noise=0, devices=2, workers=4)
    text = said(one, two)
    assert "152 % efficiency; 4 loader workers per device against 0 on one device" in text
    assert "over 100 %" in text
    heads, rows = tables.flatten_table(tables.build_table(compute_results(group_cells([one, two]))))
    assert dict(zip(heads, rows[1], strict=True))["efficiency"].endswith("²")


def test_the_worst_batch_is_said_too() -> None:
    text = said(
        measured.measurement(batch=128, rate=1000),
        measured.measurement(batch=2048, rate=1000),
        measured.measurement(batch=128, rate=1100, devices=4),
        measured.measurement(batch=2048, rate=3700, devices=4),
        measured.measurement(batch=2048, rate=1990, devices=2),
    )
    assert text.startswith("4 devices are 3.")
    assert "at batch 2048, and 1.1" in text
    assert text.endswith("× at batch 128.")


def test_slower_than_one_is_said_in_words() -> None:
    text = said(measured.measurement(rate=1000), measured.measurement(rate=750, devices=2))
    assert text.startswith("2 devices are slower than one: 0.7")


def test_same_batch_scaling_is_not_mixed_with_weak_scaling() -> None:
    made = [
        measured.measurement(batch=64, rate=1000),
        measured.measurement(batch=64, rate=1500, devices=2),
        measured.measurement(batch=128, rate=1990, devices=2),
    ]
    assert "1.5" in said(*made)
    assert "1.9" not in said(*made)
    assert "at its share of the batch" in said(made[0], made[2])


def test_without_a_baseline_the_fastest_is_said() -> None:
    text = said(
        measured.measurement(rate=1000, noise=0, devices=2),
        measured.measurement(rate=2000, noise=0, devices=4),
    )
    assert text == "The fastest: 2,000 images/s on 4 devices at batch 128."


def test_failures_are_counted() -> None:
    oom = measured.measurement(status="oom", cause=FailureCause(text="full"), ranks=(), batch=4096)
    hung = measured.measurement(status="hung", ranks=(), batch=512)
    assert said(measured.measurement(), oom, hung).endswith(
        "2 of 3 cells have no result: 1 out of memory and 1 hung."
    )
    assert said(oom).startswith("No measurement ran to its end. 1 of 1 cell has no result")


def test_an_operation_is_compared_with_its_peers() -> None:
    text = said(*measured_grids.operation_grid())
    assert "End to end, pinned on 4 devices: 0.4" in text
    assert "× as fast as torch on the CPU, 64 cores" in text
