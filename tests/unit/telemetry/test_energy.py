from __future__ import annotations

import pytest

from nfold.telemetry.evaluation import (
    column_points,
    energy_from_counter,
    energy_from_power,
    gpu_energy_joules,
    interpolate,
)
from nfold.telemetry.telemetry_csv import TelemetryRow


def _rows(**of_columns: list[float | None]) -> list[TelemetryRow]:
    """Rows at 0, 1, 2, ... seconds."""
    length = len(next(iter(of_columns.values())))
    return [
        {"monotonic_s": float(t), **{name: values[t] for name, values in of_columns.items()}}
        for t in range(length)
    ]


def test_the_counter_s_growth_interpolated_at_both_ends() -> None:
    counter = [(0.0, 1000.0), (1.0, 1100.0), (2.0, 1400.0)]
    assert energy_from_counter(counter, 0.5, 1.5) == pytest.approx(200)
    assert energy_from_counter(counter, 0, 2) == pytest.approx(400)


def test_power_by_the_trapezoidal_rule() -> None:
    power = [(0.0, 100.0), (1.0, 300.0), (2.0, 300.0)]
    assert energy_from_power(power, 0, 2) == pytest.approx(500)
    assert energy_from_power(power, 0.5, 1.0) == pytest.approx(125)


def test_a_short_end_without_points_is_taken_to_be_like_the_rest() -> None:
    counter = [(0.0, 0.0), (8.0, 800.0)]
    assert energy_from_counter(counter, 0, 10) == pytest.approx(1000)
    assert energy_from_counter(counter, 5, 30) is None
    assert energy_from_power([(0.0, 5.0), (8.0, 5.0)], -2, 8) == pytest.approx(50)


def test_fewer_than_two_points_give_no_energy() -> None:
    assert energy_from_counter([(0.0, 5.0)], 0, 1) is None
    assert energy_from_power([], 0, 1) is None


def test_the_counter_is_preferred_to_power() -> None:
    found = _rows(gpu0_energy_j=[0.0, 10.0, 20.0], gpu0_power_w=[500.0, 500.0, 500.0])
    assert gpu_energy_joules(found, 0, 0, 2) == pytest.approx(20)


def test_a_reset_counter_is_ignored() -> None:
    found = _rows(gpu0_energy_j=[900.0, 5.0, 20.0], gpu0_power_w=[50.0, 50.0, 50.0])
    assert gpu_energy_joules(found, 0, 0, 2) == pytest.approx(100)


def test_power_where_there_is_no_counter_and_none_where_there_is_nothing() -> None:
    found = _rows(gpu0_energy_j=[None] * 3, gpu0_power_w=[50.0, None, 50.0])
    assert gpu_energy_joules(found, 0, 0, 2) == pytest.approx(100)
    assert gpu_energy_joules(_rows(gpu0_power_w=[None, None]), 0, 0, 1) is None


def test_points_skip_empty_cells() -> None:
    assert column_points(_rows(a=[1.0, None, 3.0]), "a") == [(0.0, 1.0), (2.0, 3.0)]


def test_interpolation_does_not_leave_its_line() -> None:
    assert interpolate([(0.0, 1.0), (2.0, 3.0)], 1.0) == 2.0
    with pytest.raises(ValueError, match="outside"):
        interpolate([(0.0, 1.0), (2.0, 3.0)], 2.5)
