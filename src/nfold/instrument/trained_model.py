"""The model that a script trains: its parameters, their devices, and how ranks divide them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from nfold.core.measurement import ParameterPart
from nfold.core.script_profile import SHARDED, Parallelism
from nfold.engines.torch.communication.data_parallel import (
    SAMPLED_VALUES,
    parameter_checksum,
    sample_parameters,
)
from nfold.engines.torch.devices import Devices
from nfold.instrument import torch_private
from nfold.instrument.hooks.distributed_hooks import LOCAL_COLLECTIVES, DataParallelHooks
from nfold.instrument.hooks.model_hooks import ForwardObserver
from nfold.instrument.hooks.patches import is_tensor_parallel
from nfold.instrument.hooks.runtime_hooks import EventCounter
from nfold.instrument.optimizer_steps import StepOptimizer


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """The model that the optimizers of one rank train, as far as the hooks have observed it."""

    _step_optimizer: StepOptimizer
    _wrappers: DataParallelHooks
    _forwards: ForwardObserver
    _events: EventCounter

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters that the optimizers train, in the order of their first steps."""
        return self._step_optimizer.parameters

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def devices(self) -> Devices:
        for wrapped in self._wrappers.dp:
            if wrapped.device_ids:
                return Devices(tuple(torch.device("cuda", index) for index in wrapped.device_ids))
        first = next((parameter.device for parameter in self.parameters), torch.device("cpu"))
        return Devices((first,))

    def parallelism(self) -> Parallelism:
        called = self._forwards.outermost
        return detect_parallelism(self._wrappers, self.parameters, self._events, called)

    @property
    def replicated_parameters(self) -> Sequence[Tensor]:
        """The parameters that must be equal on all ranks."""
        kind = self.parallelism()
        return replicated_parameters(kind, self._wrappers, self.parameters, self._events)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that contain the parameters: the wrapped ones, else those that are called."""
        return self._wrappers.ddp or self._forwards.outermost


class InitialParameters:
    """Parameters before their first step, and the step from which each has a gradient."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._parts: dict[str, ParameterPart] = {}
        self._known: set[int] = set()
        self._trained_from: dict[int, int] = {}

    @property
    def parts(self) -> tuple[ParameterPart, ...]:
        return tuple(self._parts.values())

    def record(self, optimizer: Any, step: int) -> None:
        """Record the parameters of an optimizer before its step, after ``step`` training steps."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._known.issuperset(map(id, parameters)):
            self._known.update(map(id, parameters))
            for part in parameter_parts(self._model.modules, parameters, every_number=False):
                self._parts.setdefault(part.name, part)
        for parameter in parameters:
            if parameter.grad is not None:
                self._trained_from.setdefault(id(parameter), step)

    def trained_parts(self, parameters: Sequence[Tensor]) -> tuple[ParameterPart, ...]:
        """Return the parameters by parts of the model, with checksums of all their numbers."""
        modules, begins = self._model.modules, self._trained_from
        return parameter_parts(modules, parameters, every_number=True, trained_from=begins)


SHARDED_TYPES = ("DTensor", "FlatParameter")
PIPELINING_MODULE = "torch.distributed.pipelining"
ALL_TO_ALL = ("all_to_all", "all_to_all_single")
POINT_TO_POINT = ("send", "recv", "isend", "irecv")


def detect_parallelism(
    wrappers: DataParallelHooks,
    parameters: Sequence[Tensor],
    events: EventCounter,
    models: Sequence[nn.Module] = (),
) -> Parallelism:
    """Return how the script uses several devices; ``models`` are the modules that it calls."""
    if any(
        type(p).__name__ in SHARDED_TYPES or torch_private.is_flat_parameter(p) for p in parameters
    ):
        return "tensor" if is_tensor_parallel(models) else "fsdp"
    if PIPELINING_MODULE in sys.modules and any(events.counts[name] for name in POINT_TO_POINT):
        return "pipeline"
    if wrappers.ddp:
        return "ddp"
    if wrappers.dp:
        return "dp"
    return "other" if any(events.counts[name] for name in LOCAL_COLLECTIVES) else "none"


def replicated_parameters(
    parallelism: Parallelism,
    wrappers: DataParallelHooks,
    parameters: Sequence[Tensor],
    events: EventCounter,
) -> Sequence[Tensor]:
    """Return the parameters that must be equal on all ranks: none of a sharded model.

    A script that uses all-to-all has shards, such as tables or experts, outside its DDP.
    """
    if parallelism in SHARDED:
        return ()
    if parallelism != "ddp" or not any(events.counts[name] for name in ALL_TO_ALL):
        return parameters
    wrapped = {id(parameter) for module in wrappers.ddp for parameter in module.parameters()}
    return [parameter for parameter in parameters if id(parameter) in wrapped]


PART_DEPTH = 2  # names in the path of a part
PART_SAMPLES = 4  # numbers of a part


def parameter_parts(
    models: Sequence[nn.Module],
    parameters: Sequence[Tensor],
    *,
    every_number: bool,
    trained_from: Mapping[int, int] = MappingProxyType({}),
) -> tuple[ParameterPart, ...]:
    """Group parameters by the first names of their paths in a model.

    The checksum of a part covers every number, or only some. ``trained_from`` are steps by the ids of
    parameters.
    """
    names = {
        id(parameter): path.removeprefix("module.").split(".")[:-1]
        for model in models
        for path, parameter in model.named_parameters()
    }
    groups: dict[str, list[Tensor]] = {}
    for parameter in parameters:
        path = names.get(id(parameter), ["other parameters"])
        groups.setdefault(".".join(path[:PART_DEPTH]) or "the model", []).append(parameter)
    return tuple(
        ParameterPart(
            name=name,
            checksum=parameter_checksum(own if every_number else [*map(_some_numbers, own)]),
            sample=sample_parameters(own)[:PART_SAMPLES],
            trained_from=max(trained_from.get(id(parameter), 0) for parameter in own),
        )
        for name, own in groups.items()
    )


def _some_numbers(parameter: Tensor) -> Tensor:
    flat = parameter.detach().flatten()
    return flat[:: -(-flat.numel() // SAMPLED_VALUES) or 1]
