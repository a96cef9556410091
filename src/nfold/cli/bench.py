"""``nfold bench``: a grid of measurements, a table, a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _axis(name: str, meaning: str) -> Any:
    """An option that takes a comma list."""
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
    from nfold.cli.benching import BenchOptions, run_bench

    raise typer.Exit(run_bench(BenchOptions(**options)))
