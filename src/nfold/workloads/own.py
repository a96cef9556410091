"""A user's own workload: its function is found and called, and what it returns is checked.

Every process that needs it imports the user's module: the ranks, and the short process that
describes it to the parent (``describe.py``). Here NumPy is imported, and what the module imports.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from nfold.errors import UnknownValue, UsageError, closest_first
from nfold.images import MOST_CHANNELS, check_operations
from nfold.place import user_place
from nfold.training import Training
from nfold.workload import Workload
from nfold.workloads.described import by_hand

Array = npt.NDArray[Any]
Part = tuple[Array, Array]
"""Samples [n, ...] and their targets [n, ...]."""

STORED = {"f8": "f4", "f16": "f4", "u2": "i4", "u4": "i8", "u8": "i8"}
"""Kinds of numbers that are kept as another one: PyTorch computes with the others only."""
SHAPE = "nfold.Training(model=..., train=(samples, targets), optimizer=lambda model: ...)"


@dataclass(frozen=True, kw_only=True)
class Own:
    """What the function returned, with its data as arrays that PyTorch can take."""

    training: Training
    train: Part
    test: Part | None

    @property
    def images(self) -> bool:
        """Whether the samples are stored images, to be augmented and normalised on the device."""
        samples = self.train[0]
        channels = samples.shape[-1] if samples.ndim == 4 else 0
        return samples.dtype == np.uint8 and 1 <= channels <= MOST_CHANNELS


def called(workload: Workload) -> Own:
    """Import the module, call the function with the parameters, check what it returns.

    Raises UsageError, also for whatever the user's code raises, with its file and line.
    """
    function = function_of(workload)
    if workload.code and workload.code != code_of(workload):
        raise UsageError(f"the code of {workload} changed while nfold ran; next: run it again")
    with theirs(workload):
        returned = function(**dict(workload.parameters))
    if not isinstance(returned, Training):
        kind = type(returned).__name__
        raise UsageError(f"{workload} returned {kind}; allowed is {SHAPE}")
    try:
        return _checked(returned)
    except UsageError as error:
        raise UsageError(f"{workload}: {error}") from None


def function_of(workload: Workload) -> Callable[..., object]:
    """The function that the workload names; the working directory is importable as for -m."""
    assert workload.reference is not None
    module_name, name = workload.reference
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _module(workload, module_name)
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownValue(f"function of {module_name}", name, own)
    found: Callable[..., object] = function
    return found


def _module(workload: Workload, name: str) -> ModuleType:
    """The user's module, imported."""
    try:
        with theirs(workload, passing=ModuleNotFoundError):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{name}.".startswith(f"{missing}."):
            place = user_place(error)
            raise UsageError(f"{workload}: {error} ({place}); next: install it") from error
    here = closest_first(name, sorted(path.stem for path in Path.cwd().glob("*.py")))[:5]
    raise UsageError(
        f"no module {name!r}: in this folder are {', '.join(here) or 'none'}; "
        "next: run nfold in the module's folder, or set PYTHONPATH"
    )


@contextmanager
def theirs(workload: Workload, passing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Run the user's code: what it raises, but for ``passing``, is a UsageError with its place."""
    try:
        yield
    except passing:
        raise
    except (Exception, SystemExit) as error:
        place = user_place(error)
        said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        where = f" ({place})" if place else ""
        raise UsageError(
            f"{workload}: {said.removesuffix(': ')}{where}; next: {by_hand(workload)}"
        ) from error


def parameters_of(workload: Workload, function: Callable[..., object]) -> dict[str, int]:
    """The function's parameters that are integers, and their defaults."""
    found: dict[str, int] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            raise UsageError(f"{workload}: {name!r} has no default; next: {name}=1, an integer")
        if type(parameter.default) is int and parameter.kind is not parameter.POSITIONAL_ONLY:
            found[name] = parameter.default
    return found


def code_of(workload: Workload) -> str:
    """16 hex digits of the SHA-256 of the module's file; its imports are not in it."""
    assert workload.reference is not None
    file = getattr(sys.modules[workload.reference[0]], "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else ""


def _checked(training: Training) -> Own:
    train = _part("train", training.train)
    test = None if training.test is None else _part("test", training.test)
    if test is not None and (test[0].shape[1:], test[0].dtype) != (
        train[0].shape[1:],
        train[0].dtype,
    ):
        raise UsageError(
            f"test samples are {_form(test[0])}, training samples {_form(train[0])}; "
            "allowed are two of the same form"
        )
    own = Own(training=training, train=train, test=test)
    _check_parts(training)
    _check_augmentation(own)
    return own


def _check_parts(training: Training) -> None:
    """What is not data: a model with parameters, functions, lengths."""
    if not callable(getattr(training.model, "parameters", None)):
        raise UsageError(f"model is {_kind(training.model)}; allowed is a torch.nn.Module")
    if not any(True for _ in training.model.parameters()):
        raise UsageError("model has no parameters: there is nothing to train")
    if not callable(training.optimizer):
        raise UsageError(
            f"optimizer is {_kind(training.optimizer)}; allowed is a function of the model: "
            "lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if not (training.loss is None or callable(training.loss)):
        raise UsageError(f"loss is {_kind(training.loss)}; allowed is a function or None")
    for name in ("batch", "epochs"):
        value = getattr(training, name)
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} {value!r}: allowed are whole numbers from 1")


def _check_augmentation(own: Own) -> None:
    check_operations(own.training.augmentation)
    if own.training.augmentation and not own.images:
        raise UsageError(
            f"augmentation of samples that are {_form(own.train[0])}; allowed are uint8 images "
            f"[n, height, width, channels] of 1 to {MOST_CHANNELS} channels"
        )


def _part(name: str, given: object) -> Part:
    """A pair of arrays of one length, at least 1; integer labels [n] become int64."""
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise UsageError(f"{name} is {_kind(given)}; allowed is a pair (samples, targets)")
    samples, targets = _array(f"{name} samples", given[0]), _array(f"{name} targets", given[1])
    if len(samples) != len(targets) or not len(samples):
        raise UsageError(
            f"{name} has {len(samples)} samples and {len(targets)} targets; allowed is one "
            "target a sample, and at least one of them"
        )
    if targets.ndim == 1 and targets.dtype.kind in "iu":
        targets = targets.astype(np.int64, copy=False)
    return samples, targets


def _array(what: str, given: object) -> Array:
    """An array or a tensor as an array of a kind of number that PyTorch computes with."""
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        said = str(error).splitlines()[0]
        raise UsageError(
            f"{what} are {_kind(given)}, not an array ({said}); allowed are NumPy arrays and "
            "tensors on the CPU"
        ) from None
    if found.dtype.kind not in "biufc" or not found.ndim:
        raise UsageError(f"{what} are {_form(found)}; allowed are numbers [n, ...]")
    kind = found.dtype.newbyteorder("=")
    return found.astype(STORED.get(kind.str[1:], kind), copy=False)


def _form(array: Array) -> str:
    return f"{array.dtype} [{', '.join(['n', *map(str, array.shape[1:])])}]"


def _kind(value: object) -> str:
    return type(value).__name__
