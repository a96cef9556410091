"""Everything of this folder on a machine with 2, 4 or 8 GPUs, within so many seconds.

    python benchmarks/diagnosis/gpu.py --seconds 1500 --out "$OUT"

Explanations run side by side, each on GPUs and cores of its own. Every verdict is in a file as
soon as it is there, so that a run that is cut short has lost one of each lane. NFOLD_DATA has
``mnist`` and ``cifar10``, for ``reports`` also ``inception_v3``. Print what was found with
``--read``; what is said of the five field reports stands in the logs.
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import diagnose
import repaired
from targets import SCRIPTS, Script

HERE = Path(__file__).resolve().parent
PAIR = 2
"""GPUs of a lane."""
LEAST_S = 2.0
KINDS = ("cifar", "reports", "faults", "doses", "healthy", "pairs", "traceml")
REPORTS: dict[str, tuple[str, ...]] = {
    "conv2d": ("conv2d",),
    "mnist": ("mnist", "--batch", "100"),
    "starved": (
        *("inception_v3:repeat=64", "--batch", "64", "--precision", "bf16", "--step", "captured"),
        *("--workers", "1", "--decode", "cpu", "--augment", "cpu"),
    ),
    "dataparallel": ("cnn10", "--strategy", "dp", "--batch", "512", "--precision", "fp32"),
    "channels_first": ("cnn10", "--layout", "channels_first", "--precision", "tf32"),
}
"""The five field reports, each as what is to be explained."""


@dataclass(frozen=True)
class Job:
    """One command; ``whole`` where it takes every GPU."""

    name: str
    command: tuple[str, ...]
    whole: bool = False


def jobs(asked: argparse.Namespace) -> list[Job]:
    """The most important first."""
    made = {
        "cifar": lambda: [_judge(asked, "cifar_ddp", asked.gpus)],
        "reports": lambda: [_reported(asked, name) for name in asked.report],
        "faults": lambda: [
            _judge(asked, name, PAIR) for name in repaired.FAULTS if name != "cifar_ddp"
        ],
        "doses": lambda: [
            _dosed(asked, script, cause) for script in asked.script for cause in _causes(script)
        ],
        "healthy": lambda: [
            _diagnosed(asked, script, "healthy", "--doses", "", "--healthy", str(asked.healthy))
            for script in asked.script
        ],
        "pairs": lambda: [
            _dosed(asked, script, "+".join(pair))
            for script in asked.script
            for pair in Script(script, str(PAIR)).pairs
            if set(pair) <= set(_causes(script))
        ],
        "traceml": lambda: _traced(asked),
    }
    return [job for kind in KINDS if kind in asked.only for job in made[kind]()]


def _causes(script: str) -> tuple[str, ...]:
    return Script(script, str(PAIR)).causes


def _judge(asked: argparse.Namespace, name: str, gpus: int) -> Job:
    command = ["--on", str(gpus), "--script", name, *_common(asked, "repaired")]
    return Job(f"repaired {name}", (str(HERE / "repaired.py"), *command), gpus > PAIR)


def _reported(asked: argparse.Namespace, name: str) -> Job:
    told = ("--devices", str(PAIR), "--budget", asked.budget, "--plain", "--no-report")
    results = ("--results", str(asked.out / f"report-{name}"))
    return Job(f"report {name}", ("-m", "nfold", "explain", *REPORTS[name], *told, *results))


def _dosed(asked: argparse.Namespace, script: str, cause: str) -> Job:
    return _diagnosed(asked, script, cause, "--cause", cause, "--doses", asked.doses)


def _diagnosed(asked: argparse.Namespace, script: str, what: str, *options: str) -> Job:
    command = ["--on", str(PAIR), "--script", script, *_common(asked, "doses"), *options]
    return Job(f"{script} {what}", (str(HERE / "diagnose.py"), *command))


def _common(asked: argparse.Namespace, file: str) -> list[str]:
    out = asked.out / f"{file}.jsonl"
    return ["--python", asked.python, "--budget", asked.budget, "--out", str(out)]


def _traced(asked: argparse.Namespace) -> list[Job]:
    """TraceML on the faulty scripts, then on one dose of every cause."""
    if not asked.traceml_python:
        return []
    told = ["--tool", "traceml", "--python", asked.traceml_python]
    faulty = ["--on", str(PAIR), "--out", str(asked.out / "repaired.jsonl"), *told]
    found = [Job("traceml repaired", (str(HERE / "repaired.py"), *faulty))]
    largest = asked.doses.rpartition(",")[2]
    for script in asked.script:
        own = ["--doses", largest, "--healthy", "2", *told]
        command = ["--on", str(PAIR), "--script", script, *own]
        out = ["--out", str(asked.out / "doses.jsonl")]
        found.append(Job(f"traceml {script}", (str(HERE / "diagnose.py"), *command, *out)))
    return found


def run(asked: argparse.Namespace) -> None:
    """First what takes all GPUs, then the rest in lanes of two."""
    end = time.monotonic() + asked.seconds
    todo = jobs(asked)
    cores = sorted(os.sched_getaffinity(0))
    gpus = list(range(asked.gpus))
    for job in (job for job in todo if job.whole):
        run_job(job, gpus, cores, end, asked.out)
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in (job for job in todo if not job.whole):
        waiting.put(job)
    lanes = max(1, asked.gpus // PAIR)
    share = len(cores) // lanes
    threads = [
        threading.Thread(
            target=_lane,
            args=(
                waiting,
                gpus[PAIR * lane : PAIR * (lane + 1)],
                cores[share * lane : share * (lane + 1)],
                end,
                asked.out,
            ),
        )
        for lane in range(lanes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _lane(
    waiting: queue.SimpleQueue[Job], gpus: list[int], cores: list[int], end: float, out: Path
) -> None:
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            return
        run_job(job, gpus, cores, end, out)


def run_job(job: Job, gpus: list[int], cores: list[int], end: float, out: Path) -> None:
    """One command with its GPUs and cores; nothing where less than LEAST_S seconds are left."""
    left = end - time.monotonic()
    if left < LEAST_S:
        print(f"{job.name}: no time left", flush=True)
        return
    command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, *job.command]
    log = out / f"{job.name.replace(' ', '-')}.log"
    visible = ",".join(map(str, gpus))
    print(f"GPUs {visible}: {shlex.join(job.command)}", flush=True)
    begin = time.monotonic()
    with log.open("w") as file:
        try:
            # A session of its own: what is cut short takes its ranks with it.
            process = subprocess.Popen(
                command,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = str(process.wait(timeout=left))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)
            status = "out of time"
    print(f"{job.name}: {status}, {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    """Run everything that there is time for, then print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--gpus", type=int, default=2, help="of this machine: 2, 4 or 8")
    parser.add_argument("--budget", default="150s", help="time of one explanation")
    parser.add_argument("--doses", default="2,8", help="milliseconds a step")
    parser.add_argument("--healthy", type=int, default=5, help="healthy runs of each script")
    parser.add_argument("--script", action="append", choices=list(SCRIPTS))
    parser.add_argument("--only", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    parser.add_argument("--report", action="append", choices=list(REPORTS))
    parser.add_argument("--python", default=sys.executable, help="with Lightning and Accelerate")
    parser.add_argument("--traceml-python", help="with TraceML; without it TraceML is left out")
    parser.add_argument("--out", type=Path, default=Path("diagnosis"), help="folder of results")
    asked = parser.parse_args()
    asked.script = asked.script or list(SCRIPTS)
    asked.report = asked.report or list(REPORTS)
    asked.only = asked.only.split(",")
    unknown = sorted(set(asked.only) - set(KINDS))
    if unknown:
        parser.error(f"--only {unknown[0]!r}: allowed are {', '.join(KINDS)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    run(asked)
    for module, name in ((repaired, "repaired"), (diagnose, "doses")):
        if (asked.out / f"{name}.jsonl").exists():
            module.main(["--read", str(asked.out / f"{name}.jsonl")])


if __name__ == "__main__":
    main()
