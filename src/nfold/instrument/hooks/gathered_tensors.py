"""Find work that every rank repeats: products of tensors that a script gathers from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nfold.instrument.hooks.runtime_hooks import EventCounter

EVENT, PAIRED = "gathered_work", "gathered_pairs"
GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single")
JOINS = ("cat", "concat", "concatenate", "stack", "vstack", "hstack", "dstack")
PRODUCTS = (
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "inner"),
    *("tensordot", "linear", "bilinear", "cdist", "conv1d", "conv2d", "conv3d", "embedding"),
    "scaled_dot_product_attention",
)
MARK = "_nfold_gathered"


class GatheredTensors(TorchFunctionMode):
    """Follows gathered tensors through one step, and records the lines of their products.

    A product of tensors that are all gathered, or of gathered tensors and replicated parameters,
    has the same value on every rank: ``EVENT``. A product with samples of the rank has not:
    ``PAIRED``.
    """

    def __init__(self, events: EventCounter, is_replicated: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._events, self._is_replicated = events, is_replicated
        self._is_active = self._observed = self._has_gathers = False

    def on_gather(self, outputs: Any) -> None:
        """Mark the output of a gather, the first argument of the collective."""
        self._has_gathers = True
        if self._is_active:
            _mark(_tensors([outputs]))

    def on_step(self) -> None:
        """Observe the step after the first one with a gather."""
        if self._is_active:
            self.stop()
        elif self._has_gathers and not self._observed:
            self._is_active = self._observed = True
            self.__enter__()  # type: ignore[no-untyped-call]
        self._has_gathers = False

    def stop(self) -> None:
        if self._is_active:
            self._is_active = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [*_tensors([*args, *(kwargs or {}).values()])]
        gathered = [tensor for tensor in given if hasattr(tensor, MARK)]
        if not gathered:
            return result
        name, made = getattr(func, "__name__", ""), [*_tensors([result])]
        others = [tensor for tensor in given if not hasattr(tensor, MARK) and tensor.ndim > 1]
        weights = [one for one in others if self._is_replicated(one)]
        size = max(tensor.numel() for tensor in given)
        is_product = name in PRODUCTS or any(one.numel() > size for one in made)
        is_repeated = len(weights) == len(others)
        if name in JOINS or is_repeated:
            _mark(made)
        if name not in JOINS and is_product and len(gathered) + len(others) > 1:
            self._events.record_location(EVENT if is_repeated else PAIRED)
        return result


def is_parameter_of(models: Iterable[nn.Module], tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter of the models, or of any model if there are none."""
    if not isinstance(tensor, nn.Parameter):
        return False
    models = list(models)
    return not models or any(one is tensor for model in models for one in model.parameters())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mark(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        setattr(tensor, MARK, True)
