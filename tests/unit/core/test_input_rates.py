"""What rates choose of a plan, and what they leave alone."""

from __future__ import annotations

import pytest

from made import machine
from nfold.core.input_rates import ImageRate, InputRates, complete_with_rates
from nfold.core.plan import Plan, WorkloadDefaults

HOST = machine(gpus=2, cores=32)
FILES = WorkloadDefaults(batch=64, epochs=1, encoded=True)


def steady(value: float) -> ImageRate:
    return ImageRate(value=value, low=0.98 * value, high=1.02 * value)


def chosen(rates: InputRates | None, **changes: object) -> tuple[str | None, int | None]:
    requested = Plan(**changes)  # type: ignore[arg-type]
    plan = complete_with_rates(requested, requested.resolve(HOST, FILES), rates)
    assert plan.is_complete
    return plan.decode, plan.workers


def test_without_rates_all_cores_but_the_ranks_own_decode() -> None:
    assert chosen(None) == ("cpu", 15)


@pytest.mark.parametrize(
    ("device", "step", "workers"),
    [(800.0, "eager", 5), (800.0, "compiled", 10), (8000.0, "eager", 15), (None, "eager", 15)],
)
def test_workers_keep_the_device_busy(device: float | None, step: str, workers: int) -> None:
    rates = InputRates(worker=steady(200), device=device)
    assert chosen(rates, step=step) == ("cpu", workers)


@pytest.mark.parametrize(
    ("decoder", "device", "expected"),
    [
        (4000.0, 3000.0, ("device", 8)),
        (4000.0, None, ("device", 8)),
        (4000.0, 1000.0, ("cpu", 7)),
        (3100.0, 3000.0, ("cpu", 15)),
        (2000.0, 3000.0, ("cpu", 15)),
    ],
)
def test_nvjpeg_is_chosen_where_workers_starve_the_device_and_it_beats_them(
    decoder: float, device: float | None, expected: tuple[str, int]
) -> None:
    rates = InputRates(worker=steady(200), decoder=steady(decoder), device=device)
    assert chosen(rates) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"augment": "cpu"}, ("cpu", 15)),
        ({"cache": "decoded"}, ("cpu", 15)),
        ({"decode": "cpu"}, ("cpu", 15)),
        ({"workers": 3}, ("device", 3)),
        ({"decode": "device"}, ("device", 15)),
        ({"decode": "cpu", "workers": 4}, ("cpu", 4)),
        ({"device": "cpu", "devices": 1}, ("cpu", 0)),
        ({"framework": "jax"}, ("cpu", 15)),
    ],
)
def test_given_or_unsuitable_fields_are_kept(
    changes: dict[str, object], expected: tuple[str, int]
) -> None:
    rates = InputRates(worker=steady(200), decoder=steady(9000), device=8000.0)
    assert chosen(rates, **changes) == expected


def test_the_description_has_rates_and_choice() -> None:
    rates = InputRates(worker=steady(200), decoder=steady(9000), device=8000.0)
    requested = Plan()
    plan = complete_with_rates(requested, requested.resolve(HOST, FILES), rates)
    assert rates.describe(plan) == (
        "measured: a worker makes 200 images/s (196–204), 15 make 3,000 images/s (2,940–3,060); "
        "nvJPEG on a GPU 9,000 images/s (8,820–9,180); a device trains on 8,000; "
        "chosen: decode device, 8 workers a device"
    )
