"""Run ``nfold tune``: search, verify, write nfold.toml and nfold.patch, print."""

from __future__ import annotations

import shlex
import sys
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from nfold.cli import render
from nfold.cli.explain_command import (
    ExplainOptions,
    build_runner,
    build_subject,
    parse_seconds,
    print_notices,
    requested_plan,
)
from nfold.cli.plan_completion import build_plan_completer
from nfold.cli.signals import stop_on_signals
from nfold.cli.terminal import open_screen
from nfold.cli.tune_report import page_content
from nfold.cli.tune_screen import TuneProgress, print_result
from nfold.core.errors import RunFailure, UnknownValue, UsageError
from nfold.core.format import terminal_safe
from nfold.core.machine import Machine
from nfold.core.source_location import display_path
from nfold.core.workload import MODULE_FLAG, Workload
from nfold.explain.design import ExperimentDesign
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import WorkloadRunner
from nfold.launch import workload_run
from nfold.launch.launch_spec import AgentServer
from nfold.report.writer import TUNE_PAGE_FILE, explanation_folder, write_tune_page
from nfold.store.store import Store
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.tune.applied_patch import apply_patch, check_can_apply, revert_patch
from nfold.tune.keep import (
    PATCH_FILE,
    TOML_FILE,
    convert_script,
    edit_script,
    write_patch,
    write_settings,
)
from nfold.tune.plan_edits import learning_rate_advice
from nfold.tune.plan_fields import TUNABLE_FIELDS
from nfold.tune.remedies import PERMISSIONS
from nfold.tune.result import EditedCopy, TuneResult
from nfold.tune.search import EXPLAIN_ROUNDS, Search

NOT_VERIFIED = 3
BACKUP, COPIES = "backup", "edited"  # folders beside the files that are kept


@dataclass(frozen=True, kw_only=True)
class TuneOptions(ExplainOptions):
    """The options of ``nfold tune`` as text, by parameter name."""

    command: ClassVar[str] = "tune"
    script_options: ClassVar[str] = f"{ExplainOptions.script_options}, --allow, --apply, --revert"
    allow: str | None
    apply: bool
    revert: bool


def run_tune(request: TuneOptions) -> int:
    """Search, print, write the files; return the exit code.

    Raises RunFailure if the original cannot be run or trains wrongly.
    """
    if request.revert:
        return revert(request)
    if workload_run.in_external_job():
        raise UsageError("nfold tune starts its own ranks; next: unset RANK and WORLD_SIZE")
    allowed = parse_permissions(request.allow)
    budget_s = parse_seconds(request.budget)
    machine = inspect_machine()
    subject = build_subject(request, machine)
    folder = explanation_folder(request.results, subject.workload)
    if request.apply:
        check_can_apply(script_files(subject.workload), folder / BACKUP)
    with (
        stop_on_signals() as stop,
        Store.open(request.results) as store,
        closing(AgentServer(subject.workload.script_file)) as agent_server,
        open_screen(sys.stderr, plain=request.plain) as screen,
    ):
        print_notices(screen, request, subject.workload)

        def explain(runner: WorkloadRunner, seconds: float) -> tuple[ExperimentDesign, Experiment]:
            time_budget = TimeBudget(seconds, share=seconds / budget_s)
            events = ExperimentEvents()
            experiment = Experiment(runner, time_budget, events, stop, max_rounds=EXPLAIN_ROUNDS)
            return experiment.run(subject.design(experiment)), experiment

        options = request.run_options(stop=stop, agent_server=agent_server)
        search = Search(
            runner=build_runner(request, subject.workload, machine, store, options),
            explain=explain,
            time_budget=TimeBudget(budget_s),
            events=TuneProgress(screen),
            stop=stop,
            cores=machine.cores,
            edit_script=partial(edit_script, folder=Path.cwd(), copies=folder / COPIES),
            convert_script=partial(
                convert_script,
                workload=subject.workload,
                folder=Path.cwd(),
                copies=folder / COPIES,
            ),
            allowed=allowed,
        )
        try:
            result = search.run()
        except RunFailure:
            if stop.signum is None:
                raise
            screen.print_line("stopped before the original was measured: there is no result")
            return 128 + stop.signum
        files: dict[str, str] = {}
        if result.is_verified:
            if result.profile is None:
                files = plan_options(result, request, subject.workload, machine)
            else:
                files = keep_result(result, subject.workload, machine, folder, apply=request.apply)
        if not request.no_report:
            files |= write_report(result, files, folder)
    if request.as_json:
        render.print_json(result.to_json(files))
    else:
        print_result(result, files, plain=request.plain)
    if stop.signum is not None:
        return 128 + stop.signum
    return NOT_VERIFIED if result.kept and not result.is_verified else 0


def keep_result(
    result: TuneResult, workload: Workload, machine: Machine, folder: Path, *, apply: bool
) -> dict[str, str]:
    """Write what keeps the result of a script; return paths, and what is left by hand, by kind.

    A patch is written, and with ``apply`` applied, only if runs of the edited copy were faster and
    train the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    toml, diff = folder / TOML_FILE, folder / PATCH_FILE
    diff.unlink(missing_ok=True)
    profile = result.profile
    assert profile is not None
    files: dict[str, str] = {}
    if result.is_in_source_only:
        toml.unlink(missing_ok=True)
    else:
        write_settings(result, workload, machine, toml, profile)
        files["toml"] = display_path(toml.absolute())
    verified = result.verification
    copy = verified.copy or EditedCopy()
    notes = [*copy.notes]
    if copy.sources and verified.copy_objection is None:
        write_patch(copy.patch, diff)
        files["patch"] = display_path(diff.absolute())
        if apply:
            try:
                changed = apply_patch(copy.patch, Path.cwd(), folder / BACKUP)
            except UsageError as error:
                notes.append(str(error))
            else:
                names = ", ".join(display_path(path) for path in changed)
                files["applied to"] = f"{names}; --revert takes it back"
    elif copy.sources:
        notes.append(f"no patch, because of the edited copy: {verified.copy_objection}")
    if result.is_conversion:
        script, *arguments = workload.script
        start = ("--devices", f"{result.devices}", script)
        files["run"] = shlex.join(("nfold", "run", *start, *arguments))
        again = shlex.join(("nfold", "tune", *start, *(["--", *arguments] if arguments else [])))
        files["next"] = f"{again} tries the plan of nfold.Run on the changed script"
    if copy.patch.variables:
        variables = (f"{one.name}={one.value}" for one in copy.patch.variables)
        files["variables"] = " ".join(variables)
    if notes:
        files["by hand"] = "; ".join(notes)
    return files


def script_files(workload: Workload) -> list[Path]:
    """Return the file of a script; of a module, only its fingerprint is known before it runs."""
    return [Path(workload.script[0])] if workload.script and workload.module is None else []


def write_report(result: TuneResult, files: dict[str, str], folder: Path) -> dict[str, str]:
    """Write the page of a result; return its path. Without altair, say so on standard error."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = write_tune_page(folder, page_content(result, files))
    if missing:
        sys.stderr.write(terminal_safe(f"no HTML report: {missing}") + "\n")
        return {}
    return {"report": display_path((folder / TUNE_PAGE_FILE).absolute())}


def plan_options(
    result: TuneResult, request: TuneOptions, workload: Workload, machine: Machine
) -> dict[str, str]:
    """Return the options of ``nfold train`` that keep the result of a workload, and what they need."""
    original, final = result.original.plan, result.final.plan
    changes = {name: value for name, (value, _) in final.diff(original).items()}
    axes, requested = requested_plan(request, workload)
    completed = build_plan_completer(machine, request.data)(workload, requested.edit(**changes))
    # A field that is chosen by others, such as the layout by the precision, stays as it was measured.
    chosen = {name: value for name, (value, _) in final.diff(completed).items()}
    changes |= {name: value for name, value in chosen.items() if name in TUNABLE_FIELDS}
    per_device = axes.scaling == "weak"
    changes["batch"] = (final.batch or 1) // (final.devices or 1 if per_device else 1)
    factor = (final.batch or 1) / (original.batch or 1)
    if factor == 1:
        del changes["batch"]
    options = (f"--{name.replace('_', '-')} {value}" for name, value in changes.items())
    found = {"options": " ".join(options)}
    if factor != 1:
        found["by hand"] = learning_rate_advice(factor)
    return found


def revert(request: TuneOptions) -> int:
    """Take an applied patch back. Raises UsageError if that is not possible."""
    if request.target is None:
        raise UsageError("--revert needs the script; next: nfold tune train.py --revert")
    script = (MODULE_FLAG, request.target) if request.module else (request.target,)
    workload = Workload(name=request.target, script=script)
    changed = revert_patch(explanation_folder(request.results, workload) / BACKUP)
    sys.stdout.write(f"as before: {', '.join(display_path(path) for path in changed)}\n")
    return 0


def parse_permissions(text: str | None) -> frozenset[str]:
    """Return what ``--allow batch_norm,precision`` allows. Raises UnknownValue."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in PERMISSIONS:
            raise UnknownValue("allow", name, PERMISSIONS)
    return frozenset(names)
