"""What a machine does with the image files of a workload, as it was measured there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nfold.core.plan import Plan

WORKER_MARGIN = 1.25
"""How much more the workers of a device should make than it takes."""
COMPILED_SPEEDUP = 2.0
"""How many times as fast as measured a compiled step is taken to be: none was compiled for it."""
MAX_READING_WORKERS = 8
"""The most workers that only read."""


@dataclass(frozen=True, kw_only=True)
class ImageRate:
    """Images per second: the median of a few short windows, the least and the most of them."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:,.0f} images/s ({self.low:,.0f}–{self.high:,.0f})"

    def scale(self, number: int) -> ImageRate:
        """Of so many that do the same."""
        return ImageRate(value=number * self.value, low=number * self.low, high=number * self.high)


@dataclass(frozen=True, kw_only=True)
class InputRates:
    """The rates of one plan's input.

    ``worker`` is one loader process while as many are at work as the machine has cores for,
    decoding and, where the plan says so, distorting; ``decoder`` is nvJPEG on one GPU, None where
    there is none; ``device`` is one GPU training on images that lie there, None where that did not
    fit.
    """

    worker: ImageRate
    decoder: ImageRate | None = None
    device: float | None = None

    def workers_needed(self, plan: Plan) -> int:
        """Workers that keep one of a complete plan's devices busy, perhaps more than it may have.

        All that it may have where nobody knows what the device takes.
        """
        if self.device is None:
            return max_decoding_workers(plan)
        compiled = COMPILED_SPEEDUP if "compiled" in str(plan.step) else 1
        return max(1, math.ceil(WORKER_MARGIN * compiled * self.device / self.worker.value))

    def prefers_device_decoding(self, plan: Plan) -> bool:
        """Whether a device takes more than all its workers make, and nvJPEG makes more than they.

        Each in its worst window against the other's best.
        """
        starved = self.device is None or self.workers_needed(plan) > max_decoding_workers(plan)
        suits = plan.augment == "device" and plan.cache == "off"
        if self.decoder is None or not (starved and suits):
            return False
        return self.decoder.low > self.worker.scale(max_decoding_workers(plan)).high

    def describe(self, plan: Plan) -> str:
        """The measurements in a sentence, and what was chosen by them."""
        most = max_decoding_workers(plan)
        parts = [f"measured: a worker makes {self.worker}, {most} make {self.worker.scale(most)}"]
        parts += [f"nvJPEG on a GPU {self.decoder}"] if self.decoder else []
        parts += [f"a device trains on {self.device:,.0f}"] if self.device else []
        return f"{'; '.join(parts)}; chosen: decode {plan.decode}, {plan.workers} workers a device"


def max_decoding_workers(plan: Plan) -> int:
    """The most workers that may decode for a device: all of its cores but the rank's own."""
    return max(1, (plan.cores_per_device or 1) - 1)


def depends_on_rates(partial: Plan, complete: Plan) -> bool:
    """Whether rates decide anything: of files on GPUs, where a plan leaves something open."""
    return host_decodes_for_gpus(complete) and (partial.workers is None or partial.decode is None)


def host_decodes_for_gpus(complete: Plan) -> bool:
    """Whether the host decodes files for GPUs, where nvJPEG can."""
    here = complete.device == "cuda" and complete.framework == "torch"
    return here and complete.decode == "cpu" and complete.input == "loader"


def complete_with_rates(partial: Plan, complete: Plan, rates: InputRates | None) -> Plan:
    """The complete plan with what ``asked`` leaves open of decode and workers chosen by rates.

    Workers that only read files are half the cores' number, as for other inputs.
    """
    if rates is None or not depends_on_rates(partial, complete):
        return complete
    decode, workers = partial.decode, partial.workers
    if decode is None:
        decode = "device" if rates.prefers_device_decoding(complete) else "cpu"
    if workers is None:
        most = max_decoding_workers(complete)
        half = max(1, min(MAX_READING_WORKERS, (complete.cores_per_device or 1) // 2))
        workers = half if decode == "device" else min(most, rates.workers_needed(complete))
    return complete.edit(decode=decode, workers=workers)
