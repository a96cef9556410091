"""Description of a workload, independent of the framework: data, parameters, defaults, source."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from nfold.core.errors import UsageError
from nfold.core.plan import Plan, WorkloadDefaults
from nfold.core.serialization import deserialize
from nfold.core.workload import Workload


@dataclass(frozen=True, kw_only=True)
class WorkloadParameter:
    """An integer parameter, as in ``wide_resnet:depth=16``."""

    default: int
    help: str
    minimum: int = 1
    maximum: int | None = None


TRAIN_SAMPLES = WorkloadParameter(default=0, help="training samples; 0: all", minimum=0)
TEST_SAMPLES = WorkloadParameter(default=0, help="test samples; 0: all", minimum=0)
PEAK_RATE = WorkloadParameter(
    default=0,
    help="peak of the one-cycle learning rate in thousandths; 0: fixed learning rate",
    minimum=0,
)
CUTOUT_SIDE = WorkloadParameter(default=0, help="side of the cutout square in pixels", minimum=0)


@dataclass(frozen=True, kw_only=True)
class WorkloadInfo:
    """An entry of the catalogue.

    ``kind`` is ``training`` (a model, a data set, epochs) or ``operation`` (one timed computation,
    split over the devices). ``dataset`` is a name in ``nfold.data``. ``augmentation`` are pairs of
    operation and argument: ("crop", 4) pads by 4 and crops at random, ("flip", 0) mirrors half of
    the images, ("cutout", 16) covers a square of 16 pixels. ``flop_per_sample`` returns the
    operations of training on one sample (forward and backward; a multiply-add counts two).
    ``check_parameters`` and ``unsupported`` return why parameters or a complete plan are not
    possible, or None.
    """

    name: str
    summary: str
    source: str
    kind: Literal["training", "operation"] = "training"
    dataset: str | None = None
    training_samples: int = 0  # of the published training set; a copy may hold fewer
    parameters: Mapping[str, WorkloadParameter] = field(default_factory=dict)
    defaults: WorkloadDefaults
    learning_rate: float = 0.0  # of SGD; of a user workload, the function sets it
    weight_decay: float = 0.0
    augmentation: tuple[tuple[str, int], ...] = ()
    flop_per_sample: Callable[[Mapping[str, int]], float]
    check_parameters: Callable[[Mapping[str, int]], str | None] = lambda _: None
    unsupported: Callable[[Plan], str | None] = lambda _: None

    def augmentation_for(self, parameters: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        side = parameters.get("cutout", 0)
        return (*self.augmentation, ("cutout", side)) if side else self.augmentation


# A child process describes user workloads: the parent does not import torch.

MAX_PARAMETER = 10**18
FLOP_PER_PARAMETER = 6.0  # per sample: one multiply-add forward, two backward; dense layers only


@dataclass(frozen=True, kw_only=True)
class UserWorkloadInfo:
    """Description of a user workload, as the child process prints it.

    ``parameters`` are the function's integer parameters with their defaults; ``data_bytes`` is the
    size of the training set.
    """

    code: str
    summary: str
    parameters: dict[str, int]
    samples: int
    data_bytes: int
    parameter_count: int
    batch: int
    epochs: int
    augmentation: tuple[tuple[str, int], ...]

    def to_workload_info(self, name: str) -> WorkloadInfo:
        flop = FLOP_PER_PARAMETER * self.parameter_count
        return WorkloadInfo(
            name=name,
            summary=self.summary,
            source="your own",
            training_samples=self.samples,
            parameters={
                key: WorkloadParameter(default=value, help="your own", minimum=-MAX_PARAMETER)
                for key, value in self.parameters.items()
            },
            defaults=WorkloadDefaults(
                batch=self.batch, epochs=self.epochs, data_bytes=self.data_bytes
            ),
            augmentation=self.augmentation,
            flop_per_sample=lambda _: flop,
        )


def inspect_user_workload(name: str) -> UserWorkloadInfo:
    """Describe the workload ``module:function`` in a child process, once per working directory.

    Raises UsageError if the import or the call fails.
    """
    return _inspect_cached(name, os.getcwd())


@functools.cache
def _inspect_cached(name: str, folder: str) -> UserWorkloadInfo:
    completed = subprocess.run(
        (sys.executable, "-P", "-m", "nfold.workloads.user_workload", name),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if completed.returncode != 0:
        reason = (completed.stderr.strip().splitlines() or ["no error message"])[-1]
        raise UsageError(
            f"{name}: its process exited with code {completed.returncode}: {reason}; "
            f"next: {manual_command(Workload(name=name))}"
        )
    answer = json.loads(completed.stdout)
    if "error" in answer:
        raise UsageError(answer["error"])
    return deserialize(UserWorkloadInfo, answer)


def manual_command(workload: Workload) -> str:
    """Return a shell command that calls the user's function and shows the full traceback."""
    module, _, function = workload.name.partition(":")
    arguments = ", ".join(f"{name}={value}" for name, value in workload.parameters)
    return f"python -c 'from {module} import {function}; {function}({arguments})'"
