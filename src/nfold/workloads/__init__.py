"""The catalogue of workloads, built-in ones and a user's own. Nothing heavy is imported here."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Set

from nfold import sources
from nfold.errors import UnknownValue, UsageError
from nfold.workload import Workload
from nfold.workloads.base import Info
from nfold.workloads.described import description

NAMES = ("digits", "mnist", "cnn10", "wide_resnet", "inception_v3", "conv2d")


def info(name: str) -> Info:
    """What the catalogue knows of a workload; UnknownValue lists the names, closest first.

    A user's own, ``module:function``, is asked in a process of its own, once.
    """
    if ":" in name:
        return description(name).info(name)
    if name not in NAMES:
        raise UnknownValue("workload", name, (*NAMES, "MODULE:FUNCTION"))
    found = importlib.import_module(f"nfold.workloads.{name}").INFO
    assert isinstance(found, Info)
    return found


def is_operation(workload: Workload) -> bool:
    """Whether it is one timed computation and not a training; a user's own always trains."""
    return workload.reference is None and info(workload.name).kind == "operation"


def identified(workload: Workload) -> Workload:
    """The workload with all that makes it what it is here and now, its written form apart."""
    variables = sources.variables(os.environ)
    if workload.reference is None:
        return dataclasses.replace(workload, variables=variables)
    return dataclasses.replace(
        workload,
        code=description(workload.name).code,
        imports=_imports(workload.reference[0], {name for name, _ in variables}),
        variables=variables,
    )


def _imports(module: str, apart: Set[str]) -> str:
    """What a module of the user's imports, and variables that it names but for those ``apart``."""
    file = sources.imported_file(module, os.getcwd())
    if file is None:
        return ""
    environment = {name: value for name, value in os.environ.items() if name not in apart}
    return sources.digest(file, (), environment, module=module)


def parameters(workload: Workload) -> dict[str, int]:
    """All parameters of a workload, its own over the defaults; refuses what cannot be."""
    known = info(workload.name)
    values = {name: parameter.default for name, parameter in known.parameters.items()}
    for name, value in workload.parameters:
        if name not in values:
            raise UnknownValue(f"parameter of {workload.name}", name, values)
        _check_range(workload, name, value)
        values[name] = value
    reason = known.check(values)
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
