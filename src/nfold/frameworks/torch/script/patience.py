"""Nobody waits long, and again and again, for what lies between the passes of a script.

Ranks decide alike, by rank 0's clock, or they would wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nfold.frameworks.base import Task
from nfold.frameworks.torch.script.agreeing import heard, tell
from nfold.frameworks.torch.script.turning import length_of

LONG_S = 5.0
"""Between two passes that are cut short, of which a run holds three; in all between others."""
TOLD = "long after pass"


class Patience:
    """What a rank waits for between passes, in a run that is measured in steps.

    A run of passes that are cut short ends with its first timed pass, if what was before that took
    long: it is a validation, most often. In another run no pass ends any more, from the next one
    on, once what lay between passes took long in all: ``never_end`` is called. ``waiting`` is
    called while rank 0 has not yet said which, because it may be in its validation.
    """

    def __init__(
        self, task: Task, never_end: Callable[[], None], waiting: Callable[[], None]
    ) -> None:
        self._never_end = never_end
        self._waiting = waiting
        self._cut = task.left_out.pass_batches is not None
        self._in_steps = task.plan.steps is not None
        self._pass_steps = length_of(task).warmup
        self._passes = 0
        self._long = False
        self._between_s = 0.0
        self._stepped_at: float | None = None
        self._began_at = 0.0

    def pass_begins(self) -> None:
        """A pass over the training data begins."""
        if not self._in_steps or self._cut or self._stepped_at is None:
            return
        self._began_at = time.monotonic()
        self._between_s += self._began_at - self._stepped_at
        self._passes += 1
        # What rank 0 said a pass ago is there by now: nobody waits for it.
        if self._deciding(self._passes - 1) and self._heard(self._passes - 1):
            self._never_end()
        if self._deciding(self._passes):
            self._tell(self._passes)

    def pass_began(self) -> None:
        """Its first batch is there, which was waited for."""
        self._between_s += time.monotonic() - self._began_at if self._passes else 0.0

    def over(self, steps: int) -> bool:
        """Whether step ``steps``, which has just been made, was the last one. Ask after each."""
        if not self._in_steps:
            return False
        before, self._stepped_at = self._stepped_at, time.monotonic()
        if not self._cut:
            return False
        if steps == self._pass_steps + 1 and before is not None:
            self._between_s = self._stepped_at - before
            self._tell(0)
        return steps == 2 * self._pass_steps and self._heard(0)

    def _deciding(self, passes: int) -> bool:
        """After 1, 2, 4, 8 passes and so on: what ranks ask each other takes time too."""
        return passes > 0 and passes & (passes - 1) == 0

    def _tell(self, number: int) -> None:
        """Decide; rank 0 for the others."""
        self._long = self._between_s > LONG_S
        tell(f"{TOLD} {number}", self._long)

    def _heard(self, number: int) -> bool:
        """What was decided, by rank 0."""
        return heard(f"{TOLD} {number}", self._long, self._waiting)
