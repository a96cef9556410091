"""What ``nfold explain`` does once its options are read."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from nfold import workloads
from nfold.ablation import Ablation
from nfold.bench.axes import read_axes
from nfold.budget import Budget
from nfold.cli import explained, output
from nfold.cli.explain_script import (
    check_devices,
    check_target,
    is_script,
    script_of,
    undo_left_over,
)
from nfold.cli.flags import Flags
from nfold.cli.preparing import completing, epoch_samples, prepare
from nfold.cli.run_lines import RunLines
from nfold.cli.screen import screen
from nfold.cli.signals import stop_on_signals
from nfold.errors import RunFailure, UsageError
from nfold.explain.budget import budget
from nfold.explain.experiment import Clock, Experiment
from nfold.explain.ladder import Ladder, made_ahead
from nfold.explain.target import WorkloadTarget
from nfold.frameworks.registry import framework
from nfold.inert import inert
from nfold.machine import Machine
from nfold.plan import LOADER_AHEAD, WARMUP_STEPS, Plan
from nfold.run import attach
from nfold.run.options import Options
from nfold.run.run import run
from nfold.run.spare import Spare
from nfold.store.store import Store
from nfold.telemetry.inspection import inspect_machine
from nfold.workload import Workload

TIME = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|)")
SECONDS = {"s": 1, "": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class Request(Flags):
    """The options of ``nfold explain`` as they were given, by the names of its parameters."""

    target: str
    arguments: tuple[str, ...]
    module: bool
    scaling: str | None
    budget: str
    no_report: bool


UNFINISHED = (
    "nfold: stopped before all devices and one of them were measured: nothing can be told yet; "
    "next: the same command, which goes on from here"
)


def explain(request: Request) -> int:
    """Measure, print, report; the exit code. Raises RunFailure where nothing can be said."""
    if attach.attached():
        raise UsageError("nfold explain starts its own ranks; next: unset RANK and WORLD_SIZE")
    budget_s = seconds(request.budget)
    machine = inspect_machine()
    subject = _subject(request, machine)
    with stop_on_signals() as stop, Store.open(request.results) as store, closing(Spare()) as spare:
        options = request.options(stop=stop, spare=spare)
        target = _target(request, subject.workload, machine, store, options)
        with screen(sys.stderr, plain=request.plain) as shown:
            for line in undo_left_over(request):
                shown.say(inert(line))
            experiment = Experiment(target, Clock(budget_s), RunLines(shown), stop)
            measured = _run(experiment, subject)
        if measured is not None:
            _show(request, budget(target.name, measured, experiment.measured))
        else:
            sys.stderr.write(inert(f"{UNFINISHED}\n"))
    return 128 + stop.signum if stop.signum is not None else 0


class Subject(Protocol):
    """What is explained: it knows its ladder, if need be after a first look."""

    @property
    def workload(self) -> Workload:
        """As runs know it."""

    def ladder(self, experiment: Experiment) -> Ladder:
        """The complete plan on N devices; raises RunFailure and UsageError."""


@dataclass(frozen=True)
class Known:
    """A workload, whose plan needs no look at it."""

    workload: Workload
    asked: Ladder

    def ladder(self, experiment: Experiment) -> Ladder:
        """As it was asked for."""
        del experiment
        return self.asked


def _subject(request: Request, machine: Machine) -> Subject:
    target, arguments = request.target, request.arguments
    check_target(target, arguments, module=request.module)
    if request.module or is_script(target):
        module = request.module
        return script_of(target, arguments, request.scaling, request, machine, module=module)
    if arguments:
        raise UsageError(
            f"{' '.join(arguments)}: no option of nfold explain, and {target} has no arguments as "
            "a script has; next: nfold explain --help"
        )
    workload = _workload(target)
    ladder = ladder_of(request, workload, machine)
    if not framework(ladder.plan.framework).in_parent:
        prepare(workload, ladder.plan, request.data)
    return Known(workload, ladder)


def _run(experiment: Experiment, subject: Subject) -> Ladder | None:
    """The ladder that was measured; None where a request to stop came before any result."""
    try:
        return experiment.run(subject.ladder(experiment))
    except RunFailure:
        if experiment.stop:
            return None
        raise


def seconds(text: str) -> float:
    """``90s``, ``3m`` or ``90`` as seconds; UsageError for anything else."""
    found = TIME.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise UsageError(f"--budget {text!r}: allowed are times above 0 such as 90s, 3m, 1h")
    return float(found[1]) * SECONDS[found[2]]


def _workload(text: str) -> Workload:
    workload = workloads.identified(Workload.parse(text))
    workloads.parameters(workload)
    return workload


def ladder_of(request: Request, workload: Workload, machine: Machine) -> Ladder:
    """The complete plan on N devices, and how it scales; UsageError where it cannot be."""
    axes = read_axes(
        str(workload),
        request.fields,
        common=Plan(device=request.device),
        scaling=request.scaling or "strong",
    )
    changes = request.changes(axes, "explain")
    # The length is set by the experiment; any will do until then.
    asked = Plan().edit(**changes).edit(steps=1)
    plan = completing(machine, request.data)(workload, asked)
    check_devices(request, plan)
    operation = workloads.is_operation(workload)
    if operation and plan.framework != "torch":
        raise UsageError(
            f"{workload.name} on {plan.framework}: its copies cannot be left out there; next: "
            f"--framework torch, or nfold bench {workload.name}, which shows what each part takes"
        )
    ahead = made_ahead(plan.workers or 0, LOADER_AHEAD)
    batch = (plan.batch or 1) * ((plan.devices or 1) if axes.scaling == "weak" else 1)
    ladder = Ladder(
        plan=plan.edit(warmup_steps=WARMUP_STEPS + ahead, batch=batch),
        scaling=axes.scaling if plan.devices != 1 else "weak",
        operation=operation,
    )
    reason = framework(plan.framework).unsupported(workload, ladder.plan, machine)
    if reason is not None:
        raise UsageError(reason)
    return ladder


def _target(
    request: Request, workload: Workload, machine: Machine, store: Store, options: Options
) -> WorkloadTarget:
    def refusal(asked: Workload, plan: Plan, ablation: Ablation) -> str | None:
        chosen = framework(plan.framework)
        return chosen.unsupported(asked, plan, machine) or chosen.refuses(ablation, asked, plan)

    def switches(asked: Workload, plan: Plan) -> tuple[str, ...]:
        return framework(plan.framework).switches(asked, plan)

    return WorkloadTarget(
        workload=workload,
        machine=machine,
        options=options,
        store=store,
        run=run,
        refusal=refusal,
        switches=switches,
        samples=epoch_samples(workload),
        again=request.again,
    )


def _show(request: Request, found: Budget) -> None:
    """The table and the sentences, or one JSON object; then the report."""
    if request.as_json:
        output.print_json(found.to_json())
    else:
        explained.show(found, plain=request.plain)
    if not request.no_report:
        explained.write_report(found, request.results, quiet=request.as_json)
