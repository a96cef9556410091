"""The catalogue of built-in and user workloads. Imports no framework."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from nfold.core import fingerprint
from nfold.core.errors import UnknownValue, UsageError
from nfold.core.workload import Workload
from nfold.workloads.workload_info import WorkloadInfo, inspect_user_workload

_PACKAGES = ("inception_v3", "conv2d")
NAMES = ("digits", "mnist", "cnn10", "wide_resnet", "inception_v3", "conv2d")


def info(name: str) -> WorkloadInfo:
    """Return the description of a workload; raises UnknownValue.

    A user workload ``module:function`` is inspected once, in a child process.
    """
    if ":" in name:
        return inspect_user_workload(name).to_workload_info(name)
    if name not in NAMES:
        raise UnknownValue("workload", name, (*NAMES, "MODULE:FUNCTION"))
    if name in _PACKAGES:
        workload_info = importlib.import_module(f"nfold.workloads.{name}").INFO
    else:
        workload_info = getattr(importlib.import_module("nfold.workloads.networks"), name.upper())
    assert isinstance(workload_info, WorkloadInfo)
    return workload_info


@dataclass(frozen=True)
class Network:
    """The model, optimizer and loss functions of a built-in workload in one library."""

    model: Callable[..., Any]
    optimizer: Callable[..., Any]
    loss: Callable[..., Any]


def network(name: str, library: str) -> Network:
    networks = importlib.import_module(f"nfold.workloads.{library}_networks")
    optimizer = partial(networks.create_optimizer, info(name))
    if name in _PACKAGES:
        module = importlib.import_module(f"nfold.workloads.{name}.{library}")
        return Network(module.model, optimizer, module.loss)
    return Network(getattr(networks, f"{name}_model"), optimizer, networks.cross_entropy)


def is_operation(workload: Workload) -> bool:
    """Return whether the workload is one timed computation instead of a training."""
    return workload.function_reference is None and info(workload.name).kind == "operation"


def with_fingerprint(workload: Workload) -> Workload:
    """Add the fingerprints of code, imports and environment variables to a workload."""
    variables = fingerprint.library_variables(os.environ)
    if workload.function_reference is None:
        return dataclasses.replace(workload, variables=variables)
    module, excluded = workload.function_reference[0], {name for name, _ in variables}
    imports, file = "", fingerprint.imported_file(module, os.getcwd())
    if file is not None:
        environment = {name: value for name, value in os.environ.items() if name not in excluded}
        imports = fingerprint.compute_fingerprint(file, (), environment, module=module)
    code = inspect_user_workload(workload.name).code
    return dataclasses.replace(workload, code=code, imports=imports, variables=variables)


def parameters(workload: Workload) -> dict[str, int]:
    """Return the values of all parameters; raises UnknownValue or UsageError."""
    workload_info = info(workload.name)
    values = {name: parameter.default for name, parameter in workload_info.parameters.items()}
    for name, value in workload.parameters:
        if name not in values:
            raise UnknownValue(f"parameter of {workload.name}", name, values)
        parameter = workload_info.parameters[name]
        minimum, maximum = parameter.minimum, parameter.maximum
        if value < minimum or (maximum is not None and value > maximum):
            upper = "" if maximum is None else f" to {maximum}"
            raise UsageError(
                f"parameter {name}={value} of {workload.name}: allowed are whole numbers from "
                f"{minimum}{upper}"
            )
        values[name] = value
    reason = workload_info.check_parameters(values)
    if reason is not None:
        raise UsageError(f"workload {str(workload)!r}: {reason}")
    return values
