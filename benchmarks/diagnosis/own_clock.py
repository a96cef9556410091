"""What doses cost a step, by the own clock of the script that has them, without any explanation.

Doses that are spent in a step take turns in one run, the script without any among them: what two
processes differ by is in both sides of a difference. What was counted for them in the first run is
the same in all others. Doses of what workers do have runs of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

Doses = Mapping[str, float]
Asked = tuple[str, float]
"""A cause and its dose."""
Script = Callable[[Doses | Sequence[Doses]], str]
"""Runs the script with doses, or with several in turn; returns what it printed."""
IN_TURNS = ("synchronization", "link", "layout", "copies", "host-syncs", "host-work")
"""Doses that are spent in a step, and are not exact."""
TIMED_STEPS = 40
REPEATS = 3
"""Of the processes that time a dose where steps drift, else one less; the middle one counts."""
BETWEEN = 4
"""Doses after which the script is timed without any again."""
SETTLED = re.compile(r'"settled": (\{[^}]*\})')
PRINTED = re.compile(r'"step_ms": ([0-9.]+), "turn": ([0-9]+)')


def printed_ms(text: str) -> list[tuple[int, float]]:
    """The turns and milliseconds that ranks' clocks printed; two may have written on one line."""
    return [(int(turn), float(found)) for found, turn in PRINTED.findall(text)]


def slowest_ms(text: str) -> dict[int, float]:
    """A step on all devices by the clock of the slowest rank, by turn."""
    found: dict[int, float] = {}
    for turn, step_ms in printed_ms(text):
        found[turn] = max(step_ms, found.get(turn, 0.0))
    return found


def rota(asked: Sequence[Asked]) -> list[Asked | None]:
    """The order of the doses, with steps without any (None) before, among and after them."""
    found: list[Asked | None] = [None]
    for at in range(0, len(asked), BETWEEN):
        found += [*asked[at : at + BETWEEN], None]
    return found


@dataclass
class Readings:
    """What is known of the doses of one script: ``ms`` a step, and the counts ``settled``.

    ``drifts``: whether a step without a dose is another one some minutes later, as it is on a host
    that others use too. A GPU's are alike.
    """

    drifts: bool = True
    ms: dict[Asked, float] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    healthy_ms: float | None = None

    def learn(self, asked: Sequence[Asked], script: Script) -> None:
        """Time these, and settle what they count, in REPEATS runs."""
        asked = [one for one in asked if one not in self.ms]
        if not asked:
            return
        each: dict[Asked, list[float]] = {one: [] for one in asked}
        healthy: list[float] = []
        for number in range(REPEATS if self.drifts else REPEATS - 1):
            order = rota(asked[:: -1 if number % 2 else 1])
            printed = script([dict([one] if one else []) for one in order])
            for found in SETTLED.findall(printed):
                self.settled |= json.loads(found)
            steps_ms = slowest_ms(printed)
            healthy += [steps_ms[turn] for turn, one in enumerate(order) if one is None]
            for one, ms in added(order, steps_ms).items():
                each[one].append(ms)
        self.ms |= {one: median(found) for one, found in each.items()}
        self.healthy_ms = median(healthy)

    def keep(self, file: Path) -> None:
        """Write all that is known."""
        known = {"healthy_ms": self.healthy_ms, "settled": self.settled, "ms": [*self.ms.items()]}
        file.write_text(json.dumps(known, indent=1))

    def read(self, file: Path) -> None:
        """What was kept before."""
        known = json.loads(file.read_text())
        self.healthy_ms, self.settled = known["healthy_ms"], known["settled"]
        self.ms = {(cause, dose): ms for (cause, dose), ms in known["ms"]}

    def beside(self, doses: Doses, script: Script) -> float:
        """How much longer a step takes: medians of fresh processes, in turns if it drifts."""
        with_, without = [], []
        for _ in range(REPEATS if self.drifts else 1):
            with_.append(slowest_ms(script(doses))[0])
            if self.drifts or self.healthy_ms is None:
                self.healthy_ms = slowest_ms(script({}))[0]
            without.append(self.healthy_ms)
        return median(with_) - median(without)


def added(order: Sequence[Asked | None], steps_ms: Mapping[int, float]) -> dict[Asked, float]:
    """What each dose of one run adds to a step without any, in the mean of the nearest two."""
    healthy = [turn for turn, one in enumerate(order) if one is None]
    found = {}
    for turn, one in enumerate(order):
        if one is not None:
            before = max(at for at in healthy if at < turn)
            after = min(at for at in healthy if at > turn)
            found[one] = steps_ms[turn] - fmean((steps_ms[before], steps_ms[after]))
    return found
