"""Seconds until ``nfold explain`` gives a first and a complete answer, script by script.

    python benchmarks/diagnosis/gpu_times.py --public /tmp/public --out times.jsonl
    python benchmarks/diagnosis/gpu_times.py --only ddp+link=3,ddp#1 --out times.jsonl
    python benchmarks/diagnosis/gpu_times.py --read times.jsonl

Runs the scripts one after the other within ``--limit-s``. Each result is added to ``--out`` at
once. A later call with the same file runs the scripts without a result. ``--public`` is a folder
with checkouts of pytorch/examples and karpathy/nanoGPT; files of data that they need and that are
missing are written there with random content. ``ddp+CAUSE=MS`` is the script dosed/ddp.py with an
injected cost, ``ddp#1`` a healthy run of it. ``--keep`` is a folder for the results and the lines
of progress of each script.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
from asking_nfold import hidden_gpus
from timed_scripts import Case, absolute_data, cases, dosed_case, write_data

from nfold.cli.explain_command import parse_seconds
from nfold.core.errors import NfoldError
from nfold.explain.result.view import build_view
from nfold.report.writer import StoredExplanation, find_latest
from nfold.store.store import Store
from nfold.telemetry.machine_inspection import inspect_machine

SO_FAR = re.compile(r"left · so far: (.*)")
"""A preliminary conclusion among the lines of progress (nfold/cli/progress.py)."""
OPEN = re.compile(r"No cost found yet|are not attributed yet")
"""In a conclusion that gives no answer (nfold/explain/result/view.py)."""
RESERVE_S = 25.0
"""Start-up, the last process tree and the report, which an explanation needs beside its budget."""
GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class TimedExplanation:
    """The report of one explanation with its times. Seconds count from the start of the command.

    ``first_verdict_s`` is the time of the first conclusion that is not open, live or final.
    ``largest`` is the largest cost of a step with its 95 % interval in ms, ``causes`` are the
    significant ones, the largest first. ``overhead_s`` is the mean over ``trees`` process trees of
    their wall time without timed windows.
    """

    script: str
    devices: str
    device: str
    budget: str
    status: int
    first_verdict_s: float | None
    complete_s: float
    headline: str
    first_verdict: str = ""
    causes: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    right: bool = False
    step_ms: float = math.nan
    largest: tuple[str, float, float, float] | None = None
    trees: int = 0
    overhead_s: float = 0.0

    @property
    def cells(self) -> tuple[str, ...]:
        first = "–" if self.first_verdict_s is None else f"{self.first_verdict_s:.0f}"
        largest = "–"
        if self.largest:
            row, ms, low, high = self.largest
            largest = f"{row} {ms:.2f} of {self.step_ms:.2f}, {high - low:.2f}"
        trees = f"{self.trees} × {self.overhead_s:.1f}"
        verdict = f"WRONG: expected {' or '.join(self.expected) or 'no cause'}"
        verdict = "right" if self.right else "open" if OPEN.search(self.headline) else verdict
        times = (first, f"{self.complete_s:.0f}", self.headline)
        return (self.script, self.devices, self.budget, *times, largest, trees, verdict)


HEADS = (
    *("script", "devices", "budget", "first verdict, s", "complete, s", "headline"),
    *("largest cost: ms of a step, width", "trees × overhead, s", "verdict"),
)


def explain(
    name: str, case: Case, devices: str, budget: str, left_s: float, keep: Path | None
) -> TimedExplanation:
    """Explain a script; interrupt it after ``left_s`` seconds, when it reports what it has."""
    gpus = inspect_machine().gpus
    with tempfile.TemporaryDirectory() as temporary:
        results = str(keep / name if keep else temporary)
        options = ["--plain", "--budget", budget, "--results", results]
        target, *rest = case.command(devices)
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "nfold", "explain", target, *options, *rest],
            cwd=case.script.parent,
            env={**os.environ, **hidden_gpus(devices), **absolute_data(), **case.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        timer = threading.Timer(left_s, process.send_signal, (signal.SIGINT,))
        timer.start()
        first, said, text = None, [""], ""
        assert process.stderr is not None
        try:
            for line in process.stderr:
                said.append(line.strip() or said[-1])
                if keep:
                    with (keep / f"{name}.log").open("a") as log:
                        log.write(f"{time.monotonic() - started:6.1f} {line}")
                verdict = SO_FAR.search(line)
                if verdict and first is None and not OPEN.search(verdict[1]):
                    first, text = time.monotonic() - started, verdict[1]
        finally:
            timer.cancel()
            if sys.exc_info()[0] is not None:
                process.terminate()
            status = process.wait()
        complete_s = time.monotonic() - started
        trees = overheads_s(Path(results))
        found = find_latest(Path(results))
    report = reported(found, case.causes) if found else {"headline": said[-1]}
    if first is None and found and not OPEN.search(report["headline"]):
        first = complete_s
    return TimedExplanation(
        script=name,
        devices=devices,
        device=gpus[0].name if gpus and not devices.startswith("cpu") else "cpu",
        budget=budget,
        status=status,
        first_verdict_s=first,
        complete_s=complete_s,
        first_verdict=text,
        expected=case.causes,
        trees=len(trees),
        overhead_s=sum(trees) / len(trees) if trees else 0.0,
        **report,
    )


def reported(found: StoredExplanation, expected: Sequence[str]) -> dict[str, Any]:
    """The headline, the costs and whether the first cause is an expected one."""
    budget = found.budget
    view = build_view(budget, found.previous, found.budget_s)
    causes = tuple(one.cause for one in budget.significant)
    costs = budget.account.costs if budget.account else ()
    largest = None
    if costs:
        ms = costs[0].ms
        bounds = [ms.value if bound is None else bound for bound in (ms.low, ms.high)]
        largest = (costs[0].id, ms.value, *bounds)
    right = causes[:1] == () if not expected else bool(causes) and causes[0] in expected
    return {
        "headline": view.headline,
        "causes": causes,
        "right": right and not budget.training_errors and not OPEN.search(view.headline),
        "step_ms": budget.n_devices.step_ms.value,
        "largest": largest,
    }


def overheads_s(results: Path) -> list[float]:
    """Per process tree, the seconds that are in no timed window of rank 0."""
    walls: dict[str, float] = {}
    timed: dict[str, float] = {}
    with contextlib.suppress(NfoldError), Store.open_readonly(results) as store:
        for one in store.measurements():
            tree = one.folder or one.id
            walls[tree] = max(one.wall_seconds, walls.get(tree, 0.0))
            windows = sum(window.seconds for rank in one.ranks[:1] for window in rank.windows)
            timed[tree] = timed.get(tree, 0.0) + windows
    return [wall - timed[tree] for tree, wall in walls.items()]


def table(rows: Sequence[TimedExplanation]) -> list[str]:
    """As lines of Markdown."""
    lines = [HEADS, ("---",) * len(HEADS), *(row.cells for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def read(file: Path) -> list[TimedExplanation]:
    rows = records.read([file]) if file.exists() else []
    for row in rows:
        row |= {"causes": tuple(row["causes"]), "expected": tuple(row["expected"])}
    return [TimedExplanation(**row) for row in rows]


def run(asked: argparse.Namespace) -> int:
    """Explain the scripts; return how many were skipped."""
    end = time.monotonic() + asked.limit_s
    known = cases(asked.public)
    done = {row.script for row in read(asked.out)}
    skipped = 0
    for name in [name for name in asked.only or known if name not in done]:
        case = known.get(name) or dosed_case(name, asked.devices, asked.out.with_suffix(".clock"))
        if case is None:
            raise SystemExit(f"{name}: allowed are {', '.join(known)}, ddp, ddp+CAUSE=MS, ddp#SEED")
        write_data(name, case.script)
        left_s = end - time.monotonic()
        reason = case.missing(asked.devices)
        if not reason and left_s < asked.budget_s + RESERVE_S:
            reason = f"{left_s:.0f} s are left; next: the same command again"
        if reason:
            print(f"{name}: skipped: {reason}", flush=True)
            skipped += 1
            continue
        left_s -= GRACE_S
        row = explain(name, case, asked.devices, asked.budget, left_s, asked.keep)
        records.add(asked.out, row)
        print(table([row])[-1], flush=True)
    return skipped


def default_devices() -> str:
    """All visible GPUs, or two CPU devices."""
    return str(len(inspect_machine().gpus) or "cpu:2")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", help="2, 4, cpu:2; default: all GPUs, else cpu:2")
    parser.add_argument("--budget", default="180s", help="time of one explanation")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of all of them")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of scripts")
    parser.add_argument("--public", type=Path, default=Path("public"), help="checkouts")
    parser.add_argument("--keep", type=Path, help="folder for results and progress")
    parser.add_argument("--out", type=Path, default=Path("gpu_times.jsonl"))
    parser.add_argument("--read", type=Path, help="print the table of such a file")
    asked = parser.parse_args()
    asked.public, asked.devices = asked.public.absolute(), asked.devices or default_devices()
    asked.budget_s = parse_seconds(asked.budget)
    if asked.keep:
        asked.keep = asked.keep.absolute()
        asked.keep.mkdir(parents=True, exist_ok=True)
    skipped = 0 if asked.read else run(asked)
    print("\n".join(["", *table(read(asked.read or asked.out))]))
    sys.exit(1 if skipped else 0)


if __name__ == "__main__":
    main()
