"""A prepared module stays the user's own."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integration.scripts.user_models import ModelOutput
from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.engines.base import Observer
from nfold.engines.torch.run.job import Job
from nfold.engines.torch.run.prepared_module import PreparedMarker, prepare_module
from nfold.engines.torch.run.user_run import UserRun

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.convolution(x)
        self.seen.append(y.dtype)
        return {"y": y, "strides": torch.tensor(x.stride())}


class WithCache(Net):
    def forward(self, x: Tensor, cache: Any) -> Any:  # type: ignore[override]
        cache.last = self.convolution(x)
        return ModelOutput(y=cache.last)


def plan(**fields: object) -> Plan:
    return Plan(precision="fp32", layout="channels_first", step="eager").edit(**fields)


def test_it_is_the_same_object_of_the_users_class() -> None:
    module = Net()
    weight = module.convolution.weight
    assert prepare_module(module, plan(), CPU) is module
    assert isinstance(module, Net)
    assert isinstance(module, PreparedMarker)
    assert module.convolution.weight is weight
    assert type(prepare_module(module, plan(), CPU)).__mro__.count(PreparedMarker) == 1


def test_bf16_computes_in_bf16_and_answers_in_fp32() -> None:
    module = Net()
    prepare_module(module, plan(precision="bf16"), CPU)
    assert module(torch.zeros(1, 3, 8, 8))["y"].dtype == torch.float32
    assert module.seen == [torch.bfloat16]


def test_bf16_answers_in_fp32_by_item_and_by_attribute() -> None:
    module, cache = WithCache(), SimpleNamespace(last=None)
    prepare_module(module, plan(precision="bf16"), CPU)
    outputs = module(torch.zeros(1, 3, 8, 8), cache)
    assert outputs.y.dtype == torch.float32
    assert outputs.y is outputs["y"]
    assert cache.last.dtype == torch.bfloat16


@pytest.mark.parametrize("method", [False, True])
def test_a_model_that_the_user_compiled_computes_in_bf16(method: bool) -> None:
    module = Net()
    compiled: Any = module
    if method:
        module.compile(backend="eager", fullgraph=True)
    else:
        compiled = torch.compile(module, backend="eager")
    assert prepare_module(compiled, plan(precision="bf16"), CPU) is compiled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(torch.zeros(1, 3, 8, 8))["y"].dtype == torch.float32
    assert module.seen == [torch.bfloat16]


def test_a_copy_of_a_compiled_model_has_weights_of_its_own() -> None:
    module: Any = torch.compile(Net(), backend="eager")
    prepare_module(module, plan(), CPU)
    x, other = torch.randn(1, 3, 8, 8), copy.deepcopy(module)
    assert torch.equal(other(x)["y"], module(x)["y"])
    torch.nn.init.zeros_(other.convolution.weight)
    assert not torch.equal(other(x)["y"], module(x)["y"])


def test_a_forward_that_the_script_replaced_is_prepared_and_copied() -> None:
    module: Any = Net()
    module.forward = MethodType(lambda self, x: self.convolution(x), module)
    prepare_module(module, plan(precision="bf16"), CPU)
    x, other = torch.randn(1, 3, 8, 8), copy.deepcopy(module)
    assert torch.equal(module(x), module(x).bfloat16().float())
    torch.nn.init.zeros_(other.convolution.weight)
    assert not torch.equal(other(x), module(x))


def test_channels_last_reaches_weights_and_inputs() -> None:
    module = Net()
    prepare_module(module, plan(layout="channels_last"), CPU)
    assert module.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    channel_stride = module(torch.zeros(1, 3, 8, 8))["strides"][1]
    assert channel_stride == 1


def test_a_copy_and_a_pickle_are_of_the_users_class_again() -> None:
    module = Net()
    prepare_module(module, plan(), CPU)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is Net
        assert torch.equal(other.convolution.weight, module.convolution.weight)
        assert other.convolution.weight is not module.convolution.weight


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_it_computes_what_it_computed(layout: str) -> None:
    module, x = Net(), torch.randn(2, 3, 8, 8)
    expected = module(x)["y"]
    prepare_module(module, plan(layout=layout), CPU)
    assert torch.allclose(module(x)["y"], expected, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_step_computes_the_same() -> None:
    module, x = Net(), torch.randn(2, 3, 8, 8)
    expected = module(x)["y"]
    prepare_module(module, plan(step="compiled"), CPU)
    assert torch.allclose(module(x)["y"], expected, atol=1e-5)


def _run() -> UserRun:
    job = Job(rank=0, local_rank=0, world_size=1, device=CPU)
    return UserRun(plan(devices=1), job, Observer())


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_prepare_returns_its_arguments_in_order(count: int) -> None:
    module, other = Net(), Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    objects = [optimizer, module, torch.optim.lr_scheduler.StepLR(optimizer, 2), other][:count]
    prepared = _run().prepare(*objects)
    returned = [prepared] if count == 1 else list(prepared)
    assert [id(one) for one in returned] == [id(one) for one in objects]


def test_a_model_that_uses_several_devices_itself_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a DataParallel cannot be prepared.* of the model in it"):
        _run().prepare(nn.DataParallel(Net()))


def test_a_script_resumes_from_the_newest_readable_checkpoint(tmp_path: Path) -> None:
    run = _run()
    module = Net()
    run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    run.checkpoint(tmp_path, note="good")
    (tmp_path / "step-7").mkdir()
    with pytest.warns(UserWarning, match="step-7 cannot be read; resuming from step-0"):
        assert run.resume(tmp_path) == {"note": "good"}
