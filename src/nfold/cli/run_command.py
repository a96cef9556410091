"""``nfold run``: start the ranks of a script and report their outcome."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence

from nfold.cli.signals import stop_on_signals
from nfold.core.errors import RunFailure, UsageError
from nfold.core.format import terminal_safe
from nfold.core.machine import Machine
from nfold.core.source_location import display_path
from nfold.core.workload import Workload
from nfold.instrument.run_remedies import describe_unapplied
from nfold.launch import workload_run
from nfold.launch.script_run import (
    LocalRanks,
    describe_detached,
    describe_outcome,
    exec_script,
    exit_code,
    launch_script,
)
from nfold.launch.torchrun_args import (
    TorchrunArgs,
    build_rendezvous,
    check_target,
    parse_plan_fields,
)
from nfold.launch.verdict import Outcome
from nfold.launch.watch_report import describe_watched_steps, read_watched_steps
from nfold.report.writer import explanation_folder, read_values
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.tune.settings_file import TunedSettings

DIM, NORMAL = "\x1b[2m", "\x1b[0m"


def launch_and_report(args: TorchrunArgs) -> int:
    """Run the script to its end and return the exit code; raises RunFailure if it fails."""
    check_target(args)
    if workload_run.in_external_job():
        exec_script(args)
    machine = inspect_machine()
    settings = read_settings(args)
    if settings is not None:
        args = with_measured_ranks(args, settings)
    ranks, rendezvous = LocalRanks.from_args(args, machine), build_rendezvous(args)
    remedies = None
    if settings is not None:
        total = ranks.processes * rendezvous.nodes[1]
        _warn(check_settings(settings, args, ranks.device, total, machine))
        remedies = settings.run_remedies(ranks.device, total)
    too_many = f"{ranks.processes} ranks share {machine.cores} cores"
    is_crowded = ranks.device == "cpu" and ranks.processes > machine.cores
    _warn([rendezvous.warning, too_many if is_crowded else None])
    with stop_on_signals() as stop:
        outcome = launch_script(
            args, ranks, rendezvous, stop=stop, output=sys.stdout.buffer, remedies=remedies
        )
    if remedies is not None:
        for line in describe_unapplied(outcome.folder, remedies):
            sys.stderr.write(f"nfold: {line}\n")
    if args.watch:
        ranks_seen = read_watched_steps(outcome.folder)
        for line in describe_watched_steps(ranks_seen, _explained_ms(args, ranks.processes)):
            sys.stderr.write(f"nfold: {line}\n")
    _warn([describe_detached(outcome.detached) if outcome.detached else None])
    return _report(outcome)


def read_settings(args: TorchrunArgs) -> TunedSettings | None:
    """Return the settings of ``--with``, None without it; raises UsageError."""
    if args.settings is not None:
        return TunedSettings.read(args.settings)
    if args.force:
        raise UsageError(
            "--force applies to --with; next: add --with nfold.toml, or remove --force"
        )
    return None


def with_measured_ranks(args: TorchrunArgs, settings: TunedSettings) -> TorchrunArgs:
    """Return the options with the devices of the settings, if the options name none."""
    if args.nproc_per_node is not None or "device" in parse_plan_fields(args.plan):
        return args
    measured = f"{settings.device}:{settings.processes}"
    return dataclasses.replace(args, nproc_per_node=measured)


def check_settings(
    settings: TunedSettings, args: TorchrunArgs, device: str, ranks: int, machine: Machine
) -> list[str]:
    """Return warnings about a run with the settings.

    Raises UsageError for another script and MachineUnfit for other devices or another machine; with
    ``--force`` these are warnings too.
    """
    find = Workload.from_module if args.module else Workload.from_script
    script = find(args.script, *args.arguments)
    mismatches = settings.mismatches(script, device, ranks, machine)
    if mismatches and not args.force:
        raise mismatches[0]
    return [
        *(str(mismatch).partition("; next: ")[0] for mismatch in mismatches),
        *filter(None, [settings.other_arguments(script)]),
    ]


def _explained_ms(args: TorchrunArgs, devices: int) -> float | None:
    """Return the step time of the last explanation on as many devices, if there is one."""
    target = ("-m", args.script) if args.module else (args.script,)
    workload = Workload(name=args.script, script=target)
    found = read_values(explanation_folder(args.results, workload))
    if found is None or found.budget.devices != devices:
        return None
    return found.budget.n_devices.step_ms.value


def _warn(warnings: Sequence[str | None]) -> None:
    for warning in warnings:
        if warning is not None:
            sys.stderr.write(f"nfold: warning: {terminal_safe(warning)}\n")


def _report(outcome: Outcome) -> int:
    if outcome.status not in ("ok", "interrupted"):
        raise RunFailure(describe_outcome(outcome))
    folder = terminal_safe(display_path(outcome.folder))
    line = f"nfold: logs in {folder}"
    if outcome.status == "interrupted" and outcome.cause is not None:
        line = f"nfold: stopped, {outcome.cause.text.removeprefix('nfold ')}; logs in {folder}"
    styled = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    sys.stderr.write(f"{DIM}{line}{NORMAL}\n" if styled else f"{line}\n")
    return exit_code(outcome)
