"""What ``nfold run`` does once its options are read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nfold.cli.signals import stop_on_signals
from nfold.core.errors import RunFailure
from nfold.core.format import terminal_safe
from nfold.core.source_location import display_path
from nfold.launch import workload_run
from nfold.launch.script_run import (
    LocalRanks,
    ScriptOutcome,
    describe_detached,
    describe_outcome,
    exit_code,
    launch_script,
)
from nfold.launch.script_run import exec_script as become_script
from nfold.launch.torchrun_args import TorchrunArgs, build_rendezvous, check_target
from nfold.telemetry.machine_inspection import inspect_machine

DIM, NORMAL = "\x1b[2m", "\x1b[0m"


def launch_and_report(args: TorchrunArgs) -> int:
    """Launch the script and see it to its end; the exit code. Raises RunFailure where it fails."""
    check_target(args)
    if workload_run.in_external_job():
        become_script(args)
    machine = inspect_machine()
    ranks, meeting = LocalRanks.from_args(args, machine), build_rendezvous(args)
    crowd = f"{ranks.processes} ranks share {machine.cores} cores"
    crowded = ranks.device == "cpu" and ranks.processes > machine.cores
    _warn([meeting.warning, crowd if crowded else None])
    with stop_on_signals() as stop:
        outcome = launch_script(args, ranks, meeting, stop=stop, output=sys.stdout.buffer)
    _warn([describe_detached(outcome.detached) if outcome.detached else None])
    return _say(outcome)


def _warn(warnings: Sequence[str | None]) -> None:
    for doubt in warnings:
        if doubt is not None:
            sys.stderr.write(f"nfold: warning: {terminal_safe(doubt)}\n")


def _say(outcome: ScriptOutcome) -> int:
    if outcome.status not in ("ok", "interrupted"):
        raise RunFailure(describe_outcome(outcome))
    where = terminal_safe(display_path(outcome.folder))
    said = f"nfold: logs in {where}"
    if outcome.status == "interrupted" and outcome.cause is not None:
        said = f"nfold: stopped, {outcome.cause.text.removeprefix('nfold ')}; logs in {where}"
    styled = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    sys.stderr.write(f"{DIM}{said}{NORMAL}\n" if styled else f"{said}\n")
    return exit_code(outcome)
