"""The causes, in the order in which their trials run."""

from __future__ import annotations

from nfold.explain.causes.cause import Cause
from nfold.explain.causes.collectives import LinkCause, NetworkCause, SynchronizationCause
from nfold.explain.causes.device_memory import MEMORY, LayoutCause
from nfold.explain.causes.epoch_boundary import EPOCH_BOUNDARY
from nfold.explain.causes.host_processes import THREADS, SingleProcessCause
from nfold.explain.causes.input_pipeline import CopiesCause, InputCause, StorageCause
from nfold.explain.causes.launch_bound import LaunchBoundCause
from nfold.explain.causes.work_division import ImbalanceCause, UndividedWorkCause
from nfold.explain.design import ExperimentDesign

CAUSES: tuple[Cause, ...] = (
    UndividedWorkCause(),
    SingleProcessCause(),
    LaunchBoundCause(),
    ImbalanceCause(),
    LinkCause(),
    InputCause(),
    THREADS,
    SynchronizationCause(),
    CopiesCause(),
    EPOCH_BOUNDARY,
    LayoutCause(),
    MEMORY,
    NetworkCause(),
    StorageCause(),
)

CAUSES_BY_ID = {cause.id: cause for cause in CAUSES}


def applicable_causes(design: ExperimentDesign) -> tuple[Cause, ...]:
    """Return the causes that the number of devices allows."""
    return tuple(cause for cause in CAUSES if design.devices > 1 or cause.affects_one_device)


__all__ = ["CAUSES", "CAUSES_BY_ID", "Cause", "applicable_causes"]
