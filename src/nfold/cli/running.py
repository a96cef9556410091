"""What ``nfold run`` does once its options are read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nfold.cli.signals import stop_on_signals
from nfold.errors import RunFailure
from nfold.inert import inert
from nfold.place import shown_path
from nfold.run import attach
from nfold.run.asked import Asked, check_target, rendezvous_of
from nfold.run.launch import Outcome, Ranks, exit_code, launch, told
from nfold.run.launch import attach as become_script
from nfold.telemetry.inspection import inspect_machine

DIM, NORMAL = "\x1b[2m", "\x1b[0m"


def run(asked: Asked) -> int:
    """Launch the script and see it to its end; the exit code. Raises RunFailure where it fails."""
    check_target(asked)
    if attach.attached():
        become_script(asked)
    machine = inspect_machine()
    ranks, meeting = Ranks.of(asked, machine), rendezvous_of(asked)
    crowd = f"{ranks.processes} ranks share {machine.cores} cores"
    crowded = ranks.device == "cpu" and ranks.processes > machine.cores
    _warn([meeting.warning, crowd if crowded else None])
    with stop_on_signals() as stop:
        outcome = launch(asked, ranks, meeting, stop=stop, output=sys.stdout.buffer)
    return _say(outcome)


def _warn(doubts: Sequence[str | None]) -> None:
    for doubt in doubts:
        if doubt is not None:
            sys.stderr.write(f"nfold: warning: {inert(doubt)}\n")


def _say(outcome: Outcome) -> int:
    """The one line after a good end, what went wrong after a bad one."""
    if outcome.status not in ("ok", "interrupted"):
        raise RunFailure(told(outcome))
    where = inert(shown_path(outcome.folder))
    said = f"nfold: logs in {where}"
    if outcome.status == "interrupted" and outcome.cause is not None:
        said = f"nfold: stopped, {outcome.cause.text.removeprefix('nfold ')}; logs in {where}"
    styled = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    sys.stderr.write(f"{DIM}{said}{NORMAL}\n" if styled else f"{said}\n")
    return exit_code(outcome)
