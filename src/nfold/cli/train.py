"""``nfold train``: a workload to the end, kept after every epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nfold.cli.bench import (
    AsJson,
    Data,
    Device,
    HangTimeout,
    Plain,
    SkipBad,
    TelemetryInterval,
)


def _field(name: str, meaning: str) -> Any:
    """A plan field: one value."""
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
    from nfold.cli.training import run_train
    from nfold.cli.training_plan import TrainOptions

    raise typer.Exit(run_train(TrainOptions(**options)))
