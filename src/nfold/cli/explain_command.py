"""Run ``nfold explain``: choose the target, measure, store the explanation, print it."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any, ClassVar, Protocol

from nfold import workloads
from nfold.bench.grid import GridAxes, parse_axes
from nfold.cli import render
from nfold.cli.explain_screen import print_explanation
from nfold.cli.options import PlanOptions
from nfold.cli.plan_completion import build_plan_completer, epoch_samples, prepare_data
from nfold.cli.progress import ExplainProgress
from nfold.cli.signals import stop_on_signals
from nfold.cli.terminal import PlainScreen, open_screen
from nfold.core.errors import RunFailure, UnknownValue, UsageError
from nfold.core.fingerprint import module_file
from nfold.core.format import terminal_safe
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement
from nfold.core.plan import (
    PREFETCH_BATCHES,
    WARMUP_STEPS,
    Plan,
    WorkloadDefaults,
    prefetched_batches,
)
from nfold.core.script_profile import ScriptProfile
from nfold.core.source_location import display_path
from nfold.core.variant import Variant
from nfold.core.workload import MODULE_FLAG, Workload
from nfold.engines.base import get_framework
from nfold.explain.attribution import build_budget
from nfold.explain.design import ExperimentDesign, Scaling
from nfold.explain.experiment import Experiment
from nfold.explain.result.view import build_view
from nfold.explain.script_probe import probe_script
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import WorkloadRunner
from nfold.launch import workload_run
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import AgentServer, RunOptions
from nfold.launch.workload_run import MEASUREMENTS_FOLDER, run
from nfold.report.writer import (
    MARKDOWN_FILE,
    PAGE_FILE,
    StoredExplanation,
    explanation_folder,
    find_latest,
    read_values,
    write_explanation,
)
from nfold.sandbox import clean_up_stale, unprotected_reason
from nfold.store.store import Store
from nfold.telemetry.machine_inspection import inspect_machine

TIME_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|)")
SECONDS_PER_UNIT = {"s": 1, "": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(PlanOptions):
    """The options of ``nfold explain`` as text, by parameter name.

    ``command`` is the command's name, ``script_options`` those that apply to a script.
    """

    command: ClassVar[str] = "explain"
    script_options: ClassVar[str] = (
        "--devices, --device, --scaling, --budget, --again, --results, --telemetry-interval, "
        "--hang-timeout, --json, --plain, --no-report"
    )
    target: str | None
    arguments: tuple[str, ...]
    module: bool
    scaling: str | None
    budget: str
    no_report: bool
    details: bool
    show: bool


UNPROTECTED_NOTE = (
    "nfold cannot hold back every write of the script on this machine ({reason}). What its Python "
    "code writes is undone; what C libraries and programs that it starts (cp, git) write under "
    "absolute paths is not"
)
STOPPED_MESSAGE = (
    "nfold: stopped before one device and all devices were measured, so there is no result yet; "
    "next: the same command, which continues from here"
)


def run_explain(request: ExplainOptions) -> int:
    """Measure, print, write the report; return the exit code.

    Raises RunFailure if one device or all devices cannot be measured.
    """
    if request.show:
        return show_stored(request)
    if workload_run.in_external_job():
        raise UsageError("nfold explain starts its own ranks; next: unset RANK and WORLD_SIZE")
    budget_s = parse_seconds(request.budget)
    machine = inspect_machine()
    subject = build_subject(request, machine)
    with (
        stop_on_signals() as stop,
        Store.open(request.results) as store,
        closing(AgentServer(subject.workload.script_file)) as agent_server,
    ):
        options = request.run_options(stop=stop, agent_server=agent_server)
        runner = build_runner(request, subject.workload, machine, store, options)
        with open_screen(sys.stderr, plain=request.plain) as screen:
            print_notices(screen, request, subject.workload)
            progress = ExplainProgress(screen, str(runner.workload))
            experiment = Experiment(runner, TimeBudget(budget_s), progress, stop)
            design = _run(experiment, subject)
        if design is None:
            sys.stderr.write(f"{STOPPED_MESSAGE}\n")
        else:
            budget = build_budget(str(runner.workload), design, experiment.results)
            folder = explanation_folder(request.results, subject.workload)
            explanation = StoredExplanation.now(
                subject.workload, budget, budget_s, read_values(folder)
            )
            _show(request, explanation, folder)
    return 128 + stop.signum if stop.signum is not None else 0


def print_notices(screen: PlainScreen, request: PlanOptions, workload: Workload) -> None:
    """Undo interrupted runs and say so; say if writes of a script cannot all be held back."""
    for line in undo_interrupted_runs(request):
        screen.print_line(terminal_safe(line))
    unprotected = unprotected_reason(request.results) if workload.script else None
    if unprotected is not None:
        screen.print_line(terminal_safe(UNPROTECTED_NOTE.format(reason=unprotected)))


def show_stored(request: ExplainOptions) -> int:
    """Print a stored explanation again, the newest one without a target. Measures nothing."""
    found = read_values(_folder_of_target(request)) if request.target else None
    if request.target is None:
        found = find_latest(request.results)
    if found is None:
        of = f" of {request.target}" if request.target else ""
        raise UsageError(
            f"--show: no explanation{of} is stored in {request.results}; next: nfold explain "
            f"{request.target or 'train.py'}"
        )
    _show(request, found, explanation_folder(request.results, found.workload), write=False)
    return 0


def _folder_of_target(request: ExplainOptions) -> Path:
    target = str(request.target)
    if request.module:
        workload = Workload(name=target, script=(MODULE_FLAG, target))
    elif is_script(target):
        workload = Workload(name=target, script=(target,))
    else:
        workload = Workload.parse(target)
    return explanation_folder(request.results, workload)


class ExplainSubject(Protocol):
    """What is explained: a workload, or a script that a probe run inspects first."""

    @property
    def workload(self) -> Workload: ...

    def design(self, experiment: Experiment) -> ExperimentDesign:
        """Return the design on N devices. Raises RunFailure and UsageError."""


@dataclass(frozen=True)
class WorkloadSubject:
    """A workload, whose design needs no probe run."""

    workload: Workload
    planned_design: ExperimentDesign

    def design(self, experiment: Experiment) -> ExperimentDesign:
        kept = self.planned_design.plan.edit(**experiment.runner.kept_fields)
        return dataclasses.replace(self.planned_design, plan=kept)


def build_subject(request: ExplainOptions, machine: Machine) -> ExplainSubject:
    target, arguments = request.target, request.arguments
    if target is None:
        other = ", or nfold explain --show" * (request.command == "explain")
        raise UsageError(
            f"no script and no workload; next: nfold {request.command} train.py{other}"
        )
    check_script_target(target, arguments, request.command, module=request.module)
    if request.module or is_script(target):
        module = request.module
        return build_script_subject(
            target, arguments, request.scaling, request, machine, module=module
        )
    if arguments:
        raise UsageError(
            f"{' '.join(arguments)}: not an option of nfold {request.command}, and a workload such "
            f"as {target} takes no arguments; next: nfold {request.command} --help"
        )
    workload = _workload(target)
    design = design_of(request, workload, machine)
    if not get_framework(design.plan.framework).runs_in_parent:
        prepare_data(workload, design.plan, request.data)
    return WorkloadSubject(workload, design)


def _run(experiment: Experiment, subject: ExplainSubject) -> ExperimentDesign | None:
    try:
        return experiment.run(subject.design(experiment))
    except RunFailure:
        if experiment.stop:
            return None
        raise


def parse_seconds(text: str) -> float:
    """Return ``90s``, ``3m`` or ``90`` in seconds. Raises UsageError for anything else."""
    found = TIME_PATTERN.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise UsageError(f"--budget {text!r}: allowed are times above 0 such as 90s, 3m, 1h")
    return float(found[1]) * SECONDS_PER_UNIT[found[2]]


def _workload(text: str) -> Workload:
    workload = workloads.with_fingerprint(Workload.parse(text))
    workloads.parameters(workload)
    return workload


def design_of(request: ExplainOptions, workload: Workload, machine: Machine) -> ExperimentDesign:
    """Return the design of a workload on N devices. Raises UsageError if its plan is refused."""
    axes, partial = requested_plan(request, workload)
    plan = build_plan_completer(machine, request.data)(workload, partial)
    check_devices(request, plan)
    operation = workloads.is_operation(workload)
    if operation and plan.framework != "torch":
        raise UsageError(
            f"{workload.name} on {plan.framework}: its copies cannot be replaced there; next: "
            f"--framework torch, or nfold bench {workload.name}, which times every part"
        )
    ahead = prefetched_batches(plan.workers or 0, PREFETCH_BATCHES)
    batch = (plan.batch or 1) * ((plan.devices or 1) if axes.scaling == "weak" else 1)
    design = ExperimentDesign(
        plan=plan.edit(warmup_steps=WARMUP_STEPS + ahead, batch=batch),
        scaling=axes.scaling if plan.devices != 1 else "weak",
        is_operation=operation,
    )
    reason = get_framework(plan.framework).unsupported_reason(workload, design.plan, machine)
    if reason is not None:
        raise UsageError(reason)
    return design


def requested_plan(request: ExplainOptions, workload: Workload) -> tuple[GridAxes, Plan]:
    """Return the axes and the plan of the options; the experiment sets the number of steps."""
    axes = parse_axes(
        str(workload),
        request.axis_fields,
        common=Plan(device=request.device),
        scaling=request.scaling or "strong",
    )
    return axes, Plan().edit(**request.plan_changes(axes, request.command)).edit(steps=1)


def build_runner(
    request: ExplainOptions, workload: Workload, machine: Machine, store: Store, options: RunOptions
) -> WorkloadRunner:
    def refusal(workload: Workload, plan: Plan, variant: Variant) -> str | None:
        chosen = get_framework(plan.framework)
        return chosen.unsupported_reason(workload, plan, machine) or chosen.refusal_reason(
            variant, workload, plan
        )

    def switches(workload: Workload, plan: Plan) -> tuple[str, ...]:
        return get_framework(plan.framework).switchable_fields(workload, plan)

    return WorkloadRunner(
        workload=workload,
        machine=machine,
        options=options,
        store=store,
        run=run,
        refusal_rule=refusal,
        switchable_fields=switches,
        training_samples=epoch_samples(workload),
        ignore_stored=request.again,
    )


def _show(
    request: ExplainOptions, explanation: StoredExplanation, folder: Path, *, write: bool = True
) -> None:
    """Print the explanation; with ``write``, keep it and write its report first."""
    budget = explanation.budget
    view = build_view(budget, explanation.previous, explanation.budget_s)
    if write and not request.no_report:
        missing = write_explanation(folder, explanation, view)
        if missing:
            sys.stderr.write(terminal_safe(f"no HTML report: {missing}") + "\n")
    pages = [folder / PAGE_FILE, folder / MARKDOWN_FILE]
    page = next((display_path(path.absolute()) for path in pages if path.exists()), "")
    if request.as_json:
        render.print_json(budget.to_json())
    else:
        print_explanation(view, budget, details=request.details, plain=request.plain, page=page)


LAUNCHER_COMMAND = re.compile(
    r"python[\d.]*|torchrun|accelerate|deepspeed|lightning|fabric|mpirun|mpiexec|srun|uv|poetry"
)
SHELL_SCRIPT_HINT = (
    "a shell script; allowed is the Python script that it starts; next: nfold {command} train.py "
    "--devices N -- ARGUMENTS"
)
NOTEBOOK_HINT = "a notebook; allowed is a Python script; next: jupyter nbconvert --to script"
UNSUPPORTED_SUFFIXES = dict.fromkeys((".sh", ".bash", ".sbatch", ".slurm"), SHELL_SCRIPT_HINT) | {
    ".ipynb": NOTEBOOK_HINT
}
DOTTED_NAME = re.compile(r"\w+(?:\.\w+)+")
SCRIPT_SCALINGS: tuple[Scaling, ...] = ("weak", "strong")


def is_script(target: str) -> bool:
    """Return whether a target is the path of a script, which may not exist."""
    return target.endswith(".py") or os.sep in target or os.path.isfile(target)


def check_script_target(
    target: str, arguments: Sequence[str], command: str, *, module: bool
) -> None:
    """Refuse launchers such as torchrun, modules without ``-m``, and scripts without ``.py``."""
    if LAUNCHER_COMMAND.fullmatch(os.path.basename(target)):
        command_line = dropwhile(lambda one: not (module or is_script(one)), arguments)
        script, *own = [*command_line] or ["train.py"]
        named = [MODULE_FLAG, script] if module else [script]
        words = [*named, "--devices", "N", *(["--"] if own else ()), *own]
        raise UsageError(
            f"{target} is a launcher; nfold {command} starts one process per device itself; "
            f"allowed is the script; next: nfold {command} {shlex.join(words)}"
        )
    dotted = not module and DOTTED_NAME.fullmatch(target)
    if dotted and module_file(target, os.getcwd()) is not None:
        raise UsageError(
            f"{target} is a module; allowed is {MODULE_FLAG} before its name; next: nfold {command} "
            f"{shlex.join([MODULE_FLAG, target, *arguments])}"
        )


@dataclass(frozen=True, kw_only=True)
class ScriptSubject:
    """A script with its arguments, on the devices of ``placement``."""

    workload: Workload
    placement: Plan
    scaling: Scaling | None
    machine: Machine
    flags: ExplainOptions

    def design(self, experiment: Experiment) -> ExperimentDesign:
        """Run the script once, as a probe."""
        return probe_script(experiment, self.placement, self.scaling, self.machine, self._profiles)

    def _profiles(self, measurement: Measurement) -> tuple[ScriptProfile, ...]:
        folder = self.flags.results / (measurement.folder or MEASUREMENTS_FOLDER)
        return HandoffFolder(folder).reports.read_profiles()


def build_script_subject(
    target: str,
    arguments: Sequence[str],
    scaling: str | None,
    flags: ExplainOptions,
    machine: Machine,
    *,
    module: bool = False,
) -> ScriptSubject:
    """Return the subject of a path or a module name. Raises UsageError if it cannot run."""
    find = _module if module else _script
    workload = find(target, arguments, flags.command)
    _check_flags(flags, f"{MODULE_FLAG} {target}" if module else target)
    chosen = next((one for one in SCRIPT_SCALINGS if one == scaling), None)
    if scaling is not None and chosen is None:
        raise UnknownValue("scaling", scaling, SCRIPT_SCALINGS)
    return ScriptSubject(
        workload=workload,
        placement=_place(flags, machine),
        scaling=chosen,
        machine=machine,
        flags=flags,
    )


def undo_interrupted_runs(flags: PlanOptions) -> list[str]:
    """Undo files that killed runs wrote; return a line about each run and each failure."""
    found = clean_up_stale(flags.results / MEASUREMENTS_FOLDER)
    lines = [f"an earlier run that was killed {touched}" for touched in found if touched.files]
    return lines + [text for touched in found for text in touched.restore_errors]


def _script(target: str, arguments: Sequence[str], command: str) -> Workload:
    if os.path.isdir(target):
        inside = os.path.join(target, "*.py")
        raise UsageError(f"{target} is a folder; allowed is a Python script; next: {inside}")
    workload = Workload.from_script(target, *arguments)
    _check_python(target, target, command)
    return workload


def _module(target: str, arguments: Sequence[str], command: str) -> Workload:
    if is_script(target):
        raise UsageError(
            f"{MODULE_FLAG} {target}: a file; allowed is the name of a module, as for python -m; "
            f"next: nfold {command} {target}"
        )
    workload = Workload.from_module(target, *arguments)
    file = module_file(target, os.getcwd())
    assert file is not None
    _check_python(file, f"{MODULE_FLAG} {target}", command)
    return workload


def _check_python(file: str, target: str, command: str) -> None:
    other = UNSUPPORTED_SUFFIXES.get(os.path.splitext(file)[1])
    if other is not None:
        raise UsageError(f"{target} is {other.format(command=command)}")
    with open(file, "rb") as source:
        content = source.read()
    try:
        compile(content, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(
            f"{display_path(file)}{line} is not Python ({error.args[0]}); allowed is a Python "
            f"script; next: python {target}"
        ) from None


def _check_flags(flags: ExplainOptions, target: str) -> None:
    fields = {name: f" {value}" for name, value in flags.axis_fields.items() if value is not None}
    refused = {**fields, **({"skip_bad": ""} if flags.skip_bad else {})}
    refused.pop("devices", None)
    if not refused:
        return
    options = {f"--{name.replace('_', '-')}": value for name, value in refused.items()}
    names = ", ".join(options)
    own = " ".join(f"{name}{value}" for name, value in options.items())
    raise UsageError(
        f"{names}: {target} decides that itself; allowed with a script are {flags.script_options}; "
        f"next: nfold {flags.command} {target} -- {own}, if these are options of the script"
    )


def _place(flags: ExplainOptions, machine: Machine) -> Plan:
    axes = parse_axes("script", flags.axis_fields, common=Plan(device=flags.device))
    changes: dict[str, Any] = flags.plan_changes(axes, flags.command)
    plan = (
        Plan()
        .edit(**changes)
        .edit(steps=1)
        .resolve(machine, WorkloadDefaults(batch=1, epochs=None))
    )
    check_devices(flags, plan)
    return Plan(
        device=plan.device, devices=plan.devices, cores_per_device=plan.cores_per_device, steps=1
    )


def check_devices(flags: PlanOptions, plan: Plan) -> None:
    """Refuse CPU devices without a number: it cannot be read from the machine as that of GPUs."""
    if plan.device != "cuda" and flags.axis_fields.get("devices") is None:
        raise UsageError(
            "no GPU found, and --devices is not given; allowed are cpu:1, cpu:2, ...; next: "
            "--devices cpu:2"
        )
