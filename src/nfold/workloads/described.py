"""What the parent knows of a user's own workload, without importing it, and so without torch.

A short process (``describe.py``) imports it, calls it and says; it takes as long as the imports
and the data do.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass

from nfold.errors import UsageError
from nfold.lifeline import child_environment
from nfold.plain import deserialize
from nfold.plan import WorkloadDefaults
from nfold.workload import Workload
from nfold.workloads.base import WorkloadInfo, WorkloadParameter

MAX_PARAMETER = 10**18
FLOP_PER_PARAMETER = 6.0
"""Of training on one sample: a multiply-add forward, two backward. Convolutions take more."""


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
