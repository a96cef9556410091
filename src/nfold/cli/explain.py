"""``nfold explain``: where the rest of N-fold went, by experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nfold.cli.bench import (
    AsJson,
    Data,
    Device,
    FrameworkAxis,
    HangTimeout,
    Plain,
    ResultsFolder,
    SkipBad,
    TelemetryInterval,
)
from nfold.cli.train import (
    Accumulate,
    Allocation,
    Augment,
    Batch,
    BatchNorm,
    Cache,
    Decode,
    Devices,
    Exchange,
    Input,
    Kernels,
    Layout,
    Precision,
    Seed,
    Step,
    StepsPerExecution,
    Strategy,
    Workers,
)

ExplainTarget = Annotated[
    str,
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
ExplainRemeasureFlag = Annotated[
    bool, typer.Option("--again", help="Measure what the store has anew.")
]
EXPLAIN_CONTEXT_SETTINGS = {"ignore_unknown_options": True}
"""An option that nfold does not have is the script's."""
ExplainNoReportFlag = Annotated[bool, typer.Option("--no-report", help="Write no report.")]


def explain_command(
    target: ExplainTarget,
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
    no_report: ExplainNoReportFlag = False,
) -> None:
    """Explain where the rest of N-fold went: what costs most, what to change, what to expect.

    The plan is run again and again with one thing left out, in fresh processes, in a random
    order, until the time budget is spent. What the store has is not measured again, so that the
    same command with a larger --budget goes on. A script is run unchanged, in a scratch folder
    of links, and stopped after enough steps: what it would write is counted, and not kept.
    """
    options = dict(locals())
    from nfold.cli.explaining import ExplainOptions, run_explain

    options["arguments"] = tuple(arguments or ())
    raise typer.Exit(run_explain(ExplainOptions(**options)))
