"""The catalogue's entry of conv2d and the plans that it refuses."""

from __future__ import annotations

import pytest

from nfold.core.errors import ExtraMissing, UsageError
from nfold.core.machine import Machine
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.workloads import conv2d, info, parameters
from nfold.workloads.conv2d import INFO, unsupported

MACHINE = Machine(cpu="test", cores=4, memory_bytes=2**30)


def resolved(**said: object) -> Plan:
    return Plan(device="cpu").edit(**said).resolve(MACHINE, INFO.defaults)


def test_defaults_are_the_field_reports() -> None:
    plan = resolved()
    assert info("conv2d").kind == "operation"
    assert (plan.batch, plan.steps, plan.epochs) == (840, 30, None)
    assert parameters(Workload.parse("conv2d")) == {
        "size": 100,
        "channels": 1,
        "filter": 3,
        "copy_only": 0,
    }


def test_flop_counts_a_multiply_and_an_add_per_filter_pixel_and_channel_pair() -> None:
    values = {"size": 10, "channels": 2, "filter": 3, "copy_only": 0}
    assert INFO.flop_per_sample(values) == 2 * (2 * 2) * (3 * 3) * (10 * 10)
    assert INFO.flop_per_sample({**values, "copy_only": 1}) == 0


@pytest.mark.parametrize("text", ["conv2d:filter=11,size=10", "conv2d:copy_only=2"])
def test_impossible_parameters_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="allowed"):
        parameters(Workload.parse(text))


def test_a_default_plan_is_supported() -> None:
    assert unsupported(resolved()) is None


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv2d, "find_spec", lambda _: None)
    with pytest.raises(ExtraMissing, match=r"scipy is not installed.*nfold\[conv2d\]"):
        unsupported(resolved())


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({"epochs": 1}, "epochs"),
        ({"input": "resident"}, "resident"),
        ({"augment": "device"}, "augments nothing"),
        ({"step": "captured"}, "captured"),
        ({"accumulate": 2}, "no gradients to add up"),
        ({"precision": "tf32"}, "tf32"),
        ({"batch": 1, "devices": 2}, "batch 1"),
    ],
)
def test_what_makes_no_sense_has_a_reason(said: dict[str, object], word: str) -> None:
    reason = unsupported(resolved(**said))
    assert reason is not None
    assert word in reason


@pytest.mark.parametrize(
    ("framework", "step"), [("tensorflow", "graph"), ("tensorflow", "eager"), ("jax", "compiled")]
)
def test_other_frameworks_have_steps_of_their_own(framework: str, step: str) -> None:
    assert unsupported(resolved(framework=framework, step=step)) is None
    assert "graph" in str(unsupported(resolved(step="graph")))


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({"precision": "bf16"}, "allowed are fp32"),
        ({"steps_per_execution": 2}, "times every call"),
        ({"input": "generator"}, "generator"),
    ],
)
def test_other_frameworks_refuse_what_makes_no_sense(said: dict[str, object], word: str) -> None:
    assert word in str(unsupported(resolved(framework="jax", **said)))
