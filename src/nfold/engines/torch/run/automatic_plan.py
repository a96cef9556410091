"""The automatic plan of a script: open fields are chosen by measurement in its first steps.

Every candidate changes fields of the plan that can be switched between two steps of the training.
It is compared with the best plan so far in windows that alternate: the medians of their step times
decide. All steps are steps of the training: no sample is lost or repeated. A choice is kept on disk
for the next run of the same model on the same machine.
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
# Time that trials may cost: a part of the training time that is certain, and a limit in seconds
MAX_FRACTION = 0.05
MAX_SECONDS = 60.0

Fields = dict[str, str]
Steps = Generator[None, None, None]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Fields of the plan to try, and the expected cost in seconds, most of it compilation.

    ``unless_kept``: not tried if the candidate before it was kept.
    """

    fields: Fields
    cost_s: float
    unless_kept: bool = False

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.fields.items())


class PlanSwitch(Protocol):
    """What the search needs of the run."""

    is_captured: bool

    @property
    def initial(self) -> Fields:
        """Return the values of all switchable fields before the search."""

    def candidates(self) -> Iterable[Candidate]:
        """Return the candidates for the prepared models; called in the first step."""

    def fingerprint(self) -> str:
        """Return a text of everything that a stored choice depends on."""

    def apply(self, fields: Fields, *, check: bool) -> None:
        """Switch to these fields; ``check`` compares the first outputs with those of eager code."""

    def failure(self) -> str | None:
        """Return why the last applied fields are not used on this rank, or None."""


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
    """Fields that were kept, their gain over the initial plan, and what the search cost."""

    fields: Fields
    gain: float
    cost_s: float

    @classmethod
    def read(cls, file: Path) -> Choice | None:
        try:
            return cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, file: Path) -> None:
        with suppress(OSError), replace_file(file) as temporary:
            temporary.write_text(json.dumps(vars(self)))


@dataclass(eq=False)
class AutomaticPlan:
    """Searches for the fastest plan while a script trains.

    ``on_step`` is called after every optimizer step, ``on_epoch`` with the steps that an epoch will
    certainly have (0: unknown). All ranks must make the same steps.
    """

    switch: PlanSwitch
    job: Job
    is_active: bool = True
    clock: StreamClock = field(default_factory=StreamClock)
    is_building: bool = False

    def __post_init__(self) -> None:
        self._search: Steps | None = self._run() if self.is_active else None
        self._steps = self._certain_steps = 0
        self._epochs = 0
        self._step_s = 0.0
        self._spent_s = 0.0
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
        file = self._file()
        stored = Choice.read(file) if self.job.is_main else None
        known, gain, cost_s = self._agree(
            [1.0, stored.gain, stored.cost_s] if stored else [0.0] * 3
        )
        candidates = list(self.switch.candidates())
        if known:
            yield from self._reuse(stored, candidates, gain, cost_s)
            yield from self._advise_capture()
            return
        best, total, kept = self.switch.initial, 1.0, True
        yield from self._wait(WARM_UP_STEPS)
        for candidate in candidates:
            if candidate.unless_kept and kept:
                continue
            if self._spent_s + candidate.cost_s > MAX_SECONDS:
                self._say(f"{candidate.label}: not tried, it may take {candidate.cost_s:.0f} s")
                continue
            yield from self._until_affordable(candidate.cost_s)
            trial = CandidateResult()
            yield from self._try(candidate, best, trial)
            kept = trial.gain >= MIN_GAIN
            self._report(candidate, trial, kept=kept)
            if kept:
                best, total = {**best, **candidate.fields}, total * trial.gain
        yield from self._advise_capture()
        choice = Choice(
            fields={n: v for n, v in best.items() if v != self.switch.initial[n]},
            gain=total,
            cost_s=self._spent_s,
        )
        if self.job.is_main:
            choice.write(file)

    def _reuse(
        self, stored: Choice | None, candidates: list[Candidate], gain: float, cost_s: float
    ) -> Steps:
        """Apply a stored choice as soon as it saves more than its compilation costs."""
        names = sorted({name for candidate in candidates for name in candidate.fields})
        values = sorted({v for candidate in candidates for v in candidate.fields.values()})
        own = stored.fields if stored else {}
        chosen = self._agree([1.0 + values.index(own[n]) if n in own else 0.0 for n in names])
        fields = {n: values[int(c) - 1] for n, c in zip(names, chosen, strict=True) if c}
        if not fields:
            return
        yield from self._wait(2)
        yield from self._until_affordable(min(MAX_SECONDS, cost_s * MAX_FRACTION / (1 - 1 / gain)))
        self.is_building = True
        self.switch.apply({**self.switch.initial, **fields}, check=False)
        yield from self._wait(BUILD_STEPS)
        self.is_building = False
        if self._agree([float(self.switch.failure() is not None)])[0]:
            self.switch.apply(self.switch.initial, check=False)
            return
        self._say(f"{_label(fields)}: {gain:.2f} × as fast in an earlier run")

    def _try(self, candidate: Candidate, best: Fields, trial: CandidateResult) -> Steps:
        fields = {**best, **candidate.fields}
        began = self.clock.now()
        self.is_building = True
        self._say(f"trying {candidate.label} (about {candidate.cost_s:.0f} s)")
        self.switch.apply(fields, check=True)
        yield from self._wait(BUILD_STEPS)
        self.is_building = False
        windows: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * WINDOWS):
            is_candidate = number % 2 == 0
            self.switch.apply(fields if is_candidate else best, check=False)
            yield from self._window(windows[is_candidate])
        trial.reason = self.switch.failure()
        own = [*(statistics.median(windows[each]) for each in (False, True))]
        before_ms, after_ms, failed = self._agree([*own, float(trial.reason is not None)])
        trial.before_ms, trial.after_ms = before_ms, after_ms
        trial.gain = 0.0 if failed else before_ms / after_ms
        taken = self.clock.now() - began
        steps = BUILD_STEPS + 2 * WINDOWS * (SETTLE_STEPS + WINDOW_STEPS)
        trial.cost_s = max(0.0, taken - steps * before_ms / 1e3)
        self._spent_s = self._agree([self._spent_s + trial.cost_s])[0]
        keep = trial.gain >= MIN_GAIN
        self.switch.apply(fields if keep else best, check=False)

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
        """Say how much of a step the device is idle, if a decorated step could be a CUDA graph."""
        if self.switch.is_captured:
            return
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

    def _until_affordable(self, cost_s: float) -> Steps:
        """Wait until a cost is a small part of the training that was made or is certain."""
        while True:
            now = time.monotonic()
            step_s = (now - self._first_s) / max(1, self._steps)
            certain_s = now - self._first_s + step_s * max(0, self._certain_steps - self._steps)
            limit_s = min(MAX_SECONDS, MAX_FRACTION * certain_s)
            if self._agree([limit_s - self._spent_s - cost_s])[0] >= 0:
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

    def _report(self, candidate: Candidate, trial: CandidateResult, *, kept: bool) -> None:
        if trial.reason is not None:
            text = f"not used: {trial.reason}"
        else:
            text = f"{trial.before_ms:.4g} → {trial.after_ms:.4g} ms a step"
            text += f", {trial.gain:.2f} × as fast" if kept else ", not kept"
        self._say(f"{candidate.label}: {text} (measured in {trial.cost_s:.0f} s)")

    def _say(self, text: str) -> None:
        if self.job.is_main:
            sys.stderr.write(f"nfold: {text}\n")


@dataclass
class CandidateResult:
    """The result of one candidate; ``gain`` 0 if it failed on any rank."""

    before_ms: float = 0.0
    after_ms: float = 0.0
    gain: float = 0.0
    cost_s: float = 0.0
    reason: str | None = None


def busy_ms(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the milliseconds that intervals in microseconds cover, each moment once."""
    total = end = 0.0
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e3


def _label(fields: Fields) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())
