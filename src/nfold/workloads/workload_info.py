"""What a workload is, apart from any framework: its data, parameters, defaults and sources.

``workloads/<name>/__init__.py`` holds one ``INFO``; ``workloads/<name>/torch.py`` holds, for a
training workload, the functions of ``TorchTraining``.
"""

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
from nfold.core.parent_death import child_environment
from nfold.core.plan import Plan, WorkloadDefaults
from nfold.core.serialization import deserialize
from nfold.core.workload import Workload


@dataclass(frozen=True, kw_only=True)
class WorkloadParameter:
    """One integer that a user may set: ``wide_resnet:depth=16``."""

    default: int
    help: str
    minimum: int = 1
    maximum: int | None = None


# The parameter that every workload with a data set has
TRAIN_SAMPLES = WorkloadParameter(
    default=0, help="use only so many training samples; 0: all", minimum=0
)
TEST_SAMPLES = WorkloadParameter(
    default=0, help="evaluate on only so many test samples; 0: all", minimum=0
)
PEAK_RATE = WorkloadParameter(
    default=0,
    help="the learning rate's peak in thousandths, reached and left in one cycle; 0: fixed",
    minimum=0,
)
CUTOUT_SIDE = WorkloadParameter(
    default=0, help="side of the square that covers part of an image", minimum=0
)


@dataclass(frozen=True, kw_only=True)
class WorkloadInfo:
    """A workload as the catalogue knows it.

    ``kind`` is ``training`` (a model, a data set, epochs) or ``operation`` (one timed
    computation, split over the devices). ``dataset`` names a file of ``nfold.data``.
    ``augmentation`` is a tuple of (operation, argument): ("crop", 4) pads by 4 and crops at
    random, ("flip", 0) mirrors half of the images, ("cutout", 16) covers a square of 16 pixels.
    ``flop_per_sample`` is the cost of training on one sample (forward and backward, a
    multiply-add counts two), by parameters.
    """

    name: str
    summary: str
    source: str
    kind: Literal["training", "operation"] = "training"
    dataset: str | None = None
    training_samples: int = 0  # of the published training set; a copy may hold fewer
    parameters: Mapping[str, WorkloadParameter] = field(default_factory=dict)
    defaults: WorkloadDefaults
    augmentation: tuple[tuple[str, int], ...] = ()
    flop_per_sample: Callable[[Mapping[str, int]], float]
    # Why a combination of parameters is impossible, or None
    check_parameters: Callable[[Mapping[str, int]], str | None] = lambda _: None
    # Why a complete plan makes no sense for this workload, whatever the framework, or None
    unsupported: Callable[[Plan], str | None] = lambda _: None

    def augmentation_for(self, parameters: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """The augmentation under these parameters."""
        side = parameters.get("cutout", 0)
        return (*self.augmentation, ("cutout", side)) if side else self.augmentation


# What the parent knows of a user's own workload, without importing it, and so without torch.
#
# A short process (``describe.py``) imports it, calls it and says; it takes as long as the imports
# and the data do.

MAX_PARAMETER = 10**18
# Of training on one sample: a multiply-add forward, two backward. Convolutions take more.
FLOP_PER_PARAMETER = 6.0


@dataclass(frozen=True, kw_only=True)
class UserWorkloadInfo:
    """What the parent needs to know of a user's own workload, as plain values.

    ``parameters`` are the function's integer ones with their defaults; ``data_bytes`` are the
    training set's; ``weights`` counts the model's parameters.
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
        """The same as the catalogue has it of its own workloads."""
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
    """The workload ``module:function``, seen from the working directory; asked for once.

    Raises UsageError where the module cannot be imported or its function not be called.
    """
    return _inspect_cached(name, os.getcwd())


@functools.cache
def _inspect_cached(name: str, folder: str) -> UserWorkloadInfo:
    command = (sys.executable, "-P", "-m", "nfold.workloads.describe", name)
    done = subprocess.run(
        command,
        cwd=folder,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise UsageError(
            f"{name}: its process ended with {done.returncode}: {last[0]}; "
            f"next: {manual_command(Workload(name=name))}"
        )
    said = json.loads(done.stdout)
    if "error" in said:
        raise UsageError(said["error"])
    return deserialize(UserWorkloadInfo, said)


def manual_command(workload: Workload) -> str:
    """A command that shows what the user's function does, with its whole traceback."""
    module, _, function = workload.name.partition(":")
    given = ", ".join(f"{name}={value}" for name, value in workload.parameters)
    return f"python -c 'from {module} import {function}; {function}({given})'"
