"""The process trees that the supervisor starts: commands, environments, groups of ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.core.script_profile import NO_LIBRARIES, LoadedLibraries, ReplayHints
from nfold.core.serialization import deserialize, serialize
from nfold.core.variant import NO_INTERVENTIONS, Variant
from nfold.launch.handoff import HandoffFolder
from nfold.launch.process_tree import ForkedProcess, is_child
from nfold.sandbox.overlay import PER_RANK, SHARED, STATE_VARIABLE, views_are_allowed

CPU_MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
# For ranks on CPU devices: keeps freed tensors in glibc's heap, see mallopt(3). By default a tensor
# above 128 KiB is returned to the kernel and comes back page by page; the page faults of several
# ranks contend (docs/decisions/measurement.md). Variables that the user has set are not changed.


LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The ranks that torchelastic starts on this node, with the arguments of its LaunchConfig.

    ``command`` is the command of each rank. ``nodes`` is (minimum, maximum). The backend
    ``loopback`` is nfold's own, for one node. After ``shutdown_timeout_s`` ranks that were asked to
    end are killed.
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
    """One process tree: command and environment of its root, and facts about its ranks.

    ``environment`` extends the environment of this process. ``processes`` counts the ranks of this
    node, ``batch`` the samples of a step (0: not known). With ``restarts`` the agent handles the
    failure of a rank. A user's script (``is_user_script``) may take any time before its first step
    in which it is active, and has ``stop_grace_s`` to end by itself after a request to stop. With
    ``reads_stdin`` the tree inherits the standard input of this process, and rank 0 may wait there
    for any time. ``library_environment`` is the part of the environment that all runs of an
    experiment have.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    processes: int
    batch: int = 0
    restarts: bool = False
    is_user_script: bool = False
    stop_grace_s: float = 0.0
    may_use_agent_server: bool = False
    reads_stdin: bool = False
    library_environment: Mapping[str, str] = field(default_factory=dict)


AGENT_MODULE = "nfold.launch.agent"
MAX_STARTS = 3  # of an AgentServer: before the libraries are known, with them, and once more
ANSWER_POLL_S = 0.1


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of nfold; -P: a csv.py of the user is not imported."""
    return (sys.executable, "-P", "-m", module, *arguments)


def spec_for_plan(
    folder: HandoffFolder,
    plan: Plan,
    processes: int,
    *,
    script: bool = False,
    variant: Variant = NO_INTERVENTIONS,
) -> ProcessSpec:
    """Return the process tree of a measurement; the agent starts its ranks if there are several.

    Writes the group for the agent into the folder. A script keeps its OMP_NUM_THREADS. Independent
    ranks do not see each other's files.
    """
    worker = module_command("nfold.launch.workload_process", str(folder.path))
    environment = rank_environment(plan.device or "cpu", plan.cores_per_device)
    if script:
        if views_are_allowed():
            environment[STATE_VARIABLE] = PER_RANK if variant.independent else SHARED
        environment |= {k: os.environ[k] for k in ("OMP_NUM_THREADS",) if k in os.environ}
    shared = {k: v for k, v in environment.items() if k != STATE_VARIABLE}
    if processes == 1:
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        command = worker
    else:
        environment |= LOOPBACK_ENVIRONMENT
        command = agent_command(folder, RankGroup(processes=processes, command=worker))
    environment |= variant.environment({**os.environ, **environment})
    return ProcessSpec(
        command=command,
        environment=environment,
        processes=processes,
        library_environment=shared,
        batch=plan.batch or 0,
        may_use_agent_server=plan.framework == "torch",
    )


def agent_command(folder: HandoffFolder, group: RankGroup) -> tuple[str, ...]:
    """Write the group into the folder and return the command of its agent."""
    folder.agent.write_group(group)
    return module_command(AGENT_MODULE, str(folder.path))


def rank_environment(device: str, cores: int | None) -> dict[str, str]:
    """Return the environment of a rank; ``cores`` is the number of cores of a CPU device."""
    on_cpu = device == "cpu"
    found = {"OMP_NUM_THREADS": str(cores) if on_cpu else "1", "PYTHONUNBUFFERED": "1"}
    found |= {k: v for k, v in CPU_MALLOC_ENVIRONMENT.items() if on_cpu and k not in os.environ}
    if device == "cuda":
        found["CUDA_DEVICE_ORDER"] = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return found


@dataclass(frozen=True, kw_only=True)
class WarmImports:
    """What an AgentServer imports before it forks the agents of runs.

    ``modules`` are those of the probe run. Before its end only the ``script`` is known: the process
    imports what its code imports from packages.
    """

    modules: tuple[str, ...] = ()
    script: str = ""


@dataclass(frozen=True, kw_only=True)
class WarmRequest:
    """A run whose agent is forked: its folder, and the whole environment of its ranks.

    ``libraries`` are imported before, if they are not yet. A run with one rank has its command: the
    agent becomes this rank.
    """

    folder: str
    environment: dict[str, str]
    libraries: LoadedLibraries
    rank_command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The answer to a WarmRequest: the agent's process, and why its ranks are no forks (if so).

    ``is_unfit``: what the process has imported forbids forks, whatever the variables of a run.
    """

    pid: int
    reason: str = ""
    is_unfit: bool = False


class AgentServer:
    """A process that has imported torch and other libraries, and starts the agent of each run by fork.

    It starts with the first run, which has an agent of its own. It is replaced if it has imported
    what a run does not, but starts ``MAX_STARTS`` times at most: its imports take a core. With
    ``script``, the file of one, it imports what this imports as soon as it starts. Runs that
    alternate share it.
    """

    def __init__(self, script: str = "") -> None:
        self._script = script
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None

    def start_agent(
        self,
        folder: HandoffFolder,
        launch: ProcessSpec,
        environment: Mapping[str, str],
        libraries: LoadedLibraries = NO_LIBRARIES,
        stop: StopRequest | None = None,
    ) -> ForkedProcess | None:
        """Start the agent of a run, a child of this process; None if none is ready.

        ``environment`` becomes the whole environment of the agent and its ranks. ``libraries`` are
        what the ranks will import. Needs ``adopt_orphans``. A request to ``stop`` ends the wait for
        imports.
        """
        with self._lock:
            started = None
            if self._server is not None:
                request = WarmRequest(
                    folder=str(folder.path.absolute()),
                    environment=dict(environment),
                    libraries=libraries,
                    rank_command=launch.command if launch.processes == 1 else (),
                )
                with contextlib.suppress(OSError):  # it was killed
                    _send(self._server, request)
                    started = _answer(self._server, stop or StopRequest())
            if started is not None and not is_child(started.pid):
                started = None  # nobody adopts orphans here; the agent ends by itself
            if started is None or started.is_unfit:
                self.close()
                if self._starts < MAX_STARTS:
                    self._starts += 1
                    self._server = self._start(launch.library_environment, libraries)
        return None if started is None else ForkedProcess(started.pid)

    def _start(
        self, environment: Mapping[str, str], libraries: LoadedLibraries
    ) -> subprocess.Popen[bytes]:
        server = subprocess.Popen(
            module_command(AGENT_MODULE),
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with contextlib.suppress(BrokenPipeError):  # found at the next request
            script = "" if libraries.modules else self._script
            _send(server, WarmImports(modules=libraries.modules, script=script))
        return server


def _send(server: subprocess.Popen[bytes], document: WarmImports | WarmRequest) -> None:
    """Write a line of JSON to a process. Raises BrokenPipeError if it has ended."""
    assert server.stdin is not None
    server.stdin.write(json.dumps(serialize(document)).encode() + b"\n")
    server.stdin.flush()


def _answer(server: subprocess.Popen[bytes], stop: StopRequest) -> WarmStart | None:
    """Wait for the answer to a request; None if the process has ended, or after a request to stop."""
    assert server.stdout is not None
    while not select.select([server.stdout], [], [], ANSWER_POLL_S)[0]:
        if stop:
            return None
    line = server.stdout.readline()
    return deserialize(WarmStart, json.loads(line)) if line.endswith(b"\n") else None


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
    """Progress of a run: steps done and planned (0: not known), rate, mean device load in %."""

    phase: str
    step: int
    total: int
    samples_per_s: float | None = None
    device_load: float | None = None


ProgressCallback = Callable[[RunProgress], None]
StartCallback = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run that do not change what is measured; times are in seconds.

    A run is interrupted after ``time_limit_s``, or up to ``hang_timeout_s`` later if all ranks stand
    still then. ``on_start`` receives the folder of the run before its ranks start. Training is saved
    to ``checkpoint_folder`` every ``checkpoint_every`` epochs, and resumed from it. ``replay_hints``
    and ``libraries``, which it imports, come from the probe run of a script.
    ``edited_sources`` are its files and edited copies that are run in their place. ``environment`` are
    variables of all ranks. A run of a script that ``alternates`` with another one waits between its
    slices for ``SliceFiles.allow``.
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
    agent_server: AgentServer | None = None
    replay_hints: ReplayHints = field(default_factory=ReplayHints)
    edited_sources: tuple[tuple[str, str], ...] = ()
    libraries: LoadedLibraries = NO_LIBRARIES
    environment: Mapping[str, str] = field(default_factory=dict)
    alternates: bool = False


def check_positive_seconds(**options: float) -> None:
    """Raise UsageError for the first of these command-line options that is not above 0."""
    for name, seconds in options.items():
        if not 0 < seconds < math.inf:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} {seconds}: allowed are seconds above 0")
