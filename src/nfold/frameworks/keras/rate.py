"""One cycle of the learning rate, computed in the step from the optimizer's own counter."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nfold.frameworks.rate import WARMUP_FRACTION


class KerasOneCycle(keras.optimizers.schedules.LearningRateSchedule):
    """``frameworks/rate.py`` as Keras takes it; ``steps`` are those of the whole training."""

    def __init__(self, peak: float, steps: int) -> None:
        self.peak, self.steps = peak, steps

    def __call__(self, step: Any) -> Any:
        """The rate of step number ``step``, counted from 0."""
        progress = (ops.cast(step, "float32") + 0.5) / self.steps
        rising, falling = progress / WARMUP_FRACTION, (1 - progress) / (1 - WARMUP_FRACTION)
        return self.peak * ops.where(progress < WARMUP_FRACTION, rising, falling)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {"peak": self.peak, "steps": self.steps}
