"""Nobody waits long, and again and again, for what lies between the passes of a script.

Ranks decide alike, by rank 0's clock, or they would wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nfold.frameworks.base import Task
from nfold.frameworks.torch.script.agreeing import agreed_value, publish
from nfold.frameworks.torch.script.turning import planned_length

MAX_GAPS_S = 5.0
"""Between two passes that are cut short, of which a run holds three; in all between others."""
DECISION_KEY = "long after pass"


class EpochGapLimit:
    """What a rank waits for between passes, in a run that is measured in steps.

    A run of passes that are cut short ends with its first timed pass, if what was before that took
    long: it is a validation, most often. In another run no pass ends any more, from the next one
    on, once what lay between passes took long in all: ``never_end`` is called. ``waiting`` is
    called while rank 0 has not yet said which, because it may be in its validation.
    """

    def __init__(
        self, task: Task, repeat_passes: Callable[[], None], on_wait: Callable[[], None]
    ) -> None:
        self._repeat_passes = repeat_passes
        self._on_wait = on_wait
        self._passes_truncated = task.variant.batches_per_epoch is not None
        self._in_steps = task.plan.steps is not None
        self._pass_steps = planned_length(task).warmup
        self._passes = 0
        self._exceeded = False
        self._gaps_s = 0.0
        self._last_step_s: float | None = None
        self._pass_start_s = 0.0

    def on_pass_start(self) -> None:
        """A pass over the training data begins."""
        if not self._in_steps or self._passes_truncated or self._last_step_s is None:
            return
        self._pass_start_s = time.monotonic()
        self._gaps_s += self._pass_start_s - self._last_step_s
        self._passes += 1
        # What rank 0 said a pass ago is there by now: nobody waits for it.
        if self._is_decision_pass(self._passes - 1) and self._agreed(self._passes - 1):
            self._repeat_passes()
        if self._is_decision_pass(self._passes):
            self._publish(self._passes)

    def on_first_batch(self) -> None:
        """Its first batch is there, which was waited for."""
        self._gaps_s += time.monotonic() - self._pass_start_s if self._passes else 0.0

    def ends_run(self, steps: int) -> bool:
        """Whether step ``steps``, which has just been made, was the last one. Ask after each."""
        if not self._in_steps:
            return False
        before, self._last_step_s = self._last_step_s, time.monotonic()
        if not self._passes_truncated:
            return False
        if steps == self._pass_steps + 1 and before is not None:
            self._gaps_s = self._last_step_s - before
            self._publish(0)
        return steps == 2 * self._pass_steps and self._agreed(0)

    def _is_decision_pass(self, passes: int) -> bool:
        """After 1, 2, 4, 8 passes and so on: what ranks ask each other takes time too."""
        return passes > 0 and passes & (passes - 1) == 0

    def _publish(self, number: int) -> None:
        """Decide; rank 0 for the others."""
        self._exceeded = self._gaps_s > MAX_GAPS_S
        publish(f"{DECISION_KEY} {number}", self._exceeded)

    def _agreed(self, number: int) -> bool:
        """What was decided, by rank 0."""
        return agreed_value(f"{DECISION_KEY} {number}", self._exceeded, self._on_wait)
