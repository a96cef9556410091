"""The automatic plan of a script: how its step is executed is chosen in its first steps.

A candidate is compared with the initial plan in windows that alternate: the medians of their step
times decide. All steps are steps of the training: no sample is lost or repeated. The choice is kept on
disk for the next run of the same model on the same machine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nfold.core.serialization import replace_file
from nfold.data.files import cache_root
from nfold.engines.torch.run.job import Job

WARM_UP_STEPS = 12
BUILD_STEPS = 4  # steps in which a candidate compiles, records its graphs and replays them once
SETTLE_STEPS = 2
WINDOW_STEPS = 5
WINDOWS = 3  # of each plan
MIN_GAIN = 1.02
PROFILED_STEPS = 3
MIN_ADVISED_GAIN = 1.1
# Time that a trial may cost: a part of the training time that is certain, and a limit in seconds
MAX_FRACTION = 0.05
MAX_SECONDS = 60.0

Steps = Generator[None, None, None]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Values of the plan's ``step`` to try, and the expected seconds, most of it compilation.

    All of them use what the last one compiles and records.
    """

    steps: tuple[str, ...]
    cost_s: float

    @property
    def name(self) -> str:
        return " or ".join(self.steps)


class PlanSwitch(Protocol):
    """Switches the step of a run. ``initial_step`` is the plan's ``step`` before the search."""

    @property
    def initial_step(self) -> str: ...

    def candidate(self) -> Candidate | None:
        """Return the candidate for the prepared models; called in the first step."""

    def fingerprint(self) -> str:
        """Return a text of everything that a stored choice depends on."""

    def apply(self, step: str, *, check: bool) -> None:
        """Switch to ``step``; ``check`` compares the first outputs with those of eager code."""

    def settle(self, step: str) -> None:
        """Use ``step`` for good; memory of other steps is freed."""

    def lacks_memory(self) -> bool:
        """Return whether graphs of a step do not fit into the free memory; called after a step."""

    def note(self) -> str | None:
        """Return what to know of a candidate that is used on this rank, or None."""

    def failure(self) -> str | None:
        """Return why a candidate is not used on this rank, or None."""


class StreamClock:
    """Marks of time on the device's current stream."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def milliseconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        elapsed: float = first.elapsed_time(last)
        return elapsed

    def now(self) -> float:
        """Return the seconds of the host's clock, when the device has no work left."""
        torch.cuda.synchronize()
        return time.monotonic()

    def begin_kernels(self) -> None:
        """Record the kernels of the device."""
        self._kernels = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._kernels.start()

    def end_kernels(self) -> float:
        """Return the milliseconds in which the device computed since ``begin_kernels``."""
        torch.cuda.synchronize()
        self._kernels.stop()
        events: Any = self._kernels.events()  # type: ignore[no-untyped-call]
        return busy_ms(
            (event.time_range.start, event.time_range.end)
            for event in events or ()
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The result of a trial: step times and the cost in seconds; ``reason``: why it is not used."""

    step: str
    before_ms: float
    after_ms: float
    cost_s: float
    reason: str | None = None

    @property
    def gain(self) -> float:
        return self.before_ms / self.after_ms

    @property
    def is_kept(self) -> bool:
        return self.reason is None and self.gain >= MIN_GAIN

    @classmethod
    def read(cls, file: Path) -> Choice | None:
        try:
            return cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, file: Path) -> None:
        with suppress(OSError), replace_file(file) as temporary:
            temporary.write_text(json.dumps(vars(self)))

    def __str__(self) -> str:
        if self.reason is not None:
            text = f"not used: {self.reason}"
        else:
            text = f"{self.before_ms:.4g} → {self.after_ms:.4g} ms a step"
            text += f", {self.gain:.2f} × as fast" if self.is_kept else ", not kept"
        return f"step {self.step}: {text} (measured in {self.cost_s:.0f} s)"


@dataclass(eq=False)
class AutomaticPlan:
    """Chooses the step of a script while it trains.

    ``on_step`` is called after every optimizer step, ``on_epoch`` with the steps that are certainly
    left (0: unknown). All ranks must make the same steps. ``is_building``: the next steps may compile.
    """

    switch: PlanSwitch
    job: Job
    is_active: bool = True
    clock: StreamClock = field(default_factory=StreamClock)
    is_building: bool = False

    def __post_init__(self) -> None:
        self._search: Steps | None = self._run() if self.is_active else None
        self._steps = self._certain_steps = self._epochs = 0
        self._first_s = time.monotonic()

    @property
    def is_searching(self) -> bool:
        return self._search is not None

    def on_step(self) -> None:
        self._steps += 1
        if self._search is not None and next(self._search, self) is self:
            self._search = None

    def on_epoch(self, certain_steps: int) -> None:
        self._certain_steps = self._steps + certain_steps
        self._epochs += 1

    def _run(self) -> Steps:
        candidate, file = self.switch.candidate(), self._file()
        if candidate is not None:
            stored = Choice.read(file) if self.job.is_main else None
            if stored is None or stored.step not in candidate.steps:
                facts = [-1.0, 0.0, 0.0]
            else:
                index = float(candidate.steps.index(stored.step))
                facts = [stored.is_kept * stored.gain, stored.cost_s, index]
            kept_gain, cost_s, chosen = self._agree(facts)
            if kept_gain > 0:
                yield from self._reuse(candidate.steps[int(chosen)], kept_gain, cost_s)
            elif kept_gain < 0:
                yield from self._try(candidate, file)
        if "captured" not in self.switch.initial_step:
            yield from self._advise_capture()

    def _reuse(self, step: str, gain: float, cost_s: float) -> Steps:
        """Apply a stored choice when it saves more in the certain training than compiling costs."""
        yield from self._until_certain(cost_s / (1 - 1 / gain))
        yield from self._build(step, check=False)
        if self._agree([float(self.switch.failure() is not None)])[0]:
            self.switch.settle(self.switch.initial_step)
        else:
            self._say(f"step {step}: {gain:.2f} × as fast in an earlier run")

    def _try(self, candidate: Candidate, file: Path) -> Steps:
        yield from self._wait(WARM_UP_STEPS)
        if candidate.cost_s > MAX_SECONDS:
            self._say(f"step {candidate.name} is not tried: it may take {candidate.cost_s:.0f} s")
            return
        if self._agree([float(self.switch.lacks_memory())])[0]:
            self._say(
                f"step {candidate.name} is not tried: a CUDA graph keeps the memory of a step, which "
                'is not free; next: nfold.Run(step="compiled"), or a smaller batch'
            )
            return
        yield from self._until_certain(candidate.cost_s / MAX_FRACTION)
        self._say(f"trying step {candidate.name} (about {candidate.cost_s:.0f} s)")
        began = self.clock.now()
        yield from self._build(candidate.steps[-1], check=True)
        times_ms: dict[str, list[float]] = {
            step: [] for step in (*reversed(candidate.steps), self.switch.initial_step)
        }
        for _ in range(WINDOWS):
            for step, own in times_ms.items():
                self.switch.apply(step, check=False)
                yield from self._window(own)
        reason = self.switch.failure()
        medians = [statistics.median(own) for own in times_ms.values()]
        *after_ms, before_ms, failed = self._agree([*medians, float(reason is not None)])
        best_ms, step = min(zip(after_ms, times_ms, strict=False))
        steps = BUILD_STEPS + WINDOWS * len(times_ms) * (SETTLE_STEPS + WINDOW_STEPS)
        choice = Choice(
            step=step,
            before_ms=before_ms,
            after_ms=best_ms,
            cost_s=max(0.0, self.clock.now() - began - steps * before_ms / 1e3),
            reason=reason or ("it failed on another rank" if failed else None),
        )
        self.switch.settle(step if choice.is_kept else self.switch.initial_step)
        note = self.switch.note()
        self._say(f"{choice}; {note}" if note and choice.is_kept else str(choice))
        if self.job.is_main:
            choice.write(file)

    def _build(self, step: str, *, check: bool) -> Steps:
        self.is_building = True
        self.switch.apply(step, check=check)
        yield from self._wait(BUILD_STEPS)
        self.is_building = False

    def _window(self, times_ms: list[float]) -> Steps:
        """Append the median time of some steps to ``times_ms``."""
        yield from self._wait(SETTLE_STEPS)
        marks = [self.clock.mark()]
        for _ in range(WINDOW_STEPS):
            yield
            marks.append(self.clock.mark())
        steps = itertools.pairwise(marks)
        times_ms.append(statistics.median(self.clock.milliseconds(a, b) for a, b in steps))

    def _advise_capture(self) -> Steps:
        """Say how much of a step the device is idle: a decorated step would be a CUDA graph."""
        times_ms: list[float] = []
        yield from self._window(times_ms)
        try:
            self.clock.begin_kernels()
        except RuntimeError:  # the script uses a profiler of its own
            return
        yield from self._wait(PROFILED_STEPS)
        step_ms, kernels_ms = times_ms[0], self.clock.end_kernels() / PROFILED_STEPS
        if kernels_ms > 0 and step_ms / kernels_ms >= MIN_ADVISED_GAIN:
            self._say(
                f"the GPU computes for {kernels_ms:.3g} of {step_ms:.3g} ms of a step and waits for "
                "the host otherwise; a function with @run.step is replayed as one CUDA graph: up to "
                f"{step_ms / kernels_ms:.2f} × as fast"
            )

    def _wait(self, steps: int) -> Steps:
        for _ in range(steps):
            yield

    def _until_certain(self, seconds: float) -> Steps:
        """Wait until the training so far and what is certainly left take so many seconds."""
        while True:
            elapsed_s = time.monotonic() - self._first_s
            step_s = elapsed_s / max(1, self._steps)
            certain_s = elapsed_s + step_s * max(0, self._certain_steps - self._steps)
            if self._agree([certain_s - seconds])[0] >= 0:
                return
            epoch = self._epochs
            while self._epochs == epoch:
                yield

    def _agree(self, values: list[float]) -> list[float]:
        """Return the largest value of all ranks for each of the values."""
        if self.job.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.job.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        agreed: list[float] = tensor.tolist()
        return agreed

    def _file(self) -> Path:
        digest = hashlib.sha256(self.switch.fingerprint().encode()).hexdigest()[:16]
        return cache_root() / "plans" / f"{digest}.json"

    def _say(self, text: str) -> None:
        if self.job.is_main:
            sys.stderr.write(f"nfold: {text}\n")


def busy_ms(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the milliseconds that intervals in microseconds cover, each moment once."""
    total = end = 0.0
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e3
