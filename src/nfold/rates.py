"""What a machine does with the image files of a workload, as it was measured there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nfold.plan import Plan

MARGIN = 1.25
"""How much more the workers of a device should make than it takes."""
COMPILED = 2.0
"""How many times as fast as measured a compiled step is taken to be: none was compiled for it."""
READERS = 8
"""The most workers that only read."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Images per second: the median of a few short windows, the least and the most of them."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:,.0f} images/s ({self.low:,.0f}–{self.high:,.0f})"

    def times(self, number: int) -> Rate:
        """Of so many that do the same."""
        return Rate(value=number * self.value, low=number * self.low, high=number * self.high)


@dataclass(frozen=True, kw_only=True)
class InputRates:
    """The rates of one plan's input.

    ``worker`` is one loader process while as many are at work as the machine has cores for,
    decoding and, where the plan says so, distorting; ``decoder`` is nvJPEG on one GPU, None where
    there is none; ``device`` is one GPU training on images that lie there, None where that did not
    fit.
    """

    worker: Rate
    decoder: Rate | None = None
    device: float | None = None

    def suffice(self, plan: Plan) -> int:
        """Workers that keep one of a complete plan's devices busy, perhaps more than it may have.

        All that it may have where nobody knows what the device takes.
        """
        if self.device is None:
            return decoders(plan)
        compiled = COMPILED if "compiled" in str(plan.step) else 1
        return max(1, math.ceil(MARGIN * compiled * self.device / self.worker.value))

    def decoder_wins(self, plan: Plan) -> bool:
        """Whether a device takes more than all its workers make, and nvJPEG makes more than they.

        Each in its worst window against the other's best.
        """
        starved = self.device is None or self.suffice(plan) > decoders(plan)
        suits = plan.augment == "device" and plan.cache == "off"
        if self.decoder is None or not (starved and suits):
            return False
        return self.decoder.low > self.worker.times(decoders(plan)).high

    def told(self, plan: Plan) -> str:
        """The measurements in a sentence, and what was chosen by them."""
        most = decoders(plan)
        parts = [f"measured: a worker makes {self.worker}, {most} make {self.worker.times(most)}"]
        parts += [f"nvJPEG on a GPU {self.decoder}"] if self.decoder else []
        parts += [f"a device trains on {self.device:,.0f}"] if self.device else []
        return f"{'; '.join(parts)}; chosen: decode {plan.decode}, {plan.workers} workers a device"


def decoders(plan: Plan) -> int:
    """The most workers that may decode for a device: all of its cores but the rank's own."""
    return max(1, (plan.cores_per_device or 1) - 1)


def measurable(asked: Plan, complete: Plan) -> bool:
    """Whether rates decide anything: of files on GPUs, where a plan leaves something open."""
    return decodes_for_gpus(complete) and (asked.workers is None or asked.decode is None)


def decodes_for_gpus(complete: Plan) -> bool:
    """Whether the host decodes files for GPUs, where nvJPEG can."""
    here = complete.device == "cuda" and complete.framework == "torch"
    return here and complete.decode == "cpu" and complete.input == "loader"


def fitted(asked: Plan, complete: Plan, rates: InputRates | None) -> Plan:
    """The complete plan with what ``asked`` leaves open of decode and workers chosen by rates.

    Workers that only read files are half the cores' number, as for other inputs.
    """
    if rates is None or not measurable(asked, complete):
        return complete
    decode, workers = asked.decode, asked.workers
    if decode is None:
        decode = "device" if rates.decoder_wins(complete) else "cpu"
    if workers is None:
        most = decoders(complete)
        half = max(1, min(READERS, (complete.cores_per_device or 1) // 2))
        workers = half if decode == "device" else min(most, rates.suffice(complete))
    return complete.edit(decode=decode, workers=workers)
