"""Run ``nfold tune``: search, verify, write nfold.toml and nfold.patch, print."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass

from nfold.cli import render
from nfold.cli.explain_command import (
    ExplainOptions,
    build_runner,
    build_subject,
    parse_seconds,
    undo_interrupted_runs,
)
from nfold.cli.signals import stop_on_signals
from nfold.cli.terminal import open_screen
from nfold.cli.tune_screen import TuneProgress, print_result
from nfold.core.errors import UnknownValue, UsageError
from nfold.core.format import terminal_safe
from nfold.explain.design import ExperimentDesign
from nfold.explain.experiment import Experiment, ExperimentEvents, TimeBudget
from nfold.explain.trials import WorkloadRunner
from nfold.launch import workload_run
from nfold.launch.launch_spec import WarmAgent
from nfold.store.store import Store
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.tune.remedies import PERMISSIONS
from nfold.tune.search import Search

NOT_VERIFIED = 3


@dataclass(frozen=True, kw_only=True)
class TuneOptions(ExplainOptions):
    """The options of ``nfold tune`` as text, by parameter name."""

    allow: str | None


def run_tune(request: TuneOptions) -> int:
    """Search, print, write the files; return the exit code.

    Raises RunFailure if the original cannot be run or trains wrongly.
    """
    if workload_run.in_external_job():
        raise UsageError("nfold tune starts its own ranks; next: unset RANK and WORLD_SIZE")
    allowed = parse_permissions(request.allow)
    budget_s = parse_seconds(request.budget)
    machine = inspect_machine()
    subject = build_subject(request, machine)
    with (
        stop_on_signals() as stop,
        Store.open(request.results) as store,
        closing(WarmAgent(script=bool(subject.workload.script))) as warm_agent,
        open_screen(sys.stderr, plain=request.plain) as screen,
    ):
        for line in undo_interrupted_runs(request):
            screen.print_line(terminal_safe(line))

        def explain(runner: WorkloadRunner, seconds: float) -> tuple[ExperimentDesign, Experiment]:
            experiment = Experiment(runner, TimeBudget(seconds), ExperimentEvents(), stop)
            return experiment.run(subject.design(experiment)), experiment

        options = request.run_options(stop=stop, warm_agent=warm_agent)
        search = Search(
            runner=build_runner(request, subject.workload, machine, store, options),
            explain=explain,
            time_budget=TimeBudget(budget_s),
            events=TuneProgress(screen),
            stop=stop,
            cores=machine.cores,
            allowed=allowed,
        )
        result = search.run()
    files: dict[str, str] = {}
    if request.as_json:
        render.print_json(result.to_json(files))
    else:
        print_result(result, files, plain=request.plain)
    if stop.signum is not None:
        return 128 + stop.signum
    return NOT_VERIFIED if result.kept and not result.is_verified else 0


def parse_permissions(text: str | None) -> frozenset[str]:
    """Return what ``--allow batch,precision`` allows. Raises UnknownValue."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in PERMISSIONS:
            raise UnknownValue("allow", name, PERMISSIONS)
    return frozenset(names)
