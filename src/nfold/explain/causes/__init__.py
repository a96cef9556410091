"""The causes, one file each, in the order in which their runs are wanted."""

from __future__ import annotations

from nfold.explain.causes.base import Cause
from nfold.explain.causes.copies import Copies
from nfold.explain.causes.epoch_boundary import EpochBoundary
from nfold.explain.causes.imbalance import Imbalance
from nfold.explain.causes.input import Input
from nfold.explain.causes.launch_bound import LaunchBound
from nfold.explain.causes.layout import Layout
from nfold.explain.causes.link import Link
from nfold.explain.causes.memory import Memory
from nfold.explain.causes.network import Network
from nfold.explain.causes.single_process import SingleProcess
from nfold.explain.causes.storage import Storage
from nfold.explain.causes.synchronization import Synchronization
from nfold.explain.causes.threads import Threads
from nfold.explain.causes.undivided_work import UndividedWork
from nfold.explain.ladder import Ladder

CAUSES: tuple[Cause, ...] = (
    UndividedWork(),
    SingleProcess(),
    LaunchBound(),
    Imbalance(),
    Link(),
    Input(),
    Threads(),
    Synchronization(),
    Copies(),
    EpochBoundary(),
    Layout(),
    Memory(),
    Network(),
    Storage(),
)

BY_ID = {cause.id: cause for cause in CAUSES}


def causes_of(ladder: Ladder) -> tuple[Cause, ...]:
    """Those that the plan's devices can have: one device has no others to lose anything to."""
    return tuple(cause for cause in CAUSES if ladder.devices > 1 or cause.of_one)


__all__ = ["BY_ID", "CAUSES", "Cause", "causes_of"]
