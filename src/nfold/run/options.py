"""What a run is told besides what to run, and what it tells while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nfold.errors import UsageError
from nfold.run.spare import WarmAgent
from nfold.seen import ReplayHints


@dataclass
class StopRequest:
    """A request to stop, set by a signal handler and read by whoever may wait."""

    signum: int | None = None

    def __bool__(self) -> bool:
        return self.signum is not None


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """A glance at a run: steps done and planned (0: not known), rate, mean device load in %."""

    phase: str
    step: int
    total: int
    samples_per_s: float | None = None
    device_load: float | None = None


ProgressCallback = Callable[[RunProgress], None]
StartCallback = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is watched over. ``results`` is the results folder; times are in seconds.

    A run that has not ended after ``limit_s`` is ended, and is interrupted; None: no run is.

    ``started`` is told the run's own folder before its ranks start. ``checkpoint`` is the folder
    that training is kept in every ``checkpoint_every`` epochs, and gone on from. ``spare`` keeps an
    agent waiting for the next run. ``learnt`` is what a first look at a script told.
    """

    results: Path
    telemetry_interval_s: float = 1.0
    hang_timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    time_limit_s: float | None = None
    in_process: bool = False
    stop: StopRequest = field(default_factory=StopRequest)
    on_progress: ProgressCallback = lambda progress: None
    on_start: StartCallback = lambda folder: None
    checkpoint_folder: Path | None = None
    checkpoint_every: int = 1
    warm_agent: WarmAgent | None = None
    replay_hints: ReplayHints = field(default_factory=ReplayHints)


def check_positive_seconds(**options: float) -> None:
    """UsageError for the first of these command-line options that is no time above 0."""
    for name, seconds in options.items():
        if not 0 < seconds < math.inf:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} {seconds}: allowed are seconds above 0")
