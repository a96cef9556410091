"""Measured rates of decoding and training on image files, and the plan that they suggest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nfold.core.plan import Plan

WORKER_MARGIN = 1.25  # workers of a device should make this many times what it consumes
COMPILED_SPEEDUP = 2.0  # assumed for a compiled step: rates are measured with an eager step
MAX_READING_WORKERS = 8  # workers that read without decoding


@dataclass(frozen=True, kw_only=True)
class ImageRate:
    """Images per second: median, minimum and maximum of a few short windows."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:,.0f} images/s ({self.low:,.0f}–{self.high:,.0f})"

    def scale(self, number: int) -> ImageRate:
        return ImageRate(value=number * self.value, low=number * self.low, high=number * self.high)


@dataclass(frozen=True, kw_only=True)
class InputRates:
    """Rates of the input of one plan.

    Attributes:
        worker: one loader process, while all cores decode and, if planned, augment.
        decoder: nvJPEG on one GPU, None without it.
        device: one GPU training on resident images, None if they did not fit.
    """

    worker: ImageRate
    decoder: ImageRate | None = None
    device: float | None = None

    def workers_needed(self, plan: Plan) -> int:
        """Return the workers that keep one device of a complete plan busy, without a limit.

        If the rate of the device is unknown, returns the maximum.
        """
        if self.device is None:
            return max_decoding_workers(plan)
        compiled = COMPILED_SPEEDUP if "compiled" in str(plan.step) else 1
        return max(1, math.ceil(WORKER_MARGIN * compiled * self.device / self.worker.value))

    def prefers_device_decoding(self, plan: Plan) -> bool:
        """Return whether workers cannot keep a device busy and nvJPEG is faster than them.

        Compares the slowest window of nvJPEG with the fastest of the workers.
        """
        starved = self.device is None or self.workers_needed(plan) > max_decoding_workers(plan)
        suits = plan.augment == "device" and plan.cache == "off"
        if self.decoder is None or not (starved and suits):
            return False
        return self.decoder.low > self.worker.scale(max_decoding_workers(plan)).high

    def describe(self, plan: Plan) -> str:
        """Return the rates and the resulting choice in a sentence."""
        most = max_decoding_workers(plan)
        parts = [f"measured: a worker makes {self.worker}, {most} make {self.worker.scale(most)}"]
        parts += [f"nvJPEG on a GPU {self.decoder}"] if self.decoder else []
        parts += [f"a device trains on {self.device:,.0f}"] if self.device else []
        return f"{'; '.join(parts)}; chosen: decode {plan.decode}, {plan.workers} workers a device"


def max_decoding_workers(plan: Plan) -> int:
    """Return the limit of decoding workers per device: all of its cores but one."""
    return max(1, (plan.cores_per_device or 1) - 1)


def depends_on_rates(partial: Plan, complete: Plan) -> bool:
    """Return whether rates decide a field that the partial plan leaves open."""
    return host_decodes_for_gpus(complete) and (partial.workers is None or partial.decode is None)


def host_decodes_for_gpus(complete: Plan) -> bool:
    """Return whether the host decodes files that nvJPEG could decode."""
    has_nvjpeg = complete.device == "cuda" and complete.framework == "torch"
    return has_nvjpeg and complete.decode == "cpu" and complete.input == "loader"


def complete_with_rates(partial: Plan, complete: Plan, rates: InputRates | None) -> Plan:
    """Choose ``decode`` and ``workers`` by the rates if the partial plan leaves them open.

    Workers that only read files are half as many as cores, as for other inputs.
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
