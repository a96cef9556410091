"""One run: all arms alive on the same devices, one at a time training, round after round."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleet import Arm, ArmFailed

CALIBRATION_STEPS = 10
LEAST_SKIP = 3


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long everything takes or may take, in seconds; ``settle_s`` lets loaders fill queues."""

    rounds: int = 7
    window_s: float = 1.0
    settle_s: float = 0.3
    ready_s: float = 240.0
    turn_s: float = 120.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """One turn of one arm: steps and samples of all ranks, and each rank's own time for them."""

    round: int
    arm: str
    steps: int
    samples: int
    seconds: tuple[float, ...]
    loss: float
    peak_memory_bytes: int

    @property
    def rate(self) -> float:
        """Samples per second of the slowest rank."""
        return self.samples / max(self.seconds)


def started(arms: list[Arm], pace: Pace, *, one_by_one: bool) -> None:
    """Start all arms and wait until each is ready or failed, together or one after the other.

    Together is shorter; one by one no arm's search for fast kernels is disturbed by another's.
    """
    for group in [[arm] for arm in arms] if one_by_one else [arms]:
        for arm in group:
            arm.start()
        deadline = time.monotonic() + pace.ready_s
        for arm in group:
            arm.ready = _attempt(arm, arm.answers, deadline) or []


def measure(arms: list[Arm], pace: Pace, keep: Callable[[Window], None]) -> None:
    """Every round all arms that still live, in random order; ``keep`` gets each window at once."""
    draw = random.Random(0)
    steps = {arm.spec.name: calibrated(arm, pace) for arm in living(arms)}
    for number in range(pace.rounds):
        order = living(arms)
        draw.shuffle(order)
        for arm in order:
            window = _attempt(arm, turn, arm, number, steps[arm.spec.name], pace)
            if window:
                keep(window)


def living(arms: list[Arm]) -> list[Arm]:
    """The arms that have not failed."""
    return [arm for arm in arms if arm.error is None]


def calibrated(arm: Arm, pace: Pace) -> int:
    """Steps of an arm that take ``window_s``; found in two turns, a short and a longer one."""
    steps = CALIBRATION_STEPS
    for part in (0.3, 1.0):
        window = _attempt(arm, turn, arm, -1, steps, pace)
        if window is None:
            break
        steps = max(1, round(part * pace.window_s * window.steps / max(window.seconds)))
    return steps


def turn(arm: Arm, number: int, steps: int, pace: Pace) -> Window:
    """One window of one arm; raises ArmFailed."""
    time.sleep(pace.settle_s)
    skip = max(LEAST_SKIP, *(ready["queued_steps"] for ready in arm.ready))
    arm.ask({"steps": steps, "skip": skip})
    answers = arm.answers(time.monotonic() + pace.turn_s)
    return Window(
        round=number,
        arm=arm.spec.name,
        steps=answers[0]["steps"],
        samples=answers[0]["samples"],
        seconds=tuple(answer["seconds"] for answer in answers),
        loss=answers[0]["loss"],
        peak_memory_bytes=max(answer["peak_memory_bytes"] for answer in answers),
    )


def _attempt(arm: Arm, act: Callable[..., Any], *arguments: Any) -> Any:
    """What ``act`` gives, or None where the arm fails in it, which ends the arm and no other."""
    try:
        return act(*arguments)
    except ArmFailed as error:
        arm.fail(error)
        print(f"{arm.spec.name} failed: {error}", file=sys.stderr)
        return None
