"""What ``nfold explain`` prints while its runs go on."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from nfold.cli.progress import format_short_duration
from nfold.cli.screen import PlainScreen
from nfold.explain.experiment import ExperimentEvents
from nfold.explain.passes import equalize_epoch_gaps
from nfold.explain.readings import compute_metrics
from nfold.explain.recurring import find_periodic_work, without_affected_steps
from nfold.explain.rung import Trial
from nfold.finding import MIN_STEP_FRACTION
from nfold.inert import terminal_safe
from nfold.measurement import Measurement
from nfold.plan import Plan

DESCRIBED_FIELDS = ("devices", "batch", "strategy", "steps", "epochs", "warmup_steps")
"""Fields of a plan that a rung's words tell, or that say nothing about what is compared."""
STORED_RESULTS_NOTE = (
    "nfold: what was measured before is not measured again; next: --again, to do so"
)


class ExplainProgress(ExperimentEvents):
    """One line a finished run, and a live one with the time that is left."""

    def __init__(self, shown: PlainScreen) -> None:
        self._shown = shown
        self._runs = 0
        self._running = self._printed_stored_note = False
        self._usual: Plan | None = None

    def started(self, rungs: Sequence[Trial], number: int, remaining_s: float) -> None:
        """Show what runs now."""
        self._running = True
        more = f" and {len(rungs) - 1} more in turns" if len(rungs) > 1 else ""
        self._shown.show_live(
            terminal_safe(
                f"{format_short_duration(remaining_s)} left · {self._words(rungs[0])}{more} · round {number + 1}"
            )
        )

    def finished(
        self, rungs: Sequence[Trial], number: int, found: Sequence[Measurement], remaining_s: float
    ) -> None:
        """Print a line for each that was measured; one for a run that failed."""
        self._runs += 1
        took = format_short_duration(found[0].wall_seconds) if self._running else _when(found[0])
        took = f"({took}, {format_short_duration(remaining_s)} left)"
        if not (self._running or self._printed_stored_note):
            self._printed_stored_note = True
            self._shown.print_line(STORED_RESULTS_NOTE)
        self._running = False
        lines = [
            f"{self._words(rung)} · round {number + 1}: {_outcome(rung, one)}"
            for rung, one in zip(rungs, found, strict=True)
        ]
        for place, line in enumerate(_measured_or_first_failure(lines, found)):
            mark = " " * len(f"[{self._runs}]") if place else f"[{self._runs}]"
            self._shown.print_line(terminal_safe(f"{mark} {line}{'' if place else f' {took}'}"))

    def _words(self, trial: Trial) -> str:
        """The rung, with what is another than in the first plan that was complete."""
        if trial.plan.batch is None:
            return str(trial)
        self._usual = self._usual or trial.plan
        own, usual = trial.plan.to_dict(), self._usual.to_dict()
        changed = {name: value for name, value in own.items() if value != usual.get(name)}
        return ", ".join(
            [str(trial), *(f"{k} {v}" for k, v in changed.items() if k not in DESCRIBED_FIELDS)]
        )


def _when(measurement: Measurement) -> str:
    """When an earlier explanation measured it, by this machine's clock and zone."""
    if not measurement.started_at:
        return "measured before"
    then = datetime.datetime.fromisoformat(measurement.started_at).astimezone()
    return f"measured {then:%Y-%m-%d %H:%M}"


def _measured_or_first_failure(lines: Sequence[str], found: Sequence[Measurement]) -> list[str]:
    """Those of all that were measured, and of what ended the others one."""
    pairs = list(zip(lines, found, strict=True))
    ended = [line for line, one in pairs if one.status != "ok"]
    return [line for line, one in pairs if one.status == "ok"] + ended[:1]


def _outcome(trial: Trial, measurement: Measurement) -> str:
    alike = equalize_epoch_gaps(measurement)
    recurs = find_periodic_work({trial: alike}).get(trial)
    found = compute_metrics(
        without_affected_steps(alike, recurs), ranks_synchronize=trial.ranks_synchronize
    )
    if measurement.status != "ok":
        return f"{measurement.status}: {measurement.cause.text if measurement.cause else ''}"
    if "step" not in found:
        return "had no turn before the script ended"
    more = {
        "between epochs": found.get("gap", 0.0),
        "after some only": recurs.ms_per_step if recurs else 0,
    }
    told = [
        f" and {ms:.2f} {when}"
        for when, ms in more.items()
        if ms > MIN_STEP_FRACTION * found["step"]
    ]
    return f"{found['step']:.2f} ms a step" + "".join(told)
