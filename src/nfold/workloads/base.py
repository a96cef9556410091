"""What a workload is, apart from any framework: its data, parameters, defaults and sources.

``workloads/<name>/__init__.py`` holds one ``INFO``; ``workloads/<name>/torch.py`` holds, for a
training workload, the functions of ``TorchTraining``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from nfold.plan import Plan, WorkloadDefaults


@dataclass(frozen=True, kw_only=True)
class WorkloadParameter:
    """One integer that a user may set: ``wide_resnet:depth=16``."""

    default: int
    help: str
    minimum: int = 1
    maximum: int | None = None


TRAIN_SAMPLES = WorkloadParameter(
    default=0, help="use only so many training samples; 0: all", minimum=0
)
"""The parameter that every workload with a data set has."""
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
    training_samples: int = 0
    """Of the published training set; a copy may hold fewer."""
    parameters: Mapping[str, WorkloadParameter] = field(default_factory=dict)
    defaults: WorkloadDefaults
    augmentation: tuple[tuple[str, int], ...] = ()
    flop_per_sample: Callable[[Mapping[str, int]], float]
    check_parameters: Callable[[Mapping[str, int]], str | None] = lambda _: None
    """Why a combination of parameters is impossible, or None."""
    unsupported: Callable[[Plan], str | None] = lambda _: None
    """Why a complete plan makes no sense for this workload, whatever the framework, or None."""

    def augmentation_for(self, parameters: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """The augmentation under these parameters."""
        side = parameters.get("cutout", 0)
        return (*self.augmentation, ("cutout", side)) if side else self.augmentation
