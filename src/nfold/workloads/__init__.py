"""The catalogue of workloads, built-in ones and a user's own. Nothing heavy is imported here."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from nfold.core import fingerprint
from nfold.core.errors import UnknownValue, UsageError
from nfold.core.workload import Workload
from nfold.workloads.workload_info import WorkloadInfo, inspect_user_workload

_PACKAGES = ("inception_v3", "conv2d")
NAMES = ("digits", "mnist", "cnn10", "wide_resnet", "inception_v3", "conv2d")


def info(name: str) -> WorkloadInfo:
    """What the catalogue knows of a workload; UnknownValue lists the names, closest first.

    A user's own, ``module:function``, is asked in a process of its own, once.
    """
    if ":" in name:
        return inspect_user_workload(name).to_workload_info(name)
    if name not in NAMES:
        raise UnknownValue("workload", name, (*NAMES, "MODULE:FUNCTION"))
    if name in _PACKAGES:
        found = importlib.import_module(f"nfold.workloads.{name}").INFO
    else:
        found = getattr(importlib.import_module("nfold.workloads.networks"), name.upper())
    assert isinstance(found, WorkloadInfo)
    return found


@dataclass(frozen=True)
class Network:
    """The model, optimizer and loss functions of a built-in workload in one library."""

    model: Callable[..., Any]
    optimizer: Callable[..., Any]
    loss: Callable[..., Any]


def network(name: str, library: str) -> Network:
    """Return the functions of workload ``name`` for ``library``, ``torch`` or ``keras``."""
    if name in _PACKAGES:
        path, prefix = f"nfold.workloads.{name}.{library}", ""
    else:
        path, prefix = f"nfold.workloads.{library}_networks", f"{name}_"
    module = importlib.import_module(path)
    return Network(*(getattr(module, f"{prefix}{part}") for part in ("model", "optimizer", "loss")))


def is_operation(workload: Workload) -> bool:
    """Whether it is one timed computation and not a training; a user's own always trains."""
    return workload.function_reference is None and info(workload.name).kind == "operation"


def with_fingerprint(workload: Workload) -> Workload:
    """The workload with all that makes it what it is here and now, its written form apart."""
    variables = fingerprint.library_variables(os.environ)
    if workload.function_reference is None:
        return dataclasses.replace(workload, variables=variables)
    return dataclasses.replace(
        workload,
        code=inspect_user_workload(workload.name).code,
        imports=_imports_digest(workload.function_reference[0], {name for name, _ in variables}),
        variables=variables,
    )


def _imports_digest(module: str, excluded: Set[str]) -> str:
    file = fingerprint.imported_file(module, os.getcwd())
    if file is None:
        return ""
    environment = {name: value for name, value in os.environ.items() if name not in excluded}
    return fingerprint.compute_fingerprint(file, (), environment, module=module)


def parameters(workload: Workload) -> dict[str, int]:
    """All parameters of a workload, its own over the defaults; refuses what cannot be."""
    known = info(workload.name)
    values = {name: parameter.default for name, parameter in known.parameters.items()}
    for name, value in workload.parameters:
        if name not in values:
            raise UnknownValue(f"parameter of {workload.name}", name, values)
        _check_range(workload, name, value)
        values[name] = value
    reason = known.check_parameters(values)
    if reason is not None:
        raise UsageError(f"workload {str(workload)!r}: {reason}")
    return values


def _check_range(workload: Workload, name: str, value: int) -> None:
    parameter = info(workload.name).parameters[name]
    above = parameter.maximum is not None and value > parameter.maximum
    if value < parameter.minimum or above:
        upper = "" if parameter.maximum is None else f" to {parameter.maximum}"
        raise UsageError(
            f"parameter {name}={value} of {workload.name}: allowed are whole numbers from "
            f"{parameter.minimum}{upper}"
        )
