"""What Keras's back ends refuse, and how they are opened: known without importing any."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import made
from nfold.core.errors import ExtraMissing, OutOfMemory
from nfold.core.plan import Plan, WorkloadDefaults
from nfold.core.workload import Workload
from nfold.engines.base import get_framework
from nfold.engines.keras import framework
from nfold.engines.keras.framework import violated_rule
from nfold.engines.keras.trainer import backend_environment, translate_errors

DIGITS = Workload(name="digits")


def _plan(name: str, *, gpus: int = 0, **changes: Any) -> Plan:
    host = made.machine(gpus=gpus, cores=8)
    asked = Plan(**{"framework": name, "batch": 16, **changes})
    return asked.resolve(host, WorkloadDefaults(batch=16, epochs=1, data_bytes=2**20))


@pytest.mark.parametrize(
    ("name", "devices", "strategy", "step"),
    [
        ("tensorflow", 1, "single", "graph"),
        ("tensorflow", 2, "mirrored", "graph"),
        ("jax", 2, "data_parallel", "compiled"),
        ("keras-torch", 1, "single", "eager"),
    ],
)
def test_the_automatic_plan_runs(name: str, devices: int, strategy: str, step: str) -> None:
    plan = _plan(name, devices=devices)
    assert (plan.strategy, plan.step, plan.layout) == (strategy, step, "channels_last")
    assert (plan.input, plan.augment, plan.workers) == ("loader", "cpu", 0)
    assert violated_rule(plan) is None
    assert get_framework(name).process_count(plan) == 1


def test_on_gpus_data_that_fit_stay_there() -> None:
    for name in ("tensorflow", "jax"):
        plan = _plan(name, gpus=2)
        assert (plan.devices, plan.input, plan.augment) == (2, "resident", "device")
        assert violated_rule(plan) is None


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("tensorflow", {"layout": "channels_first"}, "only supports the NHWC"),
        ("tensorflow", {"step": "captured"}, "allowed are eager, graph, compiled"),
        ("tensorflow", {"steps_per_execution": 2, "step": "eager"}, "one execution"),
        ("tensorflow", {"batch_norm": "synchronised"}, "per replica"),
        ("tensorflow", {"devices": 2, "strategy": "ddp"}, "allowed is mirrored"),
        ("jax", {"devices": 2, "strategy": "nfold"}, "allowed is data_parallel"),
        ("jax", {"step": "eager"}, "allowed are compiled"),
        ("jax", {"input": "tf.data"}, "TensorFlow's"),
        ("jax", {"devices": 3}, "multiple"),
        ("jax", {"accumulate": 2}, "torch's"),
        ("jax", {"exchange": "bf16"}, "float32"),
        ("jax", {"workers": 2}, "one thread"),
        ("jax", {"precision": "fp16"}, "needs a GPU"),
        ("jax", {"precision": "tf32"}, "tensor cores"),
        ("jax", {"input": "resident", "augment": "cpu"}, "--augment device"),
        ("jax", {"devices": 8, "batch": 4}, "multiple"),
        ("keras-torch", {"devices": 2}, "one device"),
        ("keras-torch", {"input": "generator"}, "--input loader"),
        ("keras-torch", {"steps_per_execution": 2}, "loop in a graph"),
    ],
)
def test_impossible_plans_are_refused(name: str, changes: dict[str, Any], said: str) -> None:
    reason = violated_rule(_plan(name, **changes))
    assert reason is not None
    assert said in reason


def test_the_devices_of_an_operation_need_no_equal_parts() -> None:
    plan = _plan("jax", devices=3)
    assert "multiple" in str(violated_rule(plan))
    assert violated_rule(plan, operation=True) is None
    first = _plan("tensorflow", layout="channels_first")
    assert "only supports the NHWC" in str(violated_rule(first, operation=True))


PHOTOGRAPHS = WorkloadDefaults(batch=32, epochs=1, encoded=True)


@pytest.mark.parametrize("name", ["tensorflow", "jax"])
def test_photographs_allow_workers(name: str) -> None:
    host = made.machine(gpus=1, cores=8)
    plan = Plan(framework=name).resolve(host, PHOTOGRAPHS)
    assert (plan.input, plan.decode, plan.augment, plan.workers) == ("loader", "cpu", "cpu", 7)
    assert violated_rule(plan) is None
    assert violated_rule(plan.edit(augment="device")) is None
    assert Plan(framework="torch").resolve(host, PHOTOGRAPHS).augment == "device"


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("jax", {"decode": "device"}, "--decode cpu"),
        ("keras-torch", {"decode": "device"}, "--decode cpu"),
        ("tensorflow", {"input": "resident"}, "--input loader"),
    ],
)
def test_impossible_photograph_plans_are_refused(
    name: str, changes: dict[str, Any], said: str
) -> None:
    pytest.importorskip(name.removeprefix("keras-"))
    host = made.machine(cores=2)
    plan = Plan(framework=name, **changes).resolve(host, PHOTOGRAPHS)
    inception = Workload(name="inception_v3")
    assert said in str(get_framework(name).unsupported_reason(inception, plan, host))


def test_only_files_can_be_decoded() -> None:
    pytest.importorskip("jax")
    plan = _plan("jax", decode="cpu")
    reason = get_framework("jax").unsupported_reason(DIGITS, plan, made.machine())
    assert "no image files" in str(reason)


def test_compiled_tensorflow_has_both_layouts_on_a_cpu() -> None:
    assert violated_rule(_plan("tensorflow", layout="channels_first", step="compiled")) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": "graph"}, "tf.function"),
        ({"input": "tf.data"}, "Keras's"),
        ({"input": "generator"}, "Keras's"),
        ({"devices": 2, "strategy": "mirrored"}, "TensorFlow's"),
        ({"steps_per_execution": 4}, "as one CUDA graph"),
        ({"allocation": "growth"}, "on demand"),
    ],
)
def test_torch_refuses_what_is_kerass(changes: dict[str, Any], said: str) -> None:
    reason = get_framework("torch").unsupported_reason(
        DIGITS, _plan("torch", **changes), made.machine()
    )
    assert reason is not None
    assert said in reason


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework, "find_spec", lambda name: None)
    for name, extra in (("tensorflow", "tensorflow"), ("jax", "jax"), ("keras-torch", "keras")):
        with pytest.raises(ExtraMissing, match=rf"pip install 'nfold\[{extra}\]'"):
            get_framework(name).unsupported_reason(DIGITS, _plan(name), made.machine())


def test_a_build_that_sees_no_gpu_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"tensorflow-cpu": "2.21.0", "jax": "0.10.2"}
    monkeypatch.setattr(framework, "installed_version", here.get)
    assert "built without CUDA" in str(framework.missing_cuda_reason("tensorflow"))
    assert "CUDA plugin" in str(framework.missing_cuda_reason("jax"))
    here |= {"jax-cuda13-plugin": "0.10.2", "tensorflow": "2.21.0"}
    assert framework.missing_cuda_reason("jax") is None
    assert framework.missing_cuda_reason("tensorflow") is None
    assert framework.missing_cuda_reason("keras-torch") is None


def test_work_of_other_frameworks_is_refused() -> None:
    plan = _plan("keras-torch")
    pytest.importorskip("keras")
    for name, said in (
        ("my.module:work", "written in PyTorch"),
        ("conv2d", "not available on keras-torch"),
    ):
        reason = get_framework("keras-torch").unsupported_reason(
            Workload(name=name), plan, made.machine()
        )
        assert said in str(reason)


def test_the_environment_chooses_the_back_end_and_its_gpus() -> None:
    cpu = backend_environment(_plan("keras-torch"), {})
    assert (cpu["KERAS_BACKEND"], cpu["CUDA_VISIBLE_DEVICES"]) == ("torch", "")
    asked = _plan("jax", gpus=4, devices=2, allocation="growth")
    gpu = backend_environment(asked, {"CUDA_VISIBLE_DEVICES": "3,1,0"})
    assert (gpu["KERAS_BACKEND"], gpu["CUDA_VISIBLE_DEVICES"]) == ("jax", "3,1")
    assert gpu["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in backend_environment(
        asked.edit(allocation="default"), {}
    )


def test_out_of_memory_is_translated() -> None:
    with pytest.raises(OutOfMemory, match="jax"), translate_errors("jax"):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    with pytest.raises(ValueError, match="else"), translate_errors("jax"):
        raise ValueError("something else")


def test_the_parent_imports_no_back_end() -> None:
    text = (
        "import sys; from nfold.engines.base import get_framework; "
        "[get_framework(name) for name in ('tensorflow', 'jax', 'keras-torch')]; "
        "print({'keras', 'tensorflow', 'jax', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
