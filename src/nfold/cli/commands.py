"""``nfold bench``: a grid of measurements, a table, a report."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

import nfold
from nfold.cli import env_command, report_command


def _axis(name: str, meaning: str) -> Any:
    return typer.Option(f"--{name}", metavar="LIST", help=meaning)


def _flag(name: str, meaning: str) -> Any:
    return typer.Option(f"--{name}", help=meaning)


AxisText = str | None
BenchWorkload = Annotated[
    str | None,
    typer.Argument(
        help="digits, mnist, cnn10, wide_resnet, inception_v3, conv2d, or your own, "
        "MODULE:FUNCTION; then :KEY=N,..."
    ),
]
DevicesAxis = Annotated[AxisText, _axis("devices", "Counts, 1,2,4 or cpu:1,cpu:2; all GPUs or 1.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu.")]
BatchAxis = Annotated[AxisText, _axis("batch", "Global batches, in samples.")]
AccumulateAxis = Annotated[
    AxisText, _axis("accumulate", "Parts that a device computes its share of a batch in.")
]
StrategyAxis = Annotated[
    AxisText, _axis("strategy", "ddp, nfold (its own exchange), dp, mirrored, data_parallel.")
]
ExchangeAxis = Annotated[AxisText, _axis("exchange", "What gradients are sent as: fp32, bf16.")]
BatchNormAxis = Annotated[
    AxisText, _axis("batch-norm", "Over one device's samples or all: device, synchronised.")
]
LayoutAxis = Annotated[AxisText, _axis("layout", "channels_first, channels_last.")]
PrecisionAxis = Annotated[AxisText, _axis("precision", "fp32, tf32, bf16, fp16.")]
FrameworkAxis = Annotated[
    AxisText, _axis("framework", "torch, tensorflow, jax, keras-torch, simulated.")
]
InputAxis = Annotated[AxisText, _axis("input", "loader, resident, generator, tf.data.")]
DecodeAxis = Annotated[AxisText, _axis("decode", "Image files: cpu, device (nvJPEG).")]
CacheAxis = Annotated[
    AxisText, _axis("cache", "Of image files: off, decoded (in the host's memory).")
]
SkipBad = Annotated[bool, _flag("skip-bad", "Leave out damaged image files; count them.")]
AugmentAxis = Annotated[AxisText, _axis("augment", "cpu, device.")]
StepAxis = Annotated[
    AxisText, _axis("step", "eager, graph, compiled, captured (a CUDA graph), compiled+captured.")
]
KernelsAxis = Annotated[AxisText, _axis("kernels", "Of a compiled step: default, tuned.")]
StepsPerExecutionAxis = Annotated[
    AxisText,
    _axis("steps-per-execution", "Steps of one call: of one CUDA graph, on TensorFlow, on JAX."),
]
AllocationAxis = Annotated[
    AxisText, _axis("allocation", "Of GPU memory: default, growth (as needed).")
]
WorkersAxis = Annotated[AxisText, _axis("workers", "Loader processes per rank.")]
SeedAxis = Annotated[AxisText, _axis("seed", "Seeds.")]
Parameter = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", metavar="NAME=LIST", help="Workload parameter as axis."),
]
BenchScaling = Annotated[str, typer.Option(help="strong: batch is global; weak: a device's.")]
Steps = Annotated[int | None, typer.Option(help="Length: timed steps, for throughput.")]
BenchEpochs = Annotated[int | None, typer.Option(help="Length: epochs, with accuracy.")]
WarmupSteps = Annotated[int | None, typer.Option(help="Steps before timing begins.")]
Repeat = Annotated[
    int | None, typer.Option(min=1, help="Fresh processes per cell, interleaved; else 1.")
]
ReportName = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="NAME",
        help="Instead of a workload, a field report's fixed grid: conv2d-devices, "
        "mirrored-mnist, inception-input, cifar-scaling, layout.",
    ),
]
Quick = Annotated[bool, _flag("quick", "Of a field report: small, for a machine of two cores.")]
RemeasureFlag = Annotated[bool, _flag("again", "Measure what the store has anew.")]
DryRun = Annotated[bool, _flag("dry-run", "Print the grid and its time.")]
ResultsFolder = Annotated[Path, typer.Option(envvar="NFOLD_RESULTS", help="Folder of the store.")]
Data = Annotated[Path | None, typer.Option(envvar="NFOLD_DATA", help="Folder of the data sets.")]
TelemetryInterval = Annotated[float, typer.Option(help="Seconds between samples.")]
HangTimeout = Annotated[float, typer.Option(help="Seconds without a step: hung.")]
InProcess = Annotated[bool, _flag("in-process", "One rank in this process, for a debugger.")]
AsJson = Annotated[bool, _flag("json", "Print one JSON object.")]
Plain = Annotated[bool, _flag("plain", "No live line, no colour.")]
NoReportFlag = Annotated[bool, _flag("no-report", "Write no report.")]


def bench_command(
    workload: BenchWorkload = None,
    report: ReportName = None,
    quick: Quick = False,
    devices: DevicesAxis = None,
    device: Device = None,
    batch: BatchAxis = None,
    accumulate: AccumulateAxis = None,
    strategy: StrategyAxis = None,
    exchange: ExchangeAxis = None,
    batch_norm: BatchNormAxis = None,
    layout: LayoutAxis = None,
    precision: PrecisionAxis = None,
    framework: FrameworkAxis = None,
    input_: InputAxis = None,
    decode: DecodeAxis = None,
    cache: CacheAxis = None,
    skip_bad: SkipBad = False,
    augment: AugmentAxis = None,
    step: StepAxis = None,
    kernels: KernelsAxis = None,
    steps_per_execution: StepsPerExecutionAxis = None,
    allocation: AllocationAxis = None,
    workers: WorkersAxis = None,
    seed: SeedAxis = None,
    parameter: Parameter = None,
    scaling: BenchScaling = "strong",
    steps: Steps = None,
    epochs: BenchEpochs = None,
    warmup_steps: WarmupSteps = None,
    repeat: Repeat = None,
    again: RemeasureFlag = False,
    dry_run: DryRun = False,
    results: ResultsFolder = Path("nfold-results"),
    data: Data = None,
    telemetry_interval: TelemetryInterval = 1.0,
    hang_timeout: HangTimeout = 60.0,
    in_process: InProcess = False,
    as_json: AsJson = False,
    plain: Plain = False,
    no_report: NoReportFlag = False,
) -> None:
    """Measure a grid of plans; print a table and write a report.

    Axes take comma lists; all combinations are measured, those that cannot be are rows with a
    reason. What the store has is not measured again. With --report, devices and lengths replace the
    report's own, and an axis that it has keeps the values given. Exits 1 where a run crashed, hung,
    was killed or diverged; out of memory and unsupported are results.
    """
    # The context's own parameters are not converted by every version of typer; these are.
    options = dict(locals())
    from nfold.cli.bench_command import BenchOptions, run_bench

    raise typer.Exit(run_bench(BenchOptions(**options)))


def _field(name: str, meaning: str) -> Any:
    return typer.Option(f"--{name}", metavar="VALUE", help=meaning)


PlanFieldText = str | None
TrainWorkload = Annotated[
    str,
    typer.Argument(
        help="digits, mnist, cnn10, wide_resnet, inception_v3, or your own, MODULE:FUNCTION; "
        "then :KEY=N,..."
    ),
]
Devices = Annotated[PlanFieldText, _field("devices", "A count, 2 or cpu:2; all GPUs or 1.")]
Batch = Annotated[PlanFieldText, _field("batch", "The global batch, in samples.")]
Accumulate = Annotated[
    PlanFieldText, _field("accumulate", "Parts that a device computes its share of a batch in.")
]
Strategy = Annotated[
    PlanFieldText, _field("strategy", "ddp, nfold (its own exchange), dp, mirrored, data_parallel.")
]
Exchange = Annotated[PlanFieldText, _field("exchange", "What gradients are sent as: fp32, bf16.")]
BatchNorm = Annotated[
    PlanFieldText, _field("batch-norm", "Over one device's samples or all: device, synchronised.")
]
Layout = Annotated[PlanFieldText, _field("layout", "channels_first, channels_last.")]
Precision = Annotated[PlanFieldText, _field("precision", "fp32, tf32, bf16, fp16.")]
Decode = Annotated[PlanFieldText, _field("decode", "Image files: cpu, device (nvJPEG).")]
Cache = Annotated[
    PlanFieldText, _field("cache", "Of image files: off, decoded (in the host's memory).")
]
FrameworkName = Annotated[
    PlanFieldText, _field("framework", "torch, tensorflow, jax, keras-torch.")
]
Input = Annotated[PlanFieldText, _field("input", "loader, resident, generator, tf.data.")]
Augment = Annotated[PlanFieldText, _field("augment", "cpu, device.")]
Step = Annotated[
    PlanFieldText,
    _field("step", "eager, graph, compiled, captured (a CUDA graph), compiled+captured."),
]
Kernels = Annotated[PlanFieldText, _field("kernels", "Of a compiled step: default, tuned.")]
StepsPerExecution = Annotated[
    PlanFieldText,
    _field("steps-per-execution", "Steps of one call: of one CUDA graph, on TensorFlow, on JAX."),
]
Allocation = Annotated[
    PlanFieldText, _field("allocation", "Of GPU memory: default, growth (as needed).")
]
Workers = Annotated[PlanFieldText, _field("workers", "Loader processes per rank.")]
Seed = Annotated[PlanFieldText, _field("seed", "Of the weights and the order of samples.")]
TrainEpochs = Annotated[
    int | None, typer.Option(help="Passes over the data; else the workload's own.")
]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Folder of the checkpoints; else in the results folder.")
]
CheckpointEvery = Annotated[int, typer.Option(min=0, help="Epochs per checkpoint; 0: none.")]
LogEvery = Annotated[
    int, typer.Option(min=0, help="Print loss, images/s, s/batch every so many steps; 0: never.")
]
StartOverFlag = Annotated[bool, typer.Option("--again", help="Start over; do not go on.")]
TrainResultsFolder = Annotated[
    Path, typer.Option(envvar="NFOLD_RESULTS", help="Folder of the store.")
]


def train_command(
    workload: TrainWorkload,
    devices: Devices = None,
    device: Device = None,
    batch: Batch = None,
    accumulate: Accumulate = None,
    strategy: Strategy = None,
    exchange: Exchange = None,
    batch_norm: BatchNorm = None,
    layout: Layout = None,
    precision: Precision = None,
    framework: FrameworkName = None,
    input_: Input = None,
    decode: Decode = None,
    cache: Cache = None,
    skip_bad: SkipBad = False,
    augment: Augment = None,
    step: Step = None,
    kernels: Kernels = None,
    steps_per_execution: StepsPerExecution = None,
    allocation: Allocation = None,
    workers: Workers = None,
    seed: Seed = None,
    epochs: TrainEpochs = None,
    checkpoint: Checkpoint = None,
    checkpoint_every: CheckpointEvery = 1,
    log_every: LogEvery = 0,
    again: StartOverFlag = False,
    results: TrainResultsFolder = Path("nfold-results"),
    data: Data = None,
    telemetry_interval: TelemetryInterval = 1.0,
    hang_timeout: HangTimeout = 60.0,
    as_json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Train a workload to the end, a built-in one or your own; keep it after every epoch.

    The plan is that of nfold.toml in the working directory, where there is one; flags come
    before it. The same command, run again after an interruption, goes on after the last
    epoch that was kept, with the same result as without the interruption.
    """
    options = dict(locals())
    from nfold.cli.train_command import TrainOptions, run_train

    raise typer.Exit(run_train(TrainOptions(**options)))


ExplainTarget = Annotated[
    str | None,
    typer.Argument(
        help="A script (train.py), digits, mnist, cnn10, wide_resnet, inception_v3, conv2d, or "
        "your own workload, MODULE:FUNCTION; then :KEY=N,..."
    ),
]
ExplainArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[--] ARGS", help="A script's own: all behind --, and what is no option."
    ),
]
ExplainModuleFlag = Annotated[
    bool,
    typer.Option("--module", "-m", help="TARGET is a module, which python -m would run."),
]
ExplainScaling = Annotated[
    str | None,
    typer.Option(
        help="strong: the batch is global; weak: a device's. Default: strong; for a script that "
        "starts a process group weak, as it is written."
    ),
]
TimeBudget = Annotated[str, typer.Option(metavar="TIME", help="Time for all runs: 90s, 3m, 1h.")]
ExplainRemeasureFlag = Annotated[bool, typer.Option("--again", help="Repeat stored measurements.")]
EXPLAIN_CONTEXT_SETTINGS = {"ignore_unknown_options": True}
"""An option that nfold does not have is the script's."""
ExplainDetailsFlag = Annotated[bool, typer.Option("--details", help="Print every table.")]
ExplainShowFlag = Annotated[
    bool, typer.Option("--show", help="Print the last explanation again; measure nothing.")
]
ExplainNoReportFlag = Annotated[bool, typer.Option("--no-report", help="Write no report.")]


def explain_command(
    target: ExplainTarget = None,
    arguments: ExplainArguments = None,
    module: ExplainModuleFlag = False,
    devices: Devices = None,
    device: Device = None,
    batch: Batch = None,
    scaling: ExplainScaling = None,
    budget: TimeBudget = "3m",
    accumulate: Accumulate = None,
    strategy: Strategy = None,
    exchange: Exchange = None,
    batch_norm: BatchNorm = None,
    layout: Layout = None,
    precision: Precision = None,
    framework: FrameworkAxis = None,
    input_: Input = None,
    decode: Decode = None,
    cache: Cache = None,
    skip_bad: SkipBad = False,
    augment: Augment = None,
    step: Step = None,
    kernels: Kernels = None,
    steps_per_execution: StepsPerExecution = None,
    allocation: Allocation = None,
    workers: Workers = None,
    seed: Seed = None,
    again: ExplainRemeasureFlag = False,
    results: ResultsFolder = Path("nfold-results"),
    data: Data = None,
    telemetry_interval: TelemetryInterval = 1.0,
    hang_timeout: HangTimeout = 60.0,
    as_json: AsJson = False,
    plain: Plain = False,
    details: ExplainDetailsFlag = False,
    show: ExplainShowFlag = False,
    no_report: ExplainNoReportFlag = False,
) -> None:
    """Find what costs most of a step, which line to change, and what the change gains.

    Runs the training several times with one thing changed each time, in fresh processes and in
    random order, until the time budget is spent. Stored measurements are used again: the same
    command with a larger --budget continues. A script runs unchanged in a scratch copy of its
    folder; files that it writes are discarded.
    """
    options = dict(locals())
    from nfold.cli.explain_command import ExplainOptions, run_explain

    options["arguments"] = tuple(arguments or ())
    raise typer.Exit(run_explain(ExplainOptions(**options)))


def _torchrun(*names: str, meaning: str, **more: Any) -> Any:
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
    if value is None:
        return
    from nfold.core.errors import UsageError

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
    from nfold.cli.run_command import launch_and_report
    from nfold.launch.torchrun_args import TorchrunArgs

    try:
        raise typer.Exit(launch_and_report(TorchrunArgs(**options)))
    except Exception as error:
        if debug and not isinstance(error, typer.Exit):
            sys.stderr.write(traceback.format_exc())
        raise


app = typer.Typer(
    name="nfold",
    help="Make N devices N-fold faster: benchmark, see what is missing, and why.",
    epilog="Exit codes: 0 ok, 1 a run failed, 2 usage, 3 threshold not met, 4 machine unfit.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("env")(env_command.env_command)
app.command("bench")(bench_command)
app.command("train")(train_command)
app.command("run", context_settings=RUN_CONTEXT_SETTINGS)(run_command)
app.command("explain", context_settings=EXPLAIN_CONTEXT_SETTINGS)(explain_command)
app.command("report")(report_command.report_command)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"nfold {nfold.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options of every command; both are dealt with before a command runs."""
