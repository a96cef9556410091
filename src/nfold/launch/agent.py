"""The agent process: starts the ranks of this node under torchelastic.

``python -m nfold.launch.agent FOLDER`` is a separate process, so that the parent never imports
torch. Without FOLDER it imports the libraries of a first line of JSON on its input, a WarmImports.
For each further line, a WarmRequest, it forks the agent of a run and prints a WarmStart. It exits at
the end of its input.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from nfold.core.child_process import die_with_parent, empty_stdin, take_stdout
from nfold.core.serialization import deserialize, serialize
from nfold.launch import warm_process
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RankGroup, WarmImports, WarmRequest, WarmStart
from nfold.launch.rank_lifecycle import redirect_output
from nfold.launch.torchrun_args import own_address
from nfold.sandbox import enter_view
from nfold.sandbox.overlay import PER_RANK, SHARED, STATE_VARIABLE

TORCH_LAUNCHER = "torch.distributed.launcher.api"


def main() -> None:
    """Start the ranks, wait for them and write their exit codes."""
    die_with_parent()
    folder = HandoffFolder(Path(sys.argv[1])) if sys.argv[1:] else _serve_runs()
    if os.environ.get(STATE_VARIABLE) == SHARED:
        enter_view(folder.sandbox)
    sys.exit(launch_ranks(folder, deserialize(RankGroup, folder.agent.read_group())))


def _serve_runs() -> HandoffFolder:
    """Fork a process for each run. Returns in one with several ranks; one with one rank is it."""
    wanted = deserialize(WarmImports, json.loads(sys.stdin.readline() or "{}"))
    started, parent = dict(os.environ), os.getppid()
    os.environ.setdefault(warm_process.NVML_CHECK, "1")
    answers = take_stdout()
    importlib.import_module(TORCH_LAUNCHER)
    warm_process.import_libraries(wanted.modules)
    imported = {*wanted.modules}
    if wanted.script:
        imported |= warm_process.import_libraries_of(wanted.script)
    for line in sys.stdin:
        request = deserialize(WarmRequest, json.loads(line))
        warm_process.import_libraries(request.libraries.modules)
        of_run = warm_process.different_variables(started, request)
        of_process = warm_process.reason_against_forks(request, imported)
        reason = of_run or of_process
        imported.update(request.libraries.modules)
        pid = warm_process.fork_orphan()
        if pid == 0:
            answers.close()
            die_with_parent()
            if os.getppid() != parent:  # it ended before
                os._exit(1)
            return _begin_run(request, reason)
        answer = WarmStart(pid=pid, reason=reason, is_unfit=bool(of_process))
        answers.write(json.dumps(serialize(answer)) + "\n")
        answers.flush()
    sys.exit(0)


def _begin_run(request: WarmRequest, reason: str) -> HandoffFolder:
    """Become the agent of a run; ``reason``: why its ranks cannot be forks, if so."""
    empty_stdin()
    os.environ.clear()
    os.environ.update(request.environment)
    folder = HandoffFolder(Path(request.folder))
    redirect_output(folder.agent_log)
    if reason:
        sys.stderr.write(f"nfold: ranks start as new programs, not as forks: {reason}\n")
    else:
        os.environ.update(request.libraries.variables)
    if request.rank_command:
        if reason or os.environ.get(STATE_VARIABLE) == PER_RANK:
            os.execve(request.rank_command[0], request.rank_command, os.environ)  # noqa: S606
        if os.environ.get(STATE_VARIABLE) == SHARED:
            enter_view(folder.sandbox)
        warm_process.become_rank(request.rank_command)
    if not reason:
        fork_ranks()
    return folder


def fork_ranks() -> None:
    """Let torchelastic fork the ranks of a workload in this process; other programs start as before.

    torchelastic then asks for GPUs without starting one.
    """
    unasked = warm_process.NVML_CHECK not in os.environ
    os.environ.setdefault(warm_process.NVML_CHECK, "1")
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    start_program = SubprocessHandler._popen

    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if unasked:
            env.pop(warm_process.NVML_CHECK, None)
        if warm_process.is_rank(args):
            return warm_process.ForkedRank(args, env)
        return start_program(handler, args, env)

    SubprocessHandler._popen = start  # type: ignore[assignment, method-assign]


def launch_ranks(folder: HandoffFolder, group: RankGroup) -> int:
    """Run the ranks under torchelastic; returns 0 if all succeeded, 1 or 128 + signal if not."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from nfold.launch.rendezvous import OWN_BACKEND, register_backends

    register_backends()
    # Versions of torch without a field in LaunchConfig read this variable.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(group.shutdown_timeout_s)
    own_rank = {} if group.node_rank is None else {"rank": group.node_rank}
    config = LaunchConfig(
        min_nodes=group.nodes[0],
        max_nodes=group.nodes[1],
        nproc_per_node=group.processes,
        run_id=group.run_id,
        rdzv_backend=OWN_BACKEND if group.backend in ("loopback", "static") else group.backend,
        rdzv_endpoint=group.endpoint,
        rdzv_configs={**group.conf, **own_rank},
        max_restarts=group.max_restarts,
        monitor_interval=group.monitor_interval_s,
        local_addr=own_address(group.endpoint) if group.endpoint else None,
    )
    if hasattr(config, "numa_options"):
        # Newer torch binds ranks to NUMA nodes, but only if N is the number of GPUs: then N = all
        # GPUs would not be comparable with fewer.
        config.numa_options = None
    program, *arguments = group.command
    try:
        elastic_launch(config, program)(*arguments)
    except ChildFailedError as error:
        folder.agent.write_exit_codes({rank: f.exitcode for rank, f in error.failures.items()})
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    except RendezvousError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    main()
