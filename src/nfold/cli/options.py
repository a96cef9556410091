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
REQUIRED = inspect.Parameter.empty
OWN_WORKLOAD = "or your own, MODULE:FUNCTION; parameters: NAME:KEY=N,KEY=N."
PLAN, LENGTH, REPORT, STORE, OUTPUT, LAUNCH = (
    *("Plan", "Length and repeats", "Field reports", "Results and data"),
    *("Output and supervision", "Ranks and nodes"),
)


@dataclass(frozen=True)
class Option:
    """An option or argument: its type, default, help text and group in ``--help``.

    Without ``names`` it is named after its key in the table. ``{}`` in ``envvar`` is the key.
    """

    type: Any
    default: Any
    help: str
    panel: str | None = None
    names: tuple[str, ...] = ()
    argument: bool = False
    more: dict[str, Any] | None = None

    def parameter(self, name: str) -> inspect.Parameter:
        """Return the parameter that Typer reads."""
        more = dict(self.more or {})
        if self.argument:
            info: Any = typer.Argument(help=self.help, **more)
        else:
            names = self.names or (f"--{name.replace('_', '-')}", *more.pop("aliases", ()))
            if "envvar" in more:
                more["envvar"] = more["envvar"].format(name.upper())
            info = typer.Option(*names, help=self.help, rich_help_panel=self.panel, **more)
        return inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=self.default,
            annotation=Annotated[self.type, info],
        )


def _flag(text: str, panel: str, *names: str) -> Option:
    return Option(bool, False, text, panel, names)


def _argument(
    text: str, type_: Any = str | None, default: Any = None, metavar: str | None = None
) -> Option:
    return Option(type_, default, text, argument=True, more={"metavar": metavar})


def _value(
    text: str, panel: str = PLAN, metavar: str = "VALUE", *names: str, default: str | None = None
) -> Option:
    kind = str if default is not None else str | None
    return Option(kind, default, text, panel, names, more={"metavar": metavar})


def _list(text: str, panel: str, metavar: str, *names: str) -> Option:
    return Option(list[str] | None, None, text, panel, names, more={"metavar": metavar})


def _seconds(default: float, text: str) -> Option:
    return Option(float, default, text, OUTPUT, more={"metavar": "SECONDS"})


def _integer(text: str, panel: str, default: int | None = None, **more: Any) -> Option:
    kind = int if default is not None else int | None
    return Option(kind, default, text, panel, more={"metavar": "N", **more})


def _path(text: str, panel: str, default: Path | None = None, **more: Any) -> Option:
    kind = Path if default is not None else Path | None
    return Option(kind, default, text, panel, more={"metavar": "PATH", **more})


def _torchrun(text: str, type_: Any = str | None, default: Any = None, **more: Any) -> Option:
    more = {"envvar": "PET_{}", "show_envvar": False, **more}
    if type_ is not bool:
        more.setdefault("metavar", "VALUE")
    return Option(type_, default, text, LAUNCH, more=more)


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
    "devices": _value("Devices: N, cpu:N or gpu:N. Default: all GPUs, else 1 CPU device."),
    "device": _value("Device type: cuda or cpu."),
    "batch": _value("Global batch size in samples."),
    "accumulate": _value("Micro-batches per step (gradient accumulation)."),
    "strategy": _value("ddp, nfold (nfold's own all-reduce), dp, mirrored, data_parallel."),
    "exchange": _value("Data type of the gradient all-reduce: fp32, bf16."),
    "batch_norm": _value("Batch statistics per device or over all devices: device, synchronised."),
    "layout": _value("Memory format: channels_first, channels_last."),
    "precision": _value("fp32, tf32, bf16, fp16."),
    "framework": _value("torch, tensorflow, jax, keras-torch, simulated."),
    "input_": _value(
        "Input pipeline: loader, resident, generator, tf.data.", PLAN, "VALUE", "--input"
    ),
    "decode": _value("Where image files are decoded: cpu, device (nvJPEG)."),
    "cache": _value("Cache of image files: off, decoded (in host memory)."),
    "skip_bad": _flag("Skip damaged image files and count them.", PLAN),
    "augment": _value("Where images are augmented: cpu, device."),
    "step": _value("eager, graph, compiled, captured (CUDA graph), compiled+captured."),
    "kernels": _value("Kernels of a compiled step: default, tuned."),
    "steps_per_execution": _value("Steps per call (per CUDA graph, or in TensorFlow and JAX)."),
    "allocation": _value("GPU memory allocation: default, growth."),
    "workers": _value("Data loader workers per rank."),
    "seed": _value("Random seed of weights and sample order."),
}
AXIS_OPTIONS = {
    name: replace(option, more={"metavar": "LIST"})
    if option.type is not bool and name != "device"
    else option
    for name, option in PLAN_OPTIONS.items()
}
"""Options of a plan that take a comma-separated list."""

SHARED_OPTIONS = {
    "again": _flag("Measure again instead of reusing stored results.", STORE),
    "results": _path("Results folder.", STORE, Path("nfold-results"), envvar="NFOLD_RESULTS"),
    "data": _path("Folder of the data sets.", STORE, envvar="NFOLD_DATA"),
    "telemetry_interval": _seconds(1.0, "Time between telemetry samples."),
    "hang_timeout": _seconds(60.0, "Report a hang after this time without a step."),
    "as_json": _flag("Print one JSON object.", OUTPUT, "--json"),
    "plain": _flag("No live line and no colour.", OUTPUT),
    "no_report": _flag("Do not write a report.", OUTPUT),
    "debug": _flag("Show the traceback of an error.", OUTPUT),
}

BENCH_OPTIONS = {
    "workload": _argument(f"{WORKLOADS}, conv2d, {OWN_WORKLOAD}"),
    **AXIS_OPTIONS,
    "parameter": _list(
        "Workload parameter as an axis; repeatable.", PLAN, "NAME=LIST", "--parameter", "-p"
    ),
    "scaling": _value("--batch is global (strong) or per device (weak).", default="strong"),
    "steps": _integer("Measure throughput over this many timed steps.", LENGTH),
    "epochs": _integer("Measure throughput and accuracy over this many epochs.", LENGTH),
    "warmup_steps": _integer("Steps before the timed steps.", LENGTH),
    "repeat": _integer(
        "Runs per cell, each in fresh processes, interleaved. Default: 1.", LENGTH, min=1
    ),
    "report": _value(
        f"Measure a field report instead of a workload: {REPORT_NAMES}.", REPORT, "NAME"
    ),
    "quick": _flag("Small version of the field report, for two CPU cores.", REPORT),
    "dry_run": _flag("Print the grid and its estimated time; run nothing.", OUTPUT),
    "in_process": _flag("Run one rank in this process, for a debugger.", OUTPUT),
    **{name: option for name, option in SHARED_OPTIONS.items() if name != "debug"},
}

TRAIN_OPTIONS = {
    "workload": _argument(f"{WORKLOADS}, {OWN_WORKLOAD}", str, REQUIRED),
    **PLAN_OPTIONS,
    "epochs": _integer("Passes over the data. Default: set by the workload.", LENGTH),
    "checkpoint": _path("Checkpoint folder. Default: in the results folder.", STORE),
    "checkpoint_every": _integer("Epochs between checkpoints; 0: no checkpoints.", STORE, 1, min=0),
    "log_every": _integer("Steps between progress lines; 0: none.", OUTPUT, 0, min=0),
    **{k: v for k, v in SHARED_OPTIONS.items() if k not in ("debug", "no_report")},
    "again": _flag("Start over instead of resuming from the checkpoint.", STORE),
}

EXPLAIN_OPTIONS = {
    "target": _argument(f"A script (train.py), {WORKLOADS}, conv2d, {OWN_WORKLOAD}"),
    "arguments": _argument(
        "Arguments of the script: everything after --, and options that nfold does not have.",
        list[str] | None,
        metavar="[--] ARGS",
    ),
    "module": _flag("TARGET is a module, as in python -m.", PLAN, "--module", "-m"),
    **PLAN_OPTIONS,
    "devices": _value("Devices: N, cpu:N or gpu:N. Default: all GPUs."),
    "scaling": _value(
        "--batch is global (strong) or per device (weak). Default: strong; weak for a script that "
        "starts a process group."
    ),
    "budget": _value("Time limit of all runs: 90s, 3m, 1h.", LENGTH, "TIME", default="3m"),
    **{name: option for name, option in SHARED_OPTIONS.items() if name != "debug"},
    "details": _flag("Print every table.", OUTPUT),
    "show": _flag("Print the last explanation again; measure nothing.", OUTPUT),
}

TUNE_OPTIONS = {
    **{
        name: option
        for name, option in EXPLAIN_OPTIONS.items()
        if name not in ("budget", "show", "details")
    },
    "budget": _value("Time limit of all runs: 5m, 10m, 1h.", LENGTH, "TIME", default="10m"),
    "allow": _value(
        "Remedies that change the training or need memory, comma-separated: augmentation, batch, "
        "batch_norm, communication, memory, order, precision.",
        LENGTH,
        "LIST",
    ),
    "apply": _flag("Apply the patch to the files of the script, with a backup.", OUTPUT),
    "revert": _flag("Take an applied patch back; measure nothing.", OUTPUT),
}

RUN_OPTIONS = {
    "script": _argument("A Python file, or with -m a module.", str, REQUIRED, "SCRIPT"),
    "arguments": _argument("Arguments of the script.", list[str] | None, metavar="ARGS"),
    "nproc_per_node": _torchrun(
        "Ranks of this node: N, cpu:N, gpu:N, gpu, cpu, auto. Default: all GPUs, else 1.",
        aliases=("--devices",),
    ),
    "nnodes": _torchrun("Nodes: N or MIN:MAX.", str, "1"),
    "node_rank": _torchrun(
        "Rank of this node (static rendezvous).", int | None, min=0, metavar="N"
    ),
    "rdzv_backend": _torchrun("Rendezvous of several nodes: c10d, static."),
    "rdzv_endpoint": _torchrun("HOST:PORT of the rendezvous."),
    "rdzv_id": _torchrun("Job id, the same on all nodes."),
    "rdzv_conf": _torchrun("NAME=VALUE,... of the rendezvous."),
    "master_addr": _torchrun("Address of node 0 (static rendezvous)."),
    "master_port": _torchrun("Port of node 0 (static rendezvous).", int | None, metavar="N"),
    "standalone": _torchrun("Use this node only.", bool, False),
    "max_restarts": _torchrun("Restarts after failures.", int, 0, min=0, metavar="N"),
    "monitor_interval": _torchrun(
        "Time between checks of the ranks.", float, 0.1, metavar="SECONDS"
    ),
    "local_ranks_filter": _torchrun("Ranks whose output is shown, such as 0,1. Default: 0."),
    "module": _torchrun("SCRIPT is a module, as in python -m.", bool, False, aliases=("-m",)),
    "no_python": _torchrun("SCRIPT is any program.", bool, False),
    "unsupported_torchrun_option": Option(
        *(str | None, None, "", None, UNSUPPORTED_TORCHRUN_OPTIONS),
        more={"hidden": True, "callback": _refuse},
    ),
    "plan": _list("Plan field for nfold.Run, or safe; repeatable.", LAUNCH, "NAME=VALUE"),
    "watch": _flag("Say at the end where the time of the steps went.", LAUNCH),
    "settings": Option(
        *(Path | None, None, "Apply the remedies that nfold tune has kept in a file.", LAUNCH),
        *(("--with",), False, {"metavar": "PATH"}),
    ),
    "force": _flag("With --with: apply them to another script, machine or devices.", LAUNCH),
    "results": SHARED_OPTIONS["results"],
    "hang_timeout": SHARED_OPTIONS["hang_timeout"],
    "start_timeout": _seconds(
        300.0, "Report a hang before the first step if the ranks are idle for this time."
    ),
    "debug": SHARED_OPTIONS["debug"],
}

REPORT_OPTIONS = {
    "workload": _argument("Report only this workload, for example cnn10."),
    "results": SHARED_OPTIONS["results"],
    "html": _path("Write a self-contained page; - is standard output.", OUTPUT),
    "csv": _path("Write unrounded numbers; - is standard output.", OUTPUT),
    "md": _path("Write Markdown; - is standard output.", OUTPUT),
    "cell": _value("Cell whose telemetry the page shows.", OUTPUT, "ID"),
    "field": _value(f"Show as a field report: {REPORT_NAMES}.", OUTPUT, "NAME", "--report"),
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
                name = panel or ("Arguments" if is_argument else "Options")
                panels.setdefault(name, []).append(record)
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


def refuse_missing_suffix(command: str, target: str) -> None:
    """Raise UsageError if ``target`` is no workload and a script ``target.py`` exists."""
    from nfold import workloads
    from nfold.core.errors import UsageError

    if target not in workloads.NAMES and Path(f"{target}.py").is_file():
        raise UsageError(
            f"unknown workload {target!r}, but {target}.py exists; next: nfold {command} {target}.py"
        )
