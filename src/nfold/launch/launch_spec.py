"""What a supervisor starts, as values: a command, its environment, and the group of its ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nfold.core.errors import UsageError
from nfold.core.parent_death import child_environment
from nfold.core.plan import Plan
from nfold.core.script_profile import ReplayHints
from nfold.launch.handoff import HandoffFolder
from nfold.sandbox import session_environment

CPU_MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
"""Keeps freed tensors in glibc's heap (mallopt(3)) in ranks on CPU devices.

By default every tensor above 128 KiB goes back to the kernel when it is freed, and comes back
page by page; the page faults of several ranks contend (docs/decisions/measurement.md). What the user's
environment sets is left as it is.
"""

LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks of one node meet on the loopback interface and nowhere else."""


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The ranks that torchelastic starts on this node, in torchelastic's own words.

    ``command`` is what every rank runs, the program first. ``nodes`` is (fewest, most). The
    backend ``loopback`` is nfold's own, for one node; any other is torchelastic's.
    ``shutdown_timeout_s`` is how long a rank may go on after it was asked to end.
    """

    processes: int
    command: tuple[str, ...]
    nodes: tuple[int, int] = (1, 1)
    backend: str = "loopback"
    endpoint: str = ""
    run_id: str = "nfold"
    conf: dict[str, str] = field(default_factory=dict)
    node_rank: int | None = None
    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    shutdown_timeout_s: int = 2


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process tree: its root's command and environment, and what to expect of its ranks.

    ``environment`` is added to this process's own. ``processes`` counts the ranks of this node,
    ``batch`` the samples of a step (0: not known). With ``restarts``, a rank's failure is left
    to the agent. ``own_script`` is a user's: it may take any time before its first step, and is
    given ``stop_grace_s`` to end by itself when a request to stop has come. ``mark`` names the
    variable of ``environment`` whose value no other run's processes have. The agent of one that
    ``may_wait`` can have started before it.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    processes: int
    batch: int = 0
    restarts: bool = False
    is_user_script: bool = False
    stop_grace_s: float = 0.0
    marker_variable: str | None = None
    may_use_warm_agent: bool = False


AGENT_MODULE = "nfold.launch.agent"


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs one of nfold's own modules; -P: not the user's own csv.py."""
    return (sys.executable, "-P", "-m", module, *arguments)


MARKER_VARIABLE = "NFOLD_MEASUREMENT"
"""A variable that the processes of one script's measurement have, and no others."""


def spec_for_plan(
    folder: HandoffFolder, plan: Plan, processes: int, *, script: bool = False
) -> ProcessSpec:
    """A measurement: one process needs no rendezvous and is started directly, several by the agent.

    Leaves the group for the agent in the folder. A script keeps the threads that its
    environment asks for, and what it starts is found by its mark.
    """
    worker = module_command("nfold.launch.workload_process", str(folder.path))
    environment = rank_environment(plan.device or "cpu", plan.cores_per_device)
    if script:
        environment[MARKER_VARIABLE] = folder.path.name
        environment |= session_environment()
        environment |= {k: os.environ[k] for k in ("OMP_NUM_THREADS",) if k in os.environ}
    if processes == 1:
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        command = worker
    else:
        environment |= LOOPBACK_ENVIRONMENT
        command = agent_command(folder, RankGroup(processes=processes, command=worker))
    return ProcessSpec(
        command=command,
        environment=environment,
        processes=processes,
        batch=plan.batch or 0,
        marker_variable=MARKER_VARIABLE if script else None,
        # On CPU devices its start would take cores from ranks.
        may_use_warm_agent=processes > 1 and plan.device == "cuda",
    )


def agent_command(folder: HandoffFolder, group: RankGroup) -> tuple[str, ...]:
    """The agent's command; what it starts is handed over in the folder."""
    folder.write_group(group)
    return module_command(AGENT_MODULE, str(folder.path))


def rank_environment(device: str, cores: int | None) -> dict[str, str]:
    """What every rank on a kind of device finds in its environment; ``cores`` of a CPU device."""
    on_cpu = device == "cpu"
    found = {"OMP_NUM_THREADS": str(cores) if on_cpu else "1", "PYTHONUNBUFFERED": "1"}
    found |= {k: v for k, v in CPU_MALLOC_ENVIRONMENT.items() if on_cpu and k not in os.environ}
    if device == "cuda":
        found["CUDA_DEVICE_ORDER"] = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return found


class WarmAgent:
    """At most one agent that waits for a run of this process.

    The first starts with the first run that could have had one, and another whenever one is
    taken: beside the start of that run's ranks, before anything is timed.
    """

    def __init__(self) -> None:
        self._waiting: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the one that waits."""
        if self._waiting is not None:
            self._waiting.kill()
            self._waiting.communicate()
            self._waiting = None

    def take(
        self, folder: HandoffFolder, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | None:
        """The agent that waited, from now on that of ``folder``; None where there is none.

        ``environment`` is all that it is to have, and its ranks from it.
        """
        taken, self._waiting = self._waiting, _start_agent()
        if taken is None:
            return None
        assert taken.stdin is not None
        told = {"folder": str(folder.path.absolute()), "environment": dict(environment)}
        try:
            taken.stdin.write(json.dumps(told).encode() + b"\n")
            taken.stdin.close()
        except BrokenPipeError:  # somebody ended it
            taken.wait()
            return None
        return taken


def _start_agent() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        module_command(AGENT_MODULE),
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@dataclass
class StopRequest:
    """A request to stop, set by a signal handler and read by the supervisor.

    ``abort_notice`` returns what a user must know if nfold ends at once instead.
    """

    signum: int | None = None
    abort_notice: Callable[[], str] = lambda: ""

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
