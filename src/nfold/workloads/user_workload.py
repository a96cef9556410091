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

from nfold.core.errors import UnknownValue, UsageError, closest_first
from nfold.core.image_augmentation import MAX_CHANNELS, check_augmentations
from nfold.core.source_location import error_location
from nfold.core.workload import Training, Workload
from nfold.workloads.workload_info import manual_command

Array = npt.NDArray[Any]
ArrayPair = tuple[Array, Array]  # samples [n, ...] and their targets [n, ...]

# Kinds of numbers that are kept as another one: PyTorch computes with the others only
STORAGE_DTYPES = {"f8": "f4", "f16": "f4", "u2": "i4", "u4": "i8", "u8": "i8"}
EXPECTED_RETURN = "nfold.Training(model=..., train=(samples, targets), optimizer=lambda model: ...)"


@dataclass(frozen=True, kw_only=True)
class UserWorkload:
    """What the function returned, with its data as arrays that PyTorch can take."""

    training: Training
    train: ArrayPair
    test: ArrayPair | None

    @property
    def has_images(self) -> bool:
        """Whether the samples are stored images, to be augmented and normalised on the device."""
        samples = self.train[0]
        channels = samples.shape[-1] if samples.ndim == 4 else 0
        return samples.dtype == np.uint8 and 1 <= channels <= MAX_CHANNELS


def call_user_workload(workload: Workload) -> UserWorkload:
    """Import the module, call the function with the parameters, check what it returns.

    Raises UsageError, also for whatever the user's code raises, with its file and line.
    """
    function = load_function(workload)
    if workload.code and workload.code != code_digest(workload):
        raise UsageError(f"the code of {workload} changed while nfold ran; next: run it again")
    with translate_user_errors(workload):
        returned = function(**dict(workload.parameters))
    if not isinstance(returned, Training):
        kind = type(returned).__name__
        raise UsageError(f"{workload} returned {kind}; allowed is {EXPECTED_RETURN}")
    try:
        return _check_training(returned)
    except UsageError as error:
        raise UsageError(f"{workload}: {error}") from None


def load_function(workload: Workload) -> Callable[..., object]:
    """The function that the workload names; the working directory is importable as for -m."""
    assert workload.function_reference is not None
    module_name, name = workload.function_reference
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import_module(workload, module_name)
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownValue(f"function of {module_name}", name, own)
    found: Callable[..., object] = function
    return found


def _import_module(workload: Workload, name: str) -> ModuleType:
    try:
        with translate_user_errors(workload, reraise=ModuleNotFoundError):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{name}.".startswith(f"{missing}."):
            place = error_location(error)
            raise UsageError(f"{workload}: {error} ({place}); next: install it") from error
    here = closest_first(name, sorted(path.stem for path in Path.cwd().glob("*.py")))[:5]
    raise UsageError(
        f"no module {name!r}: in this folder are {', '.join(here) or 'none'}; "
        "next: run nfold in the module's folder, or set PYTHONPATH"
    )


@contextmanager
def translate_user_errors(
    workload: Workload, reraise: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    """Run the user's code: what it raises, but for ``passing``, is a UsageError with its place."""
    try:
        yield
    except reraise:
        raise
    except (Exception, SystemExit) as error:
        place = error_location(error)
        said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        where = f" ({place})" if place else ""
        raise UsageError(
            f"{workload}: {said.removesuffix(': ')}{where}; next: {manual_command(workload)}"
        ) from error


def integer_parameters(workload: Workload, function: Callable[..., object]) -> dict[str, int]:
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


def code_digest(workload: Workload) -> str:
    """16 hex digits of the SHA-256 of the module's file; its imports are not in it."""
    assert workload.function_reference is not None
    file = getattr(sys.modules[workload.function_reference[0]], "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else ""


def _check_training(training: Training) -> UserWorkload:
    train = _check_pair("train", training.train)
    test = None if training.test is None else _check_pair("test", training.test)
    if test is not None and (test[0].shape[1:], test[0].dtype) != (
        train[0].shape[1:],
        train[0].dtype,
    ):
        raise UsageError(
            f"test samples are {_describe_array(test[0])}, training samples {_describe_array(train[0])}; "
            "allowed are two of the same form"
        )
    own = UserWorkload(training=training, train=train, test=test)
    _check_parts(training)
    _check_augmentation(own)
    return own


def _check_parts(training: Training) -> None:
    if not callable(getattr(training.model, "parameters", None)):
        raise UsageError(f"model is {_type_name(training.model)}; allowed is a torch.nn.Module")
    if not any(True for _ in training.model.parameters()):
        raise UsageError("model has no parameters: there is nothing to train")
    if not callable(training.optimizer):
        raise UsageError(
            f"optimizer is {_type_name(training.optimizer)}; allowed is a function of the model: "
            "lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if not (training.loss is None or callable(training.loss)):
        raise UsageError(f"loss is {_type_name(training.loss)}; allowed is a function or None")
    for name in ("batch", "epochs"):
        value = getattr(training, name)
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} {value!r}: allowed are whole numbers from 1")


def _check_augmentation(own: UserWorkload) -> None:
    check_augmentations(own.training.augmentation)
    if own.training.augmentation and not own.has_images:
        raise UsageError(
            f"augmentation of samples that are {_describe_array(own.train[0])}; allowed are uint8 images "
            f"[n, height, width, channels] of 1 to {MAX_CHANNELS} channels"
        )


def _check_pair(name: str, value: object) -> ArrayPair:
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise UsageError(f"{name} is {_type_name(value)}; allowed is a pair (samples, targets)")
    samples, targets = (
        _to_array(f"{name} samples", value[0]),
        _to_array(f"{name} targets", value[1]),
    )
    if len(samples) != len(targets) or not len(samples):
        raise UsageError(
            f"{name} has {len(samples)} samples and {len(targets)} targets; allowed is one "
            "target a sample, and at least one of them"
        )
    if targets.ndim == 1 and targets.dtype.kind in "iu":
        targets = targets.astype(np.int64, copy=False)
    return samples, targets


def _to_array(label: str, value: object) -> Array:
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        said = str(error).splitlines()[0]
        raise UsageError(
            f"{label} are {_type_name(value)}, not an array ({said}); allowed are NumPy arrays and "
            "tensors on the CPU"
        ) from None
    if found.dtype.kind not in "biufc" or not found.ndim:
        raise UsageError(f"{label} are {_describe_array(found)}; allowed are numbers [n, ...]")
    kind = found.dtype.newbyteorder("=")
    return found.astype(STORAGE_DTYPES.get(kind.str[1:], kind), copy=False)


def _describe_array(array: Array) -> str:
    return f"{array.dtype} [{', '.join(['n', *map(str, array.shape[1:])])}]"


def _type_name(value: object) -> str:
    return type(value).__name__
