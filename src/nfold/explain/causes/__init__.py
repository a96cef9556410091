"""The causes, in the order in which their trials run."""

from __future__ import annotations

from nfold.explain.causes.cause import Cause
from nfold.explain.causes.collectives import LINK, NETWORK, SYNCHRONIZATION
from nfold.explain.causes.device_memory import LAYOUT, MEMORY
from nfold.explain.causes.epoch_boundary import EPOCH_BOUNDARY
from nfold.explain.causes.growing_work import GROWING_WORK
from nfold.explain.causes.host_processes import SINGLE_PROCESS, THREADS
from nfold.explain.causes.input_pipeline import COPIES, FIRST_EPOCH, INPUT, STORAGE
from nfold.explain.causes.launch_bound import LAUNCH_BOUND
from nfold.explain.causes.recompilation import RECOMPILATION
from nfold.explain.causes.work_division import IMBALANCE, UNDIVIDED_WORK
from nfold.explain.design import ExperimentDesign

CAUSES: tuple[Cause, ...] = (
    UNDIVIDED_WORK,
    SINGLE_PROCESS,
    LAUNCH_BOUND,
    IMBALANCE,
    LINK,
    INPUT,
    FIRST_EPOCH,
    THREADS,
    SYNCHRONIZATION,
    GROWING_WORK,
    COPIES,
    EPOCH_BOUNDARY,
    LAYOUT,
    RECOMPILATION,
    MEMORY,
    NETWORK,
    STORAGE,
)

CAUSES_BY_ID = {cause.id: cause for cause in CAUSES}


def applicable_causes(design: ExperimentDesign) -> tuple[Cause, ...]:
    """Return the causes that the number of devices allows."""
    return tuple(cause for cause in CAUSES if design.devices > 1 or cause.affects_one_device)


__all__ = ["CAUSES", "CAUSES_BY_ID", "Cause", "applicable_causes"]
