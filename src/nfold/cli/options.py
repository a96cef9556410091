"""Every option of the command line, declared once, and the values of options of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from nfold.bench.grid import GridAxes
    from nfold.launch.launch_spec import RunOptions

WORKLOADS = "digits, mnist, cnn10, wide_resnet, inception_v3"
OWN_WORKLOAD = "or your own, MODULE:FUNCTION; parameters: NAME:KEY=N,KEY=N."
PLAN, LENGTH, REPORT, STORE, OUTPUT, LAUNCH = (
    *("Plan", "Length and repeats", "Field reports", "Results and data"),
    *("Output and supervision", "Ranks and nodes"),
)


@dataclass(frozen=True)
class Option:
    """An option or argument: its type, default, help text and group in ``--help``."""

    type: Any
    default: Any
    help: str
    panel: str | None = None
    names: tuple[str, ...] = ()
    argument: bool = False
    more: dict[str, Any] | None = None

    def parameter(self, name: str) -> inspect.Parameter:
        """Return the parameter that Typer reads."""
        more = self.more or {}
        info: Any = (
            typer.Argument(help=self.help, **more)
            if self.argument
            else typer.Option(*self.names, help=self.help, rich_help_panel=self.panel, **more)
        )
        return inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=self.default,
            annotation=Annotated[self.type, info],
        )


def _flag(name: str, text: str, panel: str, **more: Any) -> Option:
    return Option(bool, False, text, panel, names=(name,), more=more or None)


def _value(name: str, text: str, panel: str = PLAN, metavar: str = "VALUE") -> Option:
    return Option(str | None, None, text, panel, names=(name,), more={"metavar": metavar})


def _seconds(default: float, text: str) -> Option:
    return Option(float, default, text, OUTPUT, more={"metavar": "SECONDS"})


def _integer(text: str, panel: str, default: int | None = None, **more: Any) -> Option:
    kind = int if default is not None else int | None
    return Option(kind, default, text, panel, more={"metavar": "N", **more})


def _path(text: str, panel: str, **more: Any) -> Option:
    return Option(Path | None, None, text, panel, more={"metavar": "PATH", **more})


def _torchrun(
    name: str, text: str, type_: Any = str | None, default: Any = None, **more: Any
) -> Option:
    variable = "PET_" + name.removeprefix("--").replace("-", "_").upper()
    names = (name, *more.pop("aliases", ()))
    more |= {"envvar": variable, "show_envvar": False}
    if type_ is not bool:
        more.setdefault("metavar", "VALUE")
    return Option(type_, default, text, LAUNCH, names=names, more=more)


def _refuse(value: str | None) -> None:
    if value is None:
        return
    from nfold.core.errors import UsageError

    raise UsageError(
        f"{', '.join(UNSUPPORTED_TORCHRUN_OPTIONS)}: options of torchrun that nfold does not have; "
        "the logs of all ranks are in --results, and --local-ranks-filter shows more of them; "
        "next: remove the option"
    )


UNSUPPORTED_TORCHRUN_OPTIONS = (
    *("--log-dir", "--redirects", "-r", "--tee", "-t", "--logs-specs"),
    *("--duplicate-stdout-filters", "--duplicate-stderr-filters", "--event-log-handler"),
    *("--role", "--local-addr", "--start-method", "--run-path", "--numa-binding"),
    *("--virtual-local-rank", "--signals-to-handle", "--shutdown-timeout"),
)
REPORT_NAMES = "conv2d-devices, mirrored-mnist, inception-input, cifar-scaling, layout"

PLAN_OPTIONS = {
    "devices": _value(
        "--devices", "Devices: N, cpu:N or gpu:N. Default: all GPUs, else 1 CPU device."
    ),
    "device": _value("--device", "Device type: cuda or cpu."),
    "batch": _value("--batch", "Global batch size in samples."),
    "accumulate": _value("--accumulate", "Micro-batches per step (gradient accumulation)."),
    "strategy": _value(
        "--strategy", "ddp, nfold (nfold's own all-reduce), dp, mirrored, data_parallel."
    ),
    "exchange": _value("--exchange", "Data type of the gradient all-reduce: fp32, bf16."),
    "batch_norm": _value(
        "--batch-norm", "Batch statistics per device or over all devices: device, synchronised."
    ),
    "layout": _value("--layout", "Memory format: channels_first, channels_last."),
    "precision": _value("--precision", "fp32, tf32, bf16, fp16."),
    "framework": _value("--framework", "torch, tensorflow, jax, keras-torch, simulated."),
    "input_": _value("--input", "Input pipeline: loader, resident, generator, tf.data."),
    "decode": _value("--decode", "Where image files are decoded: cpu, device (nvJPEG)."),
    "cache": _value("--cache", "Cache of image files: off, decoded (in host memory)."),
    "skip_bad": _flag("--skip-bad", "Skip damaged image files and count them.", PLAN),
    "augment": _value("--augment", "Where images are augmented: cpu, device."),
    "step": _value("--step", "eager, graph, compiled, captured (CUDA graph), compiled+captured."),
    "kernels": _value("--kernels", "Kernels of a compiled step: default, tuned."),
    "steps_per_execution": _value(
        "--steps-per-execution", "Steps per call (per CUDA graph, or in TensorFlow and JAX)."
    ),
    "allocation": _value("--allocation", "GPU memory allocation: default, growth."),
    "workers": _value("--workers", "Data loader workers per rank."),
    "seed": _value("--seed", "Random seed of weights and sample order."),
}
AXIS_OPTIONS = {
    name: replace(option, more={"metavar": "LIST"})
    if option.type is not bool and name != "device"
    else option
    for name, option in PLAN_OPTIONS.items()
}
"""Options of a plan that take a comma-separated list."""

SHARED_OPTIONS = {
    "again": _flag("--again", "Measure again instead of reusing stored results.", STORE),
    "results": Option(
        Path,
        Path("nfold-results"),
        "Results folder.",
        STORE,
        more={"metavar": "PATH", "envvar": "NFOLD_RESULTS"},
    ),
    "data": _path("Folder of the data sets.", STORE, envvar="NFOLD_DATA"),
    "telemetry_interval": _seconds(1.0, "Time between telemetry samples."),
    "hang_timeout": _seconds(60.0, "Report a hang after this time without a step."),
    "as_json": _flag("--json", "Print one JSON object.", OUTPUT),
    "plain": _flag("--plain", "No live line and no colour.", OUTPUT),
    "no_report": _flag("--no-report", "Do not write a report.", OUTPUT),
    "debug": _flag("--debug", "Show the traceback of an error.", OUTPUT),
}

BENCH_OPTIONS = {
    "workload": Option(str | None, None, f"{WORKLOADS}, conv2d, {OWN_WORKLOAD}", argument=True),
    **AXIS_OPTIONS,
    "parameter": Option(
        list[str] | None,
        None,
        "Workload parameter as an axis; repeatable.",
        PLAN,
        names=("--parameter", "-p"),
        more={"metavar": "NAME=LIST"},
    ),
    "scaling": Option(
        str,
        "strong",
        "--batch is global (strong) or per device (weak).",
        PLAN,
        more={"metavar": "VALUE"},
    ),
    "steps": _integer("Measure throughput over this many timed steps.", LENGTH),
    "epochs": _integer("Measure throughput and accuracy over this many epochs.", LENGTH),
    "warmup_steps": _integer("Steps before the timed steps.", LENGTH),
    "repeat": _integer(
        "Runs per cell, each in fresh processes, interleaved. Default: 1.", LENGTH, min=1
    ),
    "report": _value(
        "--report", f"Measure a field report instead of a workload: {REPORT_NAMES}.", REPORT, "NAME"
    ),
    "quick": _flag("--quick", "Small version of the field report, for two CPU cores.", REPORT),
    "dry_run": _flag("--dry-run", "Print the grid and its estimated time; run nothing.", OUTPUT),
    "in_process": _flag("--in-process", "Run one rank in this process, for a debugger.", OUTPUT),
    **{name: option for name, option in SHARED_OPTIONS.items() if name != "debug"},
}

TRAIN_OPTIONS = {
    "workload": Option(str, inspect.Parameter.empty, f"{WORKLOADS}, {OWN_WORKLOAD}", argument=True),
    **PLAN_OPTIONS,
    "epochs": _integer("Passes over the data. Default: set by the workload.", LENGTH),
    "checkpoint": _path("Checkpoint folder. Default: in the results folder.", STORE),
    "checkpoint_every": _integer("Epochs between checkpoints; 0: no checkpoints.", STORE, 1, min=0),
    "log_every": _integer("Steps between progress lines; 0: none.", OUTPUT, 0, min=0),
    **{k: v for k, v in SHARED_OPTIONS.items() if k not in ("debug", "no_report")},
    "again": _flag("--again", "Start over instead of resuming from the checkpoint.", STORE),
}

EXPLAIN_OPTIONS = {
    "target": Option(
        str | None,
        None,
        f"A script (train.py), {WORKLOADS}, conv2d, {OWN_WORKLOAD}",
        argument=True,
    ),
    "arguments": Option(
        list[str] | None,
        None,
        "Arguments of the script: everything after --, and options that nfold does not have.",
        argument=True,
        more={"metavar": "[--] ARGS"},
    ),
    "module": Option(
        bool, False, "TARGET is a module, as in python -m.", PLAN, names=("--module", "-m")
    ),
    **PLAN_OPTIONS,
    "devices": _value("--devices", "Devices: N, cpu:N or gpu:N. Default: all GPUs."),
    "scaling": Option(
        str | None,
        None,
        "--batch is global (strong) or per device (weak). Default: strong; weak for a script that "
        "starts a process group.",
        PLAN,
        more={"metavar": "VALUE"},
    ),
    "budget": Option(
        str, "3m", "Time limit of all runs: 90s, 3m, 1h.", LENGTH, more={"metavar": "TIME"}
    ),
    **{name: option for name, option in SHARED_OPTIONS.items() if name != "debug"},
    "details": _flag("--details", "Print every table.", OUTPUT),
    "show": _flag("--show", "Print the last explanation again; measure nothing.", OUTPUT),
}

RUN_OPTIONS = {
    "script": Option(
        str,
        inspect.Parameter.empty,
        "A Python file, or with -m a module.",
        argument=True,
        more={"metavar": "SCRIPT"},
    ),
    "arguments": Option(
        list[str] | None, None, "Arguments of the script.", argument=True, more={"metavar": "ARGS"}
    ),
    "nproc_per_node": _torchrun(
        "--nproc-per-node",
        "Ranks of this node: N, cpu:N, gpu:N, gpu, cpu, auto. Default: all GPUs, else 1.",
        aliases=("--devices",),
    ),
    "nnodes": _torchrun("--nnodes", "Nodes: N or MIN:MAX.", str, "1"),
    "node_rank": _torchrun(
        "--node-rank", "Rank of this node (static rendezvous).", int | None, min=0, metavar="N"
    ),
    "rdzv_backend": _torchrun("--rdzv-backend", "Rendezvous of several nodes: c10d, static."),
    "rdzv_endpoint": _torchrun("--rdzv-endpoint", "HOST:PORT of the rendezvous."),
    "rdzv_id": _torchrun("--rdzv-id", "Job id, the same on all nodes."),
    "rdzv_conf": _torchrun("--rdzv-conf", "NAME=VALUE,... of the rendezvous."),
    "master_addr": _torchrun("--master-addr", "Address of node 0 (static rendezvous)."),
    "master_port": _torchrun(
        "--master-port", "Port of node 0 (static rendezvous).", int | None, metavar="N"
    ),
    "standalone": _torchrun("--standalone", "Use this node only.", bool, False),
    "max_restarts": _torchrun(
        "--max-restarts", "Restarts after failures.", int, 0, min=0, metavar="N"
    ),
    "monitor_interval": _torchrun(
        "--monitor-interval", "Time between checks of the ranks.", float, 0.1, metavar="SECONDS"
    ),
    "local_ranks_filter": _torchrun(
        "--local-ranks-filter", "Ranks whose output is shown, such as 0,1. Default: 0."
    ),
    "module": _torchrun(
        "--module", "SCRIPT is a module, as in python -m.", bool, False, aliases=("-m",)
    ),
    "no_python": _torchrun("--no-python", "SCRIPT is any program.", bool, False),
    "unsupported_torchrun_option": Option(
        str | None,
        None,
        "",
        names=UNSUPPORTED_TORCHRUN_OPTIONS,
        more={"hidden": True, "callback": _refuse},
    ),
    "plan": Option(
        list[str] | None,
        None,
        "Plan field for nfold.Run; repeatable.",
        LAUNCH,
        names=("--plan",),
        more={"metavar": "NAME=VALUE"},
    ),
    "results": SHARED_OPTIONS["results"],
    "hang_timeout": SHARED_OPTIONS["hang_timeout"],
    "start_timeout": _seconds(
        300.0, "Report a hang before the first step if the ranks are idle for this time."
    ),
    "debug": SHARED_OPTIONS["debug"],
}

REPORT_OPTIONS = {
    "workload": Option(
        str | None, None, "Report only this workload, for example cnn10.", argument=True
    ),
    "results": SHARED_OPTIONS["results"],
    "html": _path("Write a self-contained page; - is standard output.", OUTPUT),
    "csv": _path("Write unrounded numbers; - is standard output.", OUTPUT),
    "md": _path("Write Markdown; - is standard output.", OUTPUT),
    "cell": _value("--cell", "Cell whose telemetry the page shows.", OUTPUT, "ID"),
    "field": _value("--report", f"Show as a field report: {REPORT_NAMES}.", OUTPUT, "NAME"),
    "as_json": SHARED_OPTIONS["as_json"],
}

ENV_OPTIONS = {"as_json": SHARED_OPTIONS["as_json"]}


def with_options(options: dict[str, Option]) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that gives a function ``(**options)`` the signature that Typer reads."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = [option.parameter(name) for name, option in options.items()]
        signed = cast(Any, function)
        signed.__signature__ = inspect.Signature(parameters)
        signed.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return decorate


class GroupedHelp(TyperCommand):
    """A command whose ``--help`` lists options by group, as plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                panel = getattr(parameter, "rich_help_panel", None)
                panels.setdefault(panel or ("Arguments" if is_argument else "Options"), []).append(
                    record
                )
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options that ``bench``, ``train`` and ``explain`` share, as given on the command line."""

    devices: str | None
    device: str | None
    batch: str | None
    accumulate: str | None
    strategy: str | None
    exchange: str | None
    batch_norm: str | None
    layout: str | None
    precision: str | None
    framework: str | None
    input_: str | None
    decode: str | None
    cache: str | None
    skip_bad: bool
    augment: str | None
    step: str | None
    kernels: str | None
    steps_per_execution: str | None
    allocation: str | None
    workers: str | None
    seed: str | None
    again: bool
    results: Path
    data: Path | None
    telemetry_interval: float
    hang_timeout: float
    as_json: bool
    plain: bool

    def __post_init__(self) -> None:
        from nfold.launch.launch_spec import check_positive_seconds

        check_positive_seconds(
            telemetry_interval=self.telemetry_interval, hang_timeout=self.hang_timeout
        )
        if self.device == "gpu":
            object.__setattr__(self, "device", "cuda")

    @property
    def axis_fields(self) -> dict[str, str | None]:
        """Plan fields that take a list, as text; None if an option is not given."""
        from nfold.bench.grid import LIST_AXES

        return {name: self.input_ if name == "input" else getattr(self, name) for name in LIST_AXES}

    @property
    def single_fields(self) -> dict[str, Any]:
        """The other plan fields that are given."""
        device = {"device": self.device} if self.device else {}
        return device | ({"bad_images": "skip"} if self.skip_bad else {})

    def plan_changes(self, axes: GridAxes, command: str) -> dict[str, Any]:
        """Return the given plan fields, with one value per axis; raises UsageError for a list."""
        from nfold.core.errors import UsageError

        found = self.single_fields
        for name, entries in axes.changes.items():
            if len(entries) != 1:
                flag = f"--{name.replace('_', '-')} {self.axis_fields[name]}"
                raise UsageError(
                    f"{flag}: nfold {command} takes one value; next: nfold bench measures a list"
                )
            found |= entries[0]
        return found

    def run_options(self, **more: Any) -> RunOptions:
        """Return the options of a run; ``more`` are further fields of RunOptions."""
        from nfold.launch.launch_spec import RunOptions

        return RunOptions(
            results=self.results,
            telemetry_interval_s=self.telemetry_interval,
            hang_timeout_s=self.hang_timeout,
            **more,
        )


def is_script_path(target: str) -> bool:
    """Return whether a target is the path of a Python script, existing or not."""
    return target.endswith(".py") or Path(target).is_file()


def refuse_script(command: str, workload: str | None) -> None:
    """Raise UsageError with the right command if ``workload`` is a script."""
    from nfold.core.errors import UsageError

    if workload is not None and is_script_path(workload):
        raise UsageError(
            f"{workload} is a script: nfold {command} takes a workload ({WORKLOADS}, or "
            f"MODULE:FUNCTION); next: nfold explain {workload}"
        )


def refuse_missing_suffix(target: str) -> None:
    """Raise UsageError if ``target`` is no workload and a script ``target.py`` exists."""
    from nfold import workloads
    from nfold.core.errors import UsageError

    if target not in workloads.NAMES and Path(f"{target}.py").is_file():
        raise UsageError(
            f"unknown workload {target!r}, but {target}.py exists; next: nfold explain {target}.py"
        )
