"""``nfold run``: launch any script on all devices, supervised; torchrun's flags."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer


def _torchrun(*names: str, meaning: str, **more: Any) -> Any:
    """An option with torchrun's own name, and its ``PET_`` variable."""
    variable = "PET_" + names[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(*names, envvar=variable, show_envvar=False, help=meaning, **more)


OptionalText = str | None
ScriptTarget = Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file; -m: a module.")]
RunArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="The script's own, untouched.")
]
NprocPerNode = Annotated[
    OptionalText,
    _torchrun(
        "--nproc-per-node",
        "--devices",
        meaning="Ranks of this node: N, cpu:N, gpu, cpu, auto. Default: all GPUs, or 1.",
    ),
]
Nnodes = Annotated[str, _torchrun("--nnodes", meaning="Nodes: N or MIN:MAX.")]
NodeRank = Annotated[
    int | None, _torchrun("--node-rank", meaning="This node's place; static.", min=0)
]
RdzvBackend = Annotated[
    OptionalText, _torchrun("--rdzv-backend", meaning="Of several nodes: c10d, static.")
]
RdzvEndpoint = Annotated[
    OptionalText, _torchrun("--rdzv-endpoint", meaning="HOST:PORT to meet at.")
]
RdzvId = Annotated[OptionalText, _torchrun("--rdzv-id", meaning="The job's name, on all nodes.")]
RdzvConf = Annotated[
    OptionalText, _torchrun("--rdzv-conf", meaning="NAME=VALUE,... of the rendezvous.")
]
MasterAddr = Annotated[
    OptionalText, _torchrun("--master-addr", meaning="Address of node 0; static.")
]
MasterPort = Annotated[int | None, _torchrun("--master-port", meaning="Port of node 0; static.")]
Standalone = Annotated[bool, _torchrun("--standalone", meaning="One node, whatever else is said.")]
MaxRestarts = Annotated[int, _torchrun("--max-restarts", meaning="Restarts after failures.", min=0)]
MonitorInterval = Annotated[float, _torchrun("--monitor-interval", meaning="Seconds per check.")]
LocalRanksFilter = Annotated[
    OptionalText,
    _torchrun("--local-ranks-filter", meaning="Ranks to show, 0,1. Default: 0. All are logged."),
]
RunModuleFlag = Annotated[bool, _torchrun("--module", "-m", meaning="SCRIPT is a module's name.")]
NoPython = Annotated[bool, _torchrun("--no-python", meaning="SCRIPT is any program.")]


def _refuse(value: str | None) -> None:
    """Name what torchrun has and nfold run has not, and what there is instead."""
    if value is None:
        return
    from nfold.errors import UsageError

    raise UsageError(
        f"{', '.join(UNSUPPORTED_TORCHRUN_OPTIONS)} are torchrun's alone; every rank's log is kept in --results, "
        "--local-ranks-filter shows more of them; next: leave them out"
    )


UNSUPPORTED_TORCHRUN_OPTIONS = (
    *("--log-dir", "--redirects", "-r", "--tee", "-t", "--logs-specs"),
    *("--duplicate-stdout-filters", "--duplicate-stderr-filters", "--event-log-handler"),
    *("--role", "--local-addr", "--start-method", "--run-path", "--numa-binding"),
    *("--virtual-local-rank", "--signals-to-handle", "--shutdown-timeout"),
)
UnsupportedTorchrunOption = Annotated[
    OptionalText, typer.Option(*UNSUPPORTED_TORCHRUN_OPTIONS, hidden=True, callback=_refuse)
]
PlanFields = Annotated[
    list[str] | None,
    typer.Option("--plan", metavar="NAME=VALUE", help="A plan field for nfold.Run; repeatable."),
]
RunResultsFolder = Annotated[Path, typer.Option(envvar="NFOLD_RESULTS", help="Folder of the logs.")]
RunHangTimeout = Annotated[float, typer.Option(help="Seconds without a step of nfold.Run: hung.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]

CLI_ONLY_OPTIONS = ("debug", "torchrun_alone")
"""Options that the run itself does not know."""
RUN_CONTEXT_SETTINGS = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
"""Everything after SCRIPT belongs to it; flags may be written with _ as well."""


def run_command(
    script: ScriptTarget,
    arguments: RunArguments = None,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = "1",
    node_rank: NodeRank = None,
    rdzv_backend: RdzvBackend = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    rdzv_conf: RdzvConf = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    standalone: Standalone = False,
    max_restarts: MaxRestarts = 0,
    monitor_interval: MonitorInterval = 0.1,
    local_ranks_filter: LocalRanksFilter = None,
    module: RunModuleFlag = False,
    no_python: NoPython = False,
    torchrun_alone: UnsupportedTorchrunOption = None,
    plan: PlanFields = None,
    results: RunResultsFolder = Path("nfold-results"),
    hang_timeout: RunHangTimeout = 60.0,
    debug: Debug = False,
) -> None:
    """Launch a script on all devices and watch over it; torchrun's flags.

    Flags may be written with - or _; PET_NAME in the environment is heeded as by torchrun. Inside
    a running job (RANK and WORLD_SIZE are set) the script just runs as that rank.
    """
    options = {name: value for name, value in locals().items() if name not in CLI_ONLY_OPTIONS}
    options |= {"arguments": tuple(arguments or ()), "plan": tuple(plan or ())}
    from nfold.cli.running import launch_and_report
    from nfold.run.asked import TorchrunArgs

    try:
        raise typer.Exit(launch_and_report(TorchrunArgs(**options)))
    except Exception as error:
        if debug and not isinstance(error, typer.Exit):
            sys.stderr.write(traceback.format_exc())
        raise
