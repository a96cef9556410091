"""The telemetry sampler around one run: started before, stopped after, read for doubts."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType

from nfold.measurement import Caveat, RankSamples
from nfold.run.handoff import HandoffFolder
from nfold.run.options import RunOptions, RunProgress
from nfold.telemetry import clocks, derive, read, sampler

SAMPLER_STOP_TIMEOUT_S = 3.0


class TelemetrySession:
    """Runs the sampler for as long as the context lasts.

    ``gpus`` are the run's GPUs by their places in CUDA's order. ``options`` is the run's
    options with a ``watch`` that also tells the devices' load.
    """

    def __init__(self, folder: HandoffFolder, gpus: tuple[int, ...], options: RunOptions) -> None:
        self._csv = folder.telemetry_csv
        self._ranks = folder.ranks_file
        self._gpus = gpus
        self._interval_s = options.telemetry_interval_s
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = options.on_progress
        self._load: float | None = None
        self._load_read = 0.0
        self.options = dataclasses.replace(options, on_progress=self._watch_with_load)

    def __enter__(self) -> TelemetrySession:
        self._process = sampler.start_sampler(self._csv, self._ranks, self._gpus, self._interval_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(SAMPLER_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def energy_joules(self, ranks: Sequence[RankSamples]) -> float | None:
        """Energy of all devices over the timed windows, None where none of them says."""
        span = _timed_span(ranks)
        return derive.energy_joules(self._csv, *span) if span else None

    def with_clocks(
        self, ranks: Sequence[RankSamples], devices: Sequence[int]
    ) -> tuple[RankSamples, ...]:
        """The ranks with the clocks of their GPUs; rank k has ``devices[k]``."""
        return clocks.with_clocks(self._csv, ranks, devices) if self._gpus else tuple(ranks)

    def caveats(self, ranks: Sequence[RankSamples]) -> list[Caveat]:
        """What the telemetry of the timed windows holds against their numbers."""
        span = _timed_span(ranks)
        return derive.telemetry_caveats(self._csv, *span) if span else []

    def _watch_with_load(self, progress: RunProgress) -> None:
        if time.monotonic() - self._load_read >= self._interval_s:
            self._load_read = time.monotonic()
            self._load = self._device_load()
        self._watch(dataclasses.replace(progress, device_load=self._load))

    def _device_load(self) -> float | None:
        """Mean utilisation of the run's GPUs in %, or the host's where it runs on CPU devices."""
        row = read.read_latest_row(self._csv)
        loads = [row.get(f"gpu{gpu}_utilisation_percent") for gpu in self._gpus]
        known = [load for load in loads if load is not None]
        if known:
            return sum(known) / len(known)
        return None if self._gpus else row.get("host_cpu_percent")


def _timed_span(ranks: Sequence[RankSamples]) -> tuple[float, float] | None:
    windows = [window for rank in ranks for window in rank.windows]
    if not windows:
        return None
    return min(w.start_s for w in windows), max(w.start_s + w.seconds for w in windows)
