"""What windows say: rates, ratios by round, efficiency."""

from __future__ import annotations

from pathlib import Path

from fleet import Arm, Spec, Work
from results import aligned, efficiencies, efficiency, rates_of, ratio, table
from rounds import Window


def window(arm: str, number: int, seconds: float, *more: float, loss: float = 1.0) -> Window:
    """A thousand samples in so many seconds."""
    return Window(
        round=number,
        arm=arm,
        steps=10,
        samples=1000,
        seconds=(seconds, *more),
        loss=loss,
        peak_memory_bytes=2**30,
    )


def test_the_slowest_rank_decides_a_rate() -> None:
    windows = [window("a", 0, 1.0, 2.0), window("b", 0, 1.0), window("a", 1, 0.5, 0.4)]
    assert rates_of(windows, "a") == {0: 500.0, 1: 2000.0}


def test_ratios_are_formed_in_the_rounds_that_both_arms_finished() -> None:
    found = ratio({0: 10.0, 1: 30.0, 2: 8.0}, {0: 5.0, 2: 4.0, 3: 1.0})
    assert found is not None
    assert found.value == 2.0
    assert ratio({0: 1.0}, {1: 1.0}) is None


def test_efficiency_is_the_part_of_n_times_one_device() -> None:
    found = efficiency({0: 300.0, 1: 300.0}, {0: 100.0, 1: 100.0}, 4)
    assert found is not None
    assert (found.value, found.low, found.high) == (0.75, 0.75, 0.75)
    assert efficiency({}, {0: 1.0}, 4) is None


def test_efficiencies_need_one_device_and_several() -> None:
    one, two = [window("a", 0, 1.0)], [window("a", 0, 0.625)]
    assert efficiencies([(1, one), (2, two)], ["a"]) == "efficiency  2\na           0.800"
    assert efficiencies([(2, two)], ["a"]) == efficiencies([(1, one)], ["a"]) == ""


def test_the_table_tells_failures_and_losses_that_are_not_finite(tmp_path: Path) -> None:
    work = Work(workload="digits", batch=8)
    good, bad, wild = (
        Arm(Spec.parse(name), work, tmp_path) for name in ("careful", "jax", "plain")
    )
    bad.error = "exit status 1"
    windows = [window("careful", 0, 1.0), window("plain", 0, 2.0, loss=float("nan"))]
    lines = table([good, bad, wild], windows, ["careful"]).splitlines()
    assert lines[1].split() == ["careful", "1,000", "1.000", "1.00"]
    assert lines[2].endswith("failed: exit status 1")
    assert lines[3].split()[:3] == ["plain", "500", "0.500"]
    assert lines[3].endswith("its loss is not finite")


def test_columns_are_aligned() -> None:
    assert aligned([["a", "bb"], ["cc", "d"]]) == "a   bb\ncc  d"
    assert aligned([["only"]]) == "only"
