"""User workloads: import the module, call the function, check the ``Training`` it returns.

    python -P -m nfold.workloads.user_workload MODULE:FUNCTION

calls the function with its defaults and prints ``UserWorkloadInfo`` or ``{"error": ...}`` as JSON.
Output of the module goes to standard error. Ranks import this file; the parent runs the command.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
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

from nfold.core.child_process import die_with_parent, take_stdout
from nfold.core.errors import UnknownValue, UsageError, closest_first
from nfold.core.image_augmentation import MAX_CHANNELS, check_augmentations
from nfold.core.serialization import serialize
from nfold.core.source_location import error_location
from nfold.core.workload import Training, Workload
from nfold.workloads.workload_info import UserWorkloadInfo, manual_command

Array = npt.NDArray[Any]
ArrayPair = tuple[Array, Array]  # samples [n, ...] and their targets [n, ...]

# dtypes that PyTorch computes slowly or not at all are converted
STORAGE_DTYPES = {"f8": "f4", "f16": "f4", "u2": "i4", "u4": "i8", "u8": "i8"}
EXPECTED_RETURN = "nfold.Training(model=..., train=(samples, targets), optimizer=lambda model: ...)"


@dataclass(frozen=True, kw_only=True)
class UserWorkload:
    """The returned ``Training`` with its data as arrays."""

    training: Training
    train: ArrayPair
    test: ArrayPair | None

    @property
    def has_images(self) -> bool:
        """Return whether the samples are uint8 images, to be augmented and normalised on the device."""
        samples = self.train[0]
        channels = samples.shape[-1] if samples.ndim == 4 else 0
        return samples.dtype == np.uint8 and 1 <= channels <= MAX_CHANNELS


def call_user_workload(workload: Workload) -> UserWorkload:
    """Import the module, call the function with the parameters and check the result.

    Raises UsageError, also for an exception in the user's code, with its file and line.
    """
    function = load_function(workload)
    if workload.code and workload.code != code_digest(workload):
        raise UsageError(f"the code of {workload} changed during the run; next: run it again")
    with translate_user_errors(workload):
        training = function(**dict(workload.parameters))
    if not isinstance(training, Training):
        raise UsageError(
            f"{workload} returned {_type_name(training)}; allowed is {EXPECTED_RETURN}"
        )
    try:
        return _check_training(training)
    except UsageError as error:
        raise UsageError(f"{workload}: {error}") from None


def load_function(workload: Workload) -> Callable[..., object]:
    """Import the workload's function; the working directory is on ``sys.path``."""
    assert workload.function_reference is not None
    module_name, name = workload.function_reference
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import_module(workload, module_name)
    function: Callable[..., object] | None = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownValue(f"function of {module_name}", name, functions)
    return function


def _import_module(workload: Workload, name: str) -> ModuleType:
    try:
        with translate_user_errors(workload, reraise=ModuleNotFoundError):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{name}.".startswith(f"{missing}."):
            location = error_location(error)
            raise UsageError(f"{workload}: {error} ({location}); next: install it") from error
    modules = closest_first(name, sorted(path.stem for path in Path.cwd().glob("*.py")))[:5]
    raise UsageError(
        f"no module {name!r}; modules in this folder: {', '.join(modules) or 'none'}; "
        "next: run nfold in the module's folder, or set PYTHONPATH"
    )


@contextmanager
def translate_user_errors(
    workload: Workload, reraise: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    """Convert exceptions of user code, except ``reraise``, to UsageError with the location."""
    try:
        yield
    except reraise:
        raise
    except (Exception, SystemExit) as error:
        lines, location = str(error).strip().splitlines(), error_location(error)
        reason = _type_name(error) + (f": {lines[0]}" if lines else "")
        where = f" ({location})" if location else ""
        raise UsageError(
            f"{workload}: {reason}{where}; next: {manual_command(workload)}"
        ) from error


def integer_parameters(workload: Workload, function: Callable[..., object]) -> dict[str, int]:
    defaults: dict[str, int] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            raise UsageError(f"{workload}: {name!r} has no default; next: {name}=1, an integer")
        if type(parameter.default) is int and parameter.kind is not parameter.POSITIONAL_ONLY:
            defaults[name] = parameter.default
    return defaults


def code_digest(workload: Workload) -> str:
    """Return 16 hex digits of the SHA-256 of the module's file, without its imports."""
    assert workload.function_reference is not None
    file = getattr(sys.modules[workload.function_reference[0]], "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else ""


def _check_training(training: Training) -> UserWorkload:
    train = _check_pair("train", training.train)
    test = None if training.test is None else _check_pair("test", training.test)
    if test is not None and _describe_array(test[0]) != _describe_array(train[0]):
        raise UsageError(
            f"test samples are {_describe_array(test[0])}, training samples are "
            f"{_describe_array(train[0])}; allowed are the same dtype and shape"
        )
    workload = UserWorkload(training=training, train=train, test=test)
    _check_fields(training)
    check_augmentations(training.augmentation)
    if training.augmentation and not workload.has_images:
        raise UsageError(
            f"augmentation of samples that are {_describe_array(train[0])}; allowed are uint8 "
            f"images [n, height, width, channels] with 1 to {MAX_CHANNELS} channels"
        )
    return workload


def _check_fields(training: Training) -> None:
    if not callable(getattr(training.model, "parameters", None)):
        raise UsageError(f"model is {_type_name(training.model)}; allowed is a torch.nn.Module")
    if not any(True for _ in training.model.parameters()):
        raise UsageError("model has no parameters to train")
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


def _check_pair(name: str, value: object) -> ArrayPair:
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise UsageError(f"{name} is {_type_name(value)}; allowed is a pair (samples, targets)")
    samples = _to_array(f"{name} samples", value[0])
    targets = _to_array(f"{name} targets", value[1])
    if len(samples) != len(targets) or not len(samples):
        raise UsageError(
            f"{name} has {len(samples)} samples and {len(targets)} targets; allowed are at least "
            "one sample and one target per sample"
        )
    if targets.ndim == 1 and targets.dtype.kind in "iu":
        targets = targets.astype(np.int64, copy=False)
    return samples, targets


def _to_array(label: str, value: object) -> Array:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{label} are {_type_name(value)}, not an array ({str(error).splitlines()[0]}); "
            "allowed are NumPy arrays and tensors on the CPU"
        ) from None
    if array.dtype.kind not in "biufc" or not array.ndim:
        raise UsageError(f"{label} are {_describe_array(array)}; allowed are numbers [n, ...]")
    dtype = array.dtype.newbyteorder("=")
    return array.astype(STORAGE_DTYPES.get(dtype.str[1:], dtype), copy=False)


def _describe_array(array: Array) -> str:
    return f"{array.dtype} [{', '.join(['n', *map(str, array.shape[1:])])}]"


def _type_name(value: object) -> str:
    return type(value).__name__


def main() -> None:
    die_with_parent()
    output = take_stdout()
    try:
        answer: Any = serialize(describe(Workload(name=sys.argv[1])))
    except UsageError as error:
        answer = {"error": str(error)}
    output.write(json.dumps(answer))
    output.close()


def describe(workload: Workload) -> UserWorkloadInfo:
    """Call the workload's function with its defaults, and create the optimizer as a check."""
    function = load_function(workload)
    parameters = integer_parameters(workload, function)
    loaded = call_user_workload(workload)
    training = loaded.training
    with translate_user_errors(workload):
        training.optimizer(training.model)
    return UserWorkloadInfo(
        code=code_digest(workload),
        summary=(inspect.getdoc(function) or "").split("\n")[0],
        parameters=parameters,
        samples=len(loaded.train[0]),
        data_bytes=sum(array.nbytes for array in loaded.train),
        parameter_count=sum(parameter.numel() for parameter in training.model.parameters()),
        batch=training.batch,
        epochs=training.epochs,
        augmentation=training.augmentation,
    )


if __name__ == "__main__":
    main()
