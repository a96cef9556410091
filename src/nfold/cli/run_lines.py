"""What ``nfold explain`` prints while its runs go on."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from nfold.cli.progress import duration
from nfold.cli.screen import Screen
from nfold.explain.experiment import Events
from nfold.explain.passes import as_long_for_all
from nfold.explain.readings import readings
from nfold.explain.recurring import recurring, without
from nfold.explain.rung import Rung
from nfold.finding import FLOOR
from nfold.inert import inert
from nfold.measurement import Measurement
from nfold.plan import Plan

SHOWN = ("devices", "batch", "strategy", "steps", "epochs", "warmup_steps")
"""Fields of a plan that a rung's words tell, or that say nothing about what is compared."""
EARLIER = "nfold: what was measured before is not measured again; next: --again, to do so"


class RunLines(Events):
    """One line a finished run, and a live one with the time that is left."""

    def __init__(self, shown: Screen) -> None:
        self._shown = shown
        self._runs = 0
        self._running = self._told_of_earlier = False
        self._usual: Plan | None = None

    def started(self, rungs: Sequence[Rung], number: int, left_s: float) -> None:
        """Show what runs now."""
        self._running = True
        more = f" and {len(rungs) - 1} more in turns" if len(rungs) > 1 else ""
        self._shown.show(
            inert(f"{duration(left_s)} left · {self._words(rungs[0])}{more} · round {number + 1}")
        )

    def finished(
        self, rungs: Sequence[Rung], number: int, found: Sequence[Measurement], left_s: float
    ) -> None:
        """Print a line for each that was measured; one for a run that failed."""
        self._runs += 1
        took = duration(found[0].wall_seconds) if self._running else _when(found[0])
        took = f"({took}, {duration(left_s)} left)"
        if not (self._running or self._told_of_earlier):
            self._told_of_earlier = True
            self._shown.say(EARLIER)
        self._running = False
        lines = [
            f"{self._words(rung)} · round {number + 1}: {_outcome(rung, one)}"
            for rung, one in zip(rungs, found, strict=True)
        ]
        for place, line in enumerate(_told(lines, found)):
            mark = " " * len(f"[{self._runs}]") if place else f"[{self._runs}]"
            self._shown.say(inert(f"{mark} {line}{'' if place else f' {took}'}"))

    def _words(self, rung: Rung) -> str:
        """The rung, with what is another than in the first plan that was complete."""
        if rung.plan.batch is None:
            return str(rung)
        self._usual = self._usual or rung.plan
        own, usual = rung.plan.to_dict(), self._usual.to_dict()
        changed = {name: value for name, value in own.items() if value != usual.get(name)}
        return ", ".join([str(rung), *(f"{k} {v}" for k, v in changed.items() if k not in SHOWN)])


def _when(measurement: Measurement) -> str:
    """When an earlier explanation measured it, by this machine's clock and zone."""
    if not measurement.started_at:
        return "measured before"
    then = datetime.datetime.fromisoformat(measurement.started_at).astimezone()
    return f"measured {then:%Y-%m-%d %H:%M}"


def _told(lines: Sequence[str], found: Sequence[Measurement]) -> list[str]:
    """Those of all that were measured, and of what ended the others one."""
    pairs = list(zip(lines, found, strict=True))
    ended = [line for line, one in pairs if one.status != "ok"]
    return [line for line, one in pairs if one.status == "ok"] + ended[:1]


def _outcome(rung: Rung, measurement: Measurement) -> str:
    alike = as_long_for_all(measurement)
    recurs = recurring({rung: alike}).get(rung)
    found = readings(without(alike, recurs), coupled=rung.coupled)
    if measurement.status != "ok":
        return f"{measurement.status}: {measurement.cause.text if measurement.cause else ''}"
    if "step" not in found:
        return "had no turn before the script ended"
    more = {"between epochs": found.get("gap", 0.0), "after some only": recurs.ms if recurs else 0}
    told = [f" and {ms:.2f} {when}" for when, ms in more.items() if ms > FLOOR * found["step"]]
    return f"{found['step']:.2f} ms a step" + "".join(told)
