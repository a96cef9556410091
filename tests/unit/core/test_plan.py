"""Plans: refusals, resolution on made-up machines, identity, and both written forms."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from typing import Any

import pytest

from made import machine
from nfold.core.errors import DevicesMissing, UnknownValue, UsageError
from nfold.core.plan import ALLOWED_VALUES, MINIMUM_VALUES, PLAN_FIELDS, Plan, WorkloadDefaults

DEFAULTS = WorkloadDefaults(batch=64, epochs=3)


def random_plan(seed: int) -> Plan:
    """Any plan that may be written down: each field set or left to nfold."""
    draw = random.Random(seed)
    given: dict[str, Any] = {name: draw.choice(values) for name, values in ALLOWED_VALUES.items()}
    given |= {name: minimum + draw.randint(0, 9) for name, minimum in MINIMUM_VALUES.items()}
    del given[draw.choice(["steps", "epochs"])]
    return Plan(**{name: value for name, value in given.items() if draw.random() < 0.7})


@pytest.mark.parametrize("name", ALLOWED_VALUES)
def test_an_unknown_value_is_refused_with_the_closest_first(name: str) -> None:
    requested = ALLOWED_VALUES[name][-1] + "x"
    with pytest.raises(UnknownValue) as refused:
        Plan().edit(**{name: requested})
    assert refused.value.allowed[0] == ALLOWED_VALUES[name][-1]
    assert set(refused.value.allowed) == set(ALLOWED_VALUES[name])
    assert name in str(refused.value)
    assert repr(requested) in str(refused.value)


@pytest.mark.parametrize("name", MINIMUM_VALUES)
@pytest.mark.parametrize("excess", [-1, 0.5, True, "4"])
def test_an_impossible_number_is_refused(name: str, excess: object) -> None:
    value = MINIMUM_VALUES[name] + excess if type(excess) is int else excess
    with pytest.raises(UsageError, match=f"{name} .*whole numbers from {MINIMUM_VALUES[name]}"):
        Plan().edit(**{name: value})


@pytest.mark.parametrize("name", MINIMUM_VALUES)
def test_the_smallest_number_is_allowed(name: str) -> None:
    assert getattr(Plan().edit(**{name: MINIMUM_VALUES[name]}), name) == MINIMUM_VALUES[name]


def test_a_plan_has_one_length() -> None:
    with pytest.raises(UsageError, match="steps 5 and epochs 2"):
        Plan(steps=5, epochs=2)


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Plan().seed = 1  # type: ignore[misc]  # frozen is what is tested


def test_every_field_is_in_exactly_one_table() -> None:
    assert sorted([*ALLOWED_VALUES, *MINIMUM_VALUES]) == sorted(PLAN_FIELDS)


def test_resolved_on_a_machine_without_gpus() -> None:
    assert Plan().resolve(machine(cores=2), DEFAULTS) == Plan(
        device="cpu",
        devices=1,
        cores_per_device=2,
        strategy="single",
        batch=64,
        precision="fp32",
        layout="channels_first",
        input="loader",
        workers=0,
        augment="cpu",
        step="eager",
        epochs=3,
        warmup_steps=10,
    )


def test_resolved_on_a_machine_with_four_gpus() -> None:
    plan = Plan(precision="bf16", steps=50).resolve(machine(gpus=4, cores=64), DEFAULTS)
    assert (plan.device, plan.devices, plan.strategy) == ("cuda", 4, "ddp")
    assert (plan.layout, plan.cores_per_device, plan.workers) == ("channels_last", 16, 8)
    assert (plan.steps, plan.epochs) == (50, None)


def test_fp32_on_a_gpu_stays_channels_first() -> None:
    assert Plan().resolve(machine(gpus=1), DEFAULTS).layout == "channels_first"


def test_resident_images_are_augmented_on_the_device_and_need_no_workers() -> None:
    host = machine(gpus=1, cores=16)
    plan = Plan(input="resident").resolve(host, DEFAULTS)
    assert (plan.augment, plan.workers) == ("device", 0)
    given = Plan(input="resident", augment="cpu", workers=3).resolve(host, DEFAULTS)
    assert (given.augment, given.workers) == ("cpu", 3)
    plain = Plan().resolve(host, DEFAULTS)
    assert (plain.input, plain.augment, plain.workers) == ("loader", "cpu", 8)


FITS = WorkloadDefaults(batch=64, epochs=3, data_bytes=2**30)


def test_on_gpus_data_that_fit_are_resident_and_the_step_is_a_graph() -> None:
    plan = Plan().resolve(machine(gpus=2, cores=16), FITS)
    assert (plan.input, plan.augment, plan.workers) == ("resident", "device", 0)
    assert (plan.step, plan.strategy) == ("captured", "nfold")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"input": "loader"}, ("loader", "eager", "ddp")),
        ({"augment": "cpu"}, ("loader", "eager", "ddp")),
        ({"workers": 4}, ("loader", "eager", "ddp")),
        ({"strategy": "ddp"}, ("resident", "eager", "ddp")),
        ({"strategy": "dp"}, ("resident", "eager", "dp")),
        ({"precision": "fp16"}, ("resident", "eager", "ddp")),
        ({"accumulate": 2}, ("resident", "captured", "nfold")),
        ({"step": "compiled"}, ("resident", "compiled", "nfold")),
        ({"device": "cpu"}, ("loader", "eager", "ddp")),
        ({"framework": "simulated"}, ("loader", "eager", "ddp")),
    ],
)
def test_given_fields_decide_dependent_fields(
    given: dict[str, object], expected: tuple[str, str, str]
) -> None:
    plan = Plan(devices=2).edit(**given).resolve(machine(gpus=2, cores=16), FITS)
    assert (plan.input, plan.step, plan.strategy) == expected


def test_a_data_set_that_would_fill_a_gpu_is_loaded() -> None:
    large = WorkloadDefaults(batch=64, epochs=3, data_bytes=2**33)
    assert Plan().resolve(machine(gpus=1, cores=16), large).input == "loader"


def test_given_fields_are_kept() -> None:
    """Resolving fills gaps and changes nothing, but for the strategy of one device."""
    host = machine(gpus=8, cores=64)
    for seed in range(200):
        requested = random_plan(seed)
        if requested.strategy == "single" or (requested.devices or 1) > 8:
            continue
        given = {k: v for k, v in requested.to_dict().items() if v is not None}
        try:
            resolved = requested.resolve(host, DEFAULTS)
        except DevicesMissing:
            assert requested.device == "cpu"
            continue
        assert resolved.is_complete
        changed = {k for k, v in given.items() if getattr(resolved, k) != v}
        assert changed <= ({"strategy"} if resolved.devices == 1 else set())
        assert resolved.resolve(host, DEFAULTS) == resolved


def test_a_workload_without_epochs_is_measured_in_steps() -> None:
    plan = Plan().resolve(machine(), WorkloadDefaults(batch=840, epochs=None, steps=30))
    assert (plan.steps, plan.epochs) == (30, None)
    assert plan.is_complete


def test_epochs_win_over_a_default_in_steps() -> None:
    plan = Plan(epochs=2).resolve(machine(), WorkloadDefaults(batch=1, epochs=None, steps=30))
    assert (plan.steps, plan.epochs) == (None, 2)


def test_zero_is_a_given_value() -> None:
    plan = Plan(workers=0, warmup_steps=0).resolve(machine(gpus=1), DEFAULTS)
    assert (plan.workers, plan.warmup_steps) == (0, 0)


def test_one_device_has_nothing_to_exchange() -> None:
    host = machine(gpus=4)
    for strategy in ALLOWED_VALUES["strategy"]:
        assert Plan(devices=1, strategy=strategy).resolve(host, DEFAULTS).strategy == "single"
    assert Plan(strategy="single").resolve(host, DEFAULTS).devices == 1
    with pytest.raises(UsageError, match="'single' with 2 devices: allowed are ddp, nfold, dp"):
        Plan(devices=2, strategy="single").resolve(host, DEFAULTS)


@pytest.mark.parametrize(
    ("requested", "gpus", "message"),
    [
        (Plan(device="cuda", devices=8), 4, "8 cuda .* 4 cuda devices .*--devices 1,2,4$"),
        (Plan(device="cuda"), 0, "0 cuda devices here; next: --device cpu"),
        (Plan(device="cpu", devices=3), 0, "3 cpu .* 2 cores .*--devices 1,2$"),
        (Plan(device="cpu", devices=2, cores_per_device=2), 0, "2 cores each .*--devices 1$"),
        (Plan(device="cpu", cores_per_device=3), 0, "3 cores each .*at most 2 cores"),
    ],
)
def test_more_devices_than_exist_are_refused(requested: Plan, gpus: int, message: str) -> None:
    with pytest.raises(DevicesMissing, match=message) as refused:
        requested.resolve(machine(gpus=gpus), DEFAULTS)
    assert refused.value.exit_code == 4


def test_simulated_devices_need_no_machine() -> None:
    for device in ("cuda", "cpu"):
        requested = Plan(framework="simulated", device=device, devices=64)
        assert requested.resolve(machine(), DEFAULTS).devices == 64
    assert Plan(framework="simulated", device="cuda").resolve(machine(), DEFAULTS).devices == 1


def test_complete_means_nothing_is_left_open() -> None:
    whole = Plan().resolve(machine(), DEFAULTS)
    assert whole.is_complete
    assert not Plan().is_complete
    for name in PLAN_FIELDS:
        if name not in ("framework", "seed", "steps", "decode"):
            assert not whole.edit(**{name: None}).is_complete, name


def test_the_id_is_stable_and_distinct() -> None:
    """The ids of stored measurements must not change with nfold's own changes."""
    assert Plan().id == "44136fa355"
    assert Plan(device="cuda", devices=4, batch=512, steps=100).id == "7d1f73f4a2"
    ids = {plan.id for plan in map(random_plan, range(300))}
    assert len(ids) == len({json.dumps(random_plan(seed).to_dict()) for seed in range(300)})


def test_the_id_ignores_defaults() -> None:
    assert Plan(framework="torch", seed=0).id == Plan().id


@pytest.mark.parametrize("seed", range(50))
def test_json_gives_the_plan_back(seed: int) -> None:
    plan = random_plan(seed)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device = 2", "device"),
        ("devices = 1.5", "devices.*1.5"),
        ("devices = true", "devices.*True"),
        ("devcies = 2", "'devcies': allowed are devices"),
        ("[plan]\ndevices = 2", "'plan'"),
        ("devices =", "not TOML"),
        ("devices = 0", "whole numbers from 1"),
        ('layout = "NHWC"', "channels_first"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan.from_toml(text)


def test_json_without_a_field_means_its_default() -> None:
    assert Plan.from_dict({"devices": 2}) == Plan(devices=2)


def test_edit_and_diff_are_inverse() -> None:
    for seed in range(0, 100, 2):
        one, other = random_plan(seed), random_plan(seed + 1)
        difference = one.diff(other)
        assert one.edit(**{name: new for name, (_, new) in difference.items()}) == other
        assert other.diff(one) == {name: (b, a) for name, (a, b) in difference.items()}
        assert one.diff(one) == {}


def test_editing_one_length_clears_the_other() -> None:
    assert Plan(steps=5).edit(epochs=2) == Plan(epochs=2)
    assert Plan(epochs=2).edit(steps=5) == Plan(steps=5)
    assert Plan(epochs=2).edit(seed=1) == Plan(epochs=2, seed=1)


def test_edit_refuses_unknown_fields() -> None:
    with pytest.raises(UnknownValue, match="'bacth': allowed are batch"):
        Plan().edit(bacth=4)
    with pytest.raises(UnknownValue, match="strategy"):
        Plan().edit(strategy="fsdp")


def test_few_fields_have_a_value_from_the_start() -> None:
    set_from_the_start = {f.name for f in fields(Plan) if f.default is not None}
    free = {"framework", "seed", "accumulate", "exchange", "kernels", "batch_norm"}
    images = {"cache", "bad_images"}
    assert set_from_the_start == free | images | {
        *("steps_per_execution", "allocation", "memory", "optimizer_state"),
    }
