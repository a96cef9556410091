"""Inception-v3 from JPEGs on 1, 2 and 4 GPUs: every placement of its input, and careful DDP.

    python benchmarks/peers/inception.py --out inception.json [--devices 1,2,4] [--seconds 290]

Arms of a phase run side by side, each on GPUs and cores of its own, as many cores a GPU in all of
them. Steps that find their input in queues are thrown away first; the timed ones are three times
as many as queues hold. ``best`` is the fastest of the placements that were measured on one device.
In the last NEEDS_S of ``--seconds`` no phase begins; the file has what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet import Arm, ArmFailed, Place, Spec, Work, stop_all
from inception_found import PLACEMENTS, best_of, binding, ratios, table
from inception_rates import Measured, rates_alone

from nfold.cli.plan_completion import prepare_data
from nfold.core.plan import Plan
from nfold.core.serialization import serialize
from nfold.core.workload import Workload
from nfold.telemetry.machine_inspection import inspect_machine

SPECS = {
    "cpu": "nfold:decode=cpu,augment=cpu",
    "augment": "nfold:decode=cpu,augment=device",
    "decode": "nfold:decode=device,augment=device",
    "cache": "nfold:decode=cpu,augment=device,cache=decoded",
    "replayed": "ablated:without=loading,decode=cpu,augment=device",
    "model": "ablated:without=input,decode=cpu,augment=device",
    "careful": "careful:ahead=2",
}
BEST = "best"
ASKED = (
    "cpu@1 augment@1 decode@1 cache@1 replayed@1 model@1 best@2 best@4 careful@4 cpu@4 careful@1"
)
WINDOWS = 3
LEAST = 12
"""Timed steps where queues hold nothing."""
SETTLE = 5
"""Steps thrown away beyond what queues hold."""
READY_S = 240.0
NEEDS_S = 45.0
"""What a phase takes at least whose programs were compiled in an earlier one."""


@dataclass(frozen=True)
class Question:
    """An arm by its name, and on how many devices."""

    name: str
    devices: int

    @classmethod
    def parse(cls, text: str) -> Question:
        """The question that is written as ``augment@2``."""
        name, _, devices = text.partition("@")
        if name not in (*SPECS, BEST) or not devices.isdigit() or int(devices) < 1:
            allowed = ", ".join((*SPECS, BEST))
            raise ValueError(f"{text!r} is not ARM@DEVICES; arms are {allowed}")
        return cls(name, int(devices))

    def __str__(self) -> str:
        return f"{self.name}@{self.devices}"


@dataclass
class Found:
    """Images/s of every window so far, what was measured alone, and what failed."""

    asked: dict[str, Any]
    machine: Any
    alone: Measured | None = None
    rates: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    queued: dict[str, int] = field(default_factory=dict)

    def save(self, file: Path) -> None:
        """Write the file anew."""
        written = {
            "asked": self.asked,
            "machine": serialize(self.machine),
            "alone": serialize(self.alone),
            "images_per_s": {f"{n}@{d}": values for (n, d), values in self.rates.items()},
            "queued_steps": self.queued,
            "failed": self.failed,
        }
        file.write_text(json.dumps(written, indent=1) + "\n")


def phases(asked: Iterable[Question], devices: int) -> Iterator[list[Question]]:
    """What runs side by side: in order, as many as fit; ``best`` after what it is the best of."""
    phase: list[Question] = []
    for question in asked:
        if question.devices > devices:
            continue
        taken = sum(one.devices for one in phase)
        waits = question.name == BEST and any(one.name in PLACEMENTS for one in phase)
        if taken + question.devices > devices or waits:
            yield phase
            phase = []
        phase.append(question)
    if phase:
        yield phase


def places(phase: list[Question], share: int, cores: list[int], cuda: bool) -> list[Place]:
    """Disjoint devices and cores, ``share`` of the cores for each device."""
    found, first = [], 0
    for question in phase:
        devices = range(first, first + question.devices)
        own = frozenset(cores[share * first : share * (first + question.devices)])
        found.append(Place(cores=own, gpus=tuple(devices) if cuda else ()))
        first += question.devices
    return found


def measure(phase: list[Question], given: argparse.Namespace, found: Found) -> None:
    """One phase: all arms started, then timed at the same time; none is left afterwards."""
    best = best_of(found.rates)
    named = [Question(best if q.name == BEST else q.name, q.devices) for q in phase]
    given.logs.mkdir(parents=True, exist_ok=True)
    share = max(1, len(given.cores) // given.most)
    arms = [
        Arm(spec_of(question, given), work_of(question, given), given.logs, place)
        for question, place in zip(
            named, places(named, share, given.cores, given.device == "cuda"), strict=True
        )
    ]
    try:
        for arm in arms:
            arm.start()
        pairs = list(zip(named, arms, strict=True))
        ready = [pair for pair in pairs if _ready(*pair, given, found)]
        for question, arm in ready:
            _take(question, arm, given, found)
    finally:
        stop_all(arms)


def _ready(question: Question, arm: Arm, given: argparse.Namespace, found: Found) -> bool:
    """Wait until the arm is ready and ask for all of its windows at once; False where it failed."""
    try:
        answers = arm.answers(time.monotonic() + READY_S)
    except ArmFailed as error:
        return _failed(question, arm, error, found)
    queued = max(answer["queued_steps"] for answer in answers)
    steps = max(given.steps, queued)
    arm.ask({"steps": queued + SETTLE if queued else 1, "skip": 0})
    for _ in range(WINDOWS):
        arm.ask({"steps": steps, "skip": 0})
    found.queued[str(question)] = queued
    return True


def _take(question: Question, arm: Arm, given: argparse.Namespace, found: Found) -> None:
    try:
        windows = [arm.answers(time.monotonic() + given.seconds) for _ in range(1 + WINDOWS)]
    except ArmFailed as error:
        _failed(question, arm, error, found)
        return
    found.rates[question.name, question.devices] = [
        answers[0]["samples"] / max(answer["seconds"] for answer in answers)
        for answers in windows[1:]
    ]


def _failed(question: Question, arm: Arm, error: ArmFailed, found: Found) -> bool:
    arm.fail(error)
    found.failed[str(question)] = str(error)
    print(f"{question} failed: {error}", file=sys.stderr)
    return False


def spec_of(question: Question, given: argparse.Namespace) -> Spec:
    """The arm; nfold's on GPUs in bf16, compiled and captured."""
    text = SPECS[question.name]
    if not text.startswith("careful"):
        text += f",precision={'bf16' if given.device == 'cuda' else 'fp32'},step={given.step}"
    return Spec.parse(text)


def work_of(question: Question, given: argparse.Namespace) -> Work:
    return Work(
        workload=given.workload,
        batch=given.batch,
        device=given.device,
        devices=question.devices,
        warmup=given.warmup,
    )


def main(arguments: list[str]) -> None:
    """Measure phase after phase, print what was found."""
    given, started = parsed(arguments), time.monotonic()
    prepare_data(Workload.parse(given.workload), Plan(cache="decoded"), None)
    found = Found({k: str(v) for k, v in vars(given).items()}, inspect_machine())
    found.alone = rates_alone(given.workload, given.most, given.device)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for phase in phases(given.arms, given.most):
            one_phase(phase, given, found, started)
    except KeyboardInterrupt:
        print("interrupted: this is what was measured")
    show(found, given)


def one_phase(
    phase: list[Question], given: argparse.Namespace, found: Found, started: float
) -> None:
    """Measure a phase and keep what it found, if there is time for it."""
    side_by_side = " ".join(map(str, phase))
    if time.monotonic() + NEEDS_S > started + given.seconds:
        print(f"no time left for {side_by_side}")
        return
    measure(phase, given, found)
    found.save(given.out)
    print(f"{time.monotonic() - started:.0f} s: {side_by_side}", file=sys.stderr, flush=True)


def show(found: Found, given: argparse.Namespace) -> None:
    """The table, ratios and what binds; a ratio also says what ran beside."""
    print(table(found.rates, given.batch))
    for line in ratios(found.rates):
        print(line)
    share = max(1, len(given.cores) // given.most)
    alone = found.alone
    if alone is not None:
        cores = max(1, share - 1)
        print(binding(found.rates, alone.decodes, alone.finishes, alone.nvjpeg, cores))


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line, with the machine's cores and the most devices that are used."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workload", default="inception_v3:repeat=1024")
    parser.add_argument("--batch", type=int, default=256, help="per device")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--most", type=int, help="devices to use; cores are shared among them")
    parser.add_argument("--arms", default=ASKED, help="ARM@DEVICES, in order")
    parser.add_argument("--step", default=None, help="compiled+captured on GPUs, eager on CPUs")
    parser.add_argument("--steps", type=int, default=LEAST, help="at least, in each of 3 windows")
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=290.0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    cuda = given.device == "cuda"
    given.cores = sorted(os.sched_getaffinity(0))
    given.most = given.most or (len(inspect_machine().gpus) if cuda else len(given.cores))
    given.step = given.step or ("compiled+captured" if cuda else "eager")
    try:
        given.arms = [Question.parse(text) for text in given.arms.split()]
    except ValueError as error:
        parser.error(str(error))
    given.logs = given.out.with_suffix(".logs")
    return given


if __name__ == "__main__":
    main(sys.argv[1:])
