"""``nfold bench``: a grid of measurements, a table, a report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def _axis(text: str) -> object:
    return typer.Option(metavar="LIST", help=text, rich_help_panel="Axes")


def command(
    workload: Annotated[
        str, typer.Argument(help="digits, mnist, cnn10, wide_resnet, conv2d, or NAME:KEY=N,...")
    ],
    devices: Annotated[str | None, _axis("Counts, 1,2,4 or cpu:1,cpu:2; all GPUs or 1.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.")] = None,
    batch: Annotated[str | None, _axis("Global batches, in samples.")] = None,
    strategy: Annotated[str | None, _axis("ddp, dp.")] = None,
    layout: Annotated[str | None, _axis("channels_first, channels_last.")] = None,
    precision: Annotated[str | None, _axis("fp32, tf32, bf16, fp16.")] = None,
    framework: Annotated[str | None, _axis("torch, simulated.")] = None,
    input_: Annotated[str | None, typer.Option("--input", metavar="LIST", help="loader.")] = None,
    augment: Annotated[str | None, _axis("cpu.")] = None,
    step: Annotated[str | None, _axis("eager.")] = None,
    workers: Annotated[str | None, _axis("Loader processes per rank.")] = None,
    seed: Annotated[str | None, _axis("Seeds.")] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="NAME=LIST", help="Workload parameter as axis."),
    ] = None,
    scaling: Annotated[str, typer.Option(help="strong: batch is global; weak: a device's.")] = (
        "strong"
    ),
    steps: Annotated[int | None, typer.Option(help="Length: timed steps, for throughput.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Length: epochs, with accuracy.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps before timing begins.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Fresh processes per cell, interleaved.")] = 1,
    again: Annotated[bool, typer.Option("--again", help="Measure what the store has anew.")] = (
        False
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the grid and its time.")] = (
        False
    ),
    results: Annotated[
        Path, typer.Option(envvar="NFOLD_RESULTS", help="Folder of the store.")
    ] = Path("nfold-results"),
    data: Annotated[
        Path | None, typer.Option(envvar="NFOLD_DATA", help="Folder of the data sets.")
    ] = None,
    telemetry_interval: Annotated[float, typer.Option(help="Seconds between samples.")] = 1.0,
    hang_timeout: Annotated[float, typer.Option(help="Seconds without a step: hung.")] = 60.0,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="One rank in this process, for a debugger.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No live line, no colour.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.")] = False,
) -> None:
    """Measure a grid of plans; print a table and write a report.

    Axes take comma lists; all combinations are measured, those that cannot be are rows with a
    reason. What the store has is not measured again. Exits 1 where a run crashed, hung, was
    killed or diverged; out of memory and unsupported are results.
    """
    from nfold.cli.benching import Request, bench

    lists = {
        "batch": batch,
        "strategy": strategy,
        "layout": layout,
        "precision": precision,
        "framework": framework,
        "input": input_,
        "augment": augment,
        "step": step,
        "workers": workers,
        "seed": seed,
    }
    request = Request(
        workload=workload,
        lists=lists,
        device=device,
        devices=devices,
        parameters=tuple(parameter or ()),
        scaling=scaling,
        fixed={"steps": steps, "epochs": epochs, "warmup_steps": warmup_steps},
        repeats=repeat,
        again=again,
        results=results,
        data=data,
        telemetry_interval_s=telemetry_interval,
        hang_timeout_s=hang_timeout,
        in_process=in_process,
        as_json=as_json,
        plain=plain or "NO_COLOR" in os.environ,
        report=not no_report,
    )
    raise typer.Exit(bench(request, dry_run=dry_run))
