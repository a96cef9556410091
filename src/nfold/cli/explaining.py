"""What ``nfold explain`` does once its options are read."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from nfold import workloads
from nfold.ablation import Variant
from nfold.bench.axes import parse_axes
from nfold.budget import Budget
from nfold.cli import explained, output
from nfold.cli.explain_script import (
    build_script_subject,
    check_devices,
    check_script_target,
    is_script,
    undo_interrupted_runs,
)
from nfold.cli.flags import PlanOptions
from nfold.cli.preparing import build_plan_completer, epoch_samples, prepare_data
from nfold.cli.run_lines import ExplainProgress
from nfold.cli.screen import open_screen
from nfold.cli.signals import stop_on_signals
from nfold.errors import RunFailure, UsageError
from nfold.explain.budget import build_budget
from nfold.explain.experiment import Experiment, TimeBudget
from nfold.explain.ladder import ExperimentDesign, prefetched_batches
from nfold.explain.target import WorkloadRunner
from nfold.frameworks.registry import get_framework
from nfold.inert import terminal_safe
from nfold.machine import Machine
from nfold.plan import PREFETCH_BATCHES, WARMUP_STEPS, Plan
from nfold.run import attach
from nfold.run.options import RunOptions
from nfold.run.run import run
from nfold.run.spare import WarmAgent
from nfold.store.store import Store
from nfold.telemetry.inspection import inspect_machine
from nfold.workload import Workload

TIME_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|)")
SECONDS_PER_UNIT = {"s": 1, "": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(PlanOptions):
    """The options of ``nfold explain`` as they were given, by the names of its parameters."""

    target: str
    arguments: tuple[str, ...]
    module: bool
    scaling: str | None
    budget: str
    no_report: bool


STOPPED_MESSAGE = (
    "nfold: stopped before all devices and one of them were measured: nothing can be told yet; "
    "next: the same command, which goes on from here"
)


def run_explain(request: ExplainOptions) -> int:
    """Measure, print, report; the exit code. Raises RunFailure where nothing can be said."""
    if attach.in_external_job():
        raise UsageError("nfold explain starts its own ranks; next: unset RANK and WORLD_SIZE")
    budget_s = parse_seconds(request.budget)
    machine = inspect_machine()
    subject = _subject(request, machine)
    with (
        stop_on_signals() as stop,
        Store.open(request.results) as store,
        closing(WarmAgent()) as spare,
    ):
        options = request.run_options(stop=stop, warm_agent=spare)
        target = _target(request, subject.workload, machine, store, options)
        with open_screen(sys.stderr, plain=request.plain) as shown:
            for line in undo_interrupted_runs(request):
                shown.print_line(terminal_safe(line))
            experiment = Experiment(target, TimeBudget(budget_s), ExplainProgress(shown), stop)
            measured = _run(experiment, subject)
        if measured is not None:
            _show(request, build_budget(target.target_name, measured, experiment.results))
        else:
            sys.stderr.write(terminal_safe(f"{STOPPED_MESSAGE}\n"))
    return 128 + stop.signum if stop.signum is not None else 0


class ExplainSubject(Protocol):
    """What is explained: it knows its ladder, if need be after a first look."""

    @property
    def workload(self) -> Workload:
        """As runs know it."""

    def design(self, experiment: Experiment) -> ExperimentDesign:
        """The complete plan on N devices; raises RunFailure and UsageError."""


@dataclass(frozen=True)
class WorkloadSubject:
    """A workload, whose plan needs no look at it."""

    workload: Workload
    planned_design: ExperimentDesign

    def design(self, experiment: Experiment) -> ExperimentDesign:
        """As it was asked for."""
        del experiment
        return self.planned_design


def _subject(request: ExplainOptions, machine: Machine) -> ExplainSubject:
    target, arguments = request.target, request.arguments
    check_script_target(target, arguments, module=request.module)
    if request.module or is_script(target):
        module = request.module
        return build_script_subject(
            target, arguments, request.scaling, request, machine, module=module
        )
    if arguments:
        raise UsageError(
            f"{' '.join(arguments)}: no option of nfold explain, and {target} has no arguments as "
            "a script has; next: nfold explain --help"
        )
    workload = _workload(target)
    ladder = design_of(request, workload, machine)
    if not get_framework(ladder.plan.framework).runs_in_parent:
        prepare_data(workload, ladder.plan, request.data)
    return WorkloadSubject(workload, ladder)


def _run(experiment: Experiment, subject: ExplainSubject) -> ExperimentDesign | None:
    """The ladder that was measured; None where a request to stop came before any result."""
    try:
        return experiment.run(subject.design(experiment))
    except RunFailure:
        if experiment.stop:
            return None
        raise


def parse_seconds(text: str) -> float:
    """``90s``, ``3m`` or ``90`` as seconds; UsageError for anything else."""
    found = TIME_PATTERN.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise UsageError(f"--budget {text!r}: allowed are times above 0 such as 90s, 3m, 1h")
    return float(found[1]) * SECONDS_PER_UNIT[found[2]]


def _workload(text: str) -> Workload:
    workload = workloads.with_fingerprint(Workload.parse(text))
    workloads.parameters(workload)
    return workload


def design_of(request: ExplainOptions, workload: Workload, machine: Machine) -> ExperimentDesign:
    """The complete plan on N devices, and how it scales; UsageError where it cannot be."""
    axes = parse_axes(
        str(workload),
        request.axis_fields,
        common=Plan(device=request.device),
        scaling=request.scaling or "strong",
    )
    changes = request.plan_changes(axes, "explain")
    # The length is set by the experiment; any will do until then.
    asked = Plan().edit(**changes).edit(steps=1)
    plan = build_plan_completer(machine, request.data)(workload, asked)
    check_devices(request, plan)
    operation = workloads.is_operation(workload)
    if operation and plan.framework != "torch":
        raise UsageError(
            f"{workload.name} on {plan.framework}: its copies cannot be left out there; next: "
            f"--framework torch, or nfold bench {workload.name}, which shows what each part takes"
        )
    ahead = prefetched_batches(plan.workers or 0, PREFETCH_BATCHES)
    batch = (plan.batch or 1) * ((plan.devices or 1) if axes.scaling == "weak" else 1)
    ladder = ExperimentDesign(
        plan=plan.edit(warmup_steps=WARMUP_STEPS + ahead, batch=batch),
        scaling=axes.scaling if plan.devices != 1 else "weak",
        is_operation=operation,
    )
    reason = get_framework(plan.framework).unsupported_reason(workload, ladder.plan, machine)
    if reason is not None:
        raise UsageError(reason)
    return ladder


def _target(
    request: ExplainOptions, workload: Workload, machine: Machine, store: Store, options: RunOptions
) -> WorkloadRunner:
    def refusal(asked: Workload, plan: Plan, ablation: Variant) -> str | None:
        chosen = get_framework(plan.framework)
        return chosen.unsupported_reason(asked, plan, machine) or chosen.refusal_reason(
            ablation, asked, plan
        )

    def switches(asked: Workload, plan: Plan) -> tuple[str, ...]:
        return get_framework(plan.framework).switchable_fields(asked, plan)

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


def _show(request: ExplainOptions, found: Budget) -> None:
    """The table and the sentences, or one JSON object; then the report."""
    if request.as_json:
        output.print_json(found.to_json())
    else:
        explained.print_explanation(found, plain=request.plain)
    if not request.no_report:
        explained.save_explanation(found, request.results, quiet=request.as_json)
