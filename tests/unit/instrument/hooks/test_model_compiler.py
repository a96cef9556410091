"""The model of a script compiled where an experiment wants it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instrumented import reset_compiler
from nfold.core.errors import Unsupported
from nfold.instrument.hooks.model_hooks import ModelCompiler, RecompilationCheck, compiled_graphs

Graphs = list[torch.fx.GraphModule]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Those that were compiled, by a backend that needs no compiler."""
    made: Graphs = []

    def backend(graph: torch.fx.GraphModule, _examples: list[Tensor]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    usual = torch.compile
    reset_compiler()

    def compiled(function: Any, mode: str) -> Any:
        assert mode in ("default", "reduce-overhead")
        return usual(function, backend=backend)

    monkeypatch.setattr(torch, "compile", compiled)
    yield made
    reset_compiler()


@pytest.fixture
def compiling() -> Iterator[ModelCompiler]:
    made = ModelCompiler("default")
    made.start()
    yield made
    made.stop()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


class DistributedDataParallel(nn.Module):
    """By name only: what wraps a module and is not to be compiled itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, samples: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.module(samples)
        return found


class LightningModule(nn.Module):
    """It calls several that are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, samples: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(samples))
        return found


@pytest.mark.parametrize(
    ("made", "parts"),
    [(model, 1), (lambda: DistributedDataParallel(model()), 1), (LightningModule, 2)],
)
def test_outermost_modules_are_compiled_from_the_second_call(
    made: Callable[[], nn.Module], parts: int, graphs: Graphs, compiling: ModelCompiler
) -> None:
    trained, samples = made(), torch.randn(5, 4)
    hooked: list[int] = []
    trained.register_forward_hook(lambda *_: hooked.append(1))
    expected = trained(samples)
    assert not graphs
    for _ in range(3):
        assert torch.equal(trained(samples), expected)
    assert len(graphs) == parts
    assert len(hooked) == 4
    assert compiled_graphs()
    compiling.require_compiled(compiled=True)
    trained(samples).sum().backward()
    assert all(parameter.grad is not None for parameter in trained.parameters())


def test_module_that_does_not_train_is_not_compiled(
    graphs: Graphs, compiling: ModelCompiler
) -> None:
    teacher, loss = model().eval(), nn.MSELoss()
    for _ in range(3):
        with torch.no_grad():
            teacher(torch.randn(5, 4))
        loss(torch.randn(5), torch.randn(5))
    assert not graphs
    assert not compiled_graphs()
    with pytest.raises(Unsupported, match="no module"):
        compiling.require_compiled(compiled=False)


def test_nothing_is_compiled_by_default(graphs: Graphs) -> None:
    usual = ModelCompiler("")
    usual.start()
    usual.require_compiled(compiled=False)
    trained = model()
    for _ in range(3):
        trained(torch.randn(5, 4))
    assert not graphs


def test_called_module_stays_compiled(graphs: Graphs) -> None:
    one = ModelCompiler("reduce-overhead")
    one.start()
    trained, other = model(), model()
    trained(torch.randn(5, 4))
    one.stop()
    for called in (trained, other):
        called(torch.randn(5, 4))
    assert len(graphs) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_compiled_module_computes_with_its_own_parameters(
    copied: Callable[[nn.Module], nn.Module], graphs: Graphs, compiling: ModelCompiler
) -> None:
    trained, samples = nn.Linear(4, 3), torch.randn(5, 4)
    expected = trained(samples)
    trained(samples)
    assert compiling.has_compiled
    other = copied(trained)
    with torch.no_grad():
        trained.weight.zero_()
        assert torch.equal(other(samples), expected)
        assert torch.equal(trained(samples), trained.bias.expand(5, 3))
    assert inspect.signature(trained.forward) == inspect.signature(other.forward)
    assert graphs


@pytest.mark.parametrize("dynamic", [False, True])
def test_code_that_is_compiled_again_in_every_step_is_noticed(
    dynamic: bool,
) -> None:
    reset_compiler()

    @torch.compile(backend="aot_eager", dynamic=False)
    def weighted(values: Tensor, weight: Any) -> Tensor:
        total: Tensor = (values * weight).sum()
        return total

    check, samples = RecompilationCheck(), torch.ones(4)
    for step in range(8):
        weighted(samples, torch.tensor(step / 10) if dynamic else step / 10)
        check.on_step()
    reset_compiler()
    found = check.caveats()
    assert bool(found) != dynamic
    for kind, text in found:
        assert kind == "recompilation"
        assert text.startswith("weighted (")
        assert "because weight == 0." in text
