"""``nfold tune`` on scripts of users, compared with the plan of an expert.

    python benchmarks/tune/tuned.py --public /tmp/public --out tuned.jsonl
    python benchmarks/tune/tuned.py --only plain_images,nanogpt --budget 4m --out tuned.jsonl
    python benchmarks/tune/tuned.py --read tuned.jsonl

Each script is tuned; then the original, the result and the expert's script run in turns, each alone
in fresh processes. A call ends within ``--limit-s``, a later call with the same ``--out`` runs what
is missing. ``--public`` is a folder with checkouts of pytorch/examples and karpathy/nanoGPT.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold.cli.explain_command import parse_seconds
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.stats import Interval, bootstrap, median
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.explain.design import Trial
from nfold.interventions.registry import REGISTRY
from nfold.launch.launch_spec import RunOptions
from nfold.launch.workload_run import run
from nfold.store.store import Store
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.tune.remedies import CONVERSION
from nfold.tune.search import SEED

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "diagnosis"))

import records
from asking_nfold import hidden_gpus
from experts import Subject, subjects
from timed_scripts import absolute_data, write_data

RESERVE_S = 60.0
"""For the report and the runs of the expert's script, beside the budget."""
LIMIT_S = 120.0
"""Time limit of one run."""


@dataclass(frozen=True, kw_only=True)
class TunedScript:
    """A script after ``nfold tune``, and rates of the original, the result and the expert.

    Rates are samples per second of all devices. ``original`` is from the verification; ``unchanged``
    (the original again), ``tuned`` and ``expert`` are turn by turn, each alone. They are empty if a
    script failed, with the ``reason``, ``unchanged`` also if nothing was kept. ``gain`` is the
    factor of the throughput (value, low, high), ``predicted`` the product of the factors that the
    explanation expected of what was kept, None with a conversion, of which it expects none.
    ``tried`` says of every remedy whether it was kept, its gain, and why not.
    """

    script: str
    devices: str
    device: str
    budget: str
    status: int
    tune_s: float
    gain: tuple[float, float, float] | None
    predicted: float | None
    kept: tuple[str, ...]
    tried: tuple[str, ...] = ()
    original: float | None = None
    unchanged: tuple[float, ...] = ()
    tuned: tuple[float, ...] = ()
    expert: tuple[float, ...] = ()
    reason: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        alone, of_expert = (
            shown(ratio(self.tuned, others)) if self.tuned and others else "–"
            for others in (self.unchanged, self.expert)
        )
        return (
            self.script,
            self.devices,
            f"{self.tune_s:.0f}",
            "–" if self.original is None else f"{self.original:.0f}",
            f"{median(self.tuned):.0f}" if self.tuned else "–",
            "–" if self.gain is None else shown(Interval(*self.gain)),
            alone,
            "–" if self.predicted is None else f"{self.predicted:.2f}",
            of_expert,
            ", ".join(self.kept) or "nothing",
            self.reason,
        )


HEADS = (
    *("script", "devices", "s", "samples/s before", "after", "gain", "alone", "predicted"),
    *("of the expert", "kept", ""),
)


def shown(interval: Interval) -> str:
    low, high = interval.low or interval.value, interval.high or interval.value
    return f"{interval.value:.2f} ({low:.2f} to {high:.2f})"


def outcome(tried: dict[str, Any]) -> str:
    """Return the line of a remedy: its outcome, gain and reason, from the JSON of ``nfold tune``."""
    gain = f" {shown(Interval(**tried['gain']))}" if tried["gain"] else ""
    return f"{tried['label']}: {tried['outcome']}{gain} {tried['reason']}".rstrip()


def ratio(ones: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the ratio of rates, turn by turn."""
    return bootstrap([one / other for one, other in zip(ones, others, strict=False)])


def tune(subject: Subject, devices: str, budget: str, results: Path, limit_s: float) -> Any:
    """Return the exit status, the seconds and the JSON of ``nfold tune`` (None without)."""
    started = time.monotonic()
    options = ["--devices", devices, "--budget", budget, "--json", "--results", str(results)]
    arguments = subject.arguments_on(devices)
    process = subprocess.Popen(
        [sys.executable, "-m", "nfold", "tune", subject.script.name, *options, "--", *arguments],
        cwd=subject.script.parent,
        env={**environment(), **hidden_gpus(devices)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
    seconds = time.monotonic() - started
    return process.returncode, seconds, json.loads(output) if output.strip() else None


def environment() -> dict[str, str]:
    return {**os.environ, **absolute_data()}


def rate(measurement: Measurement, trial: Trial) -> float:
    """Return the samples per second of all ranks, ends of epochs included."""
    step_ms = trial.step_and_gap_ms(measurement)
    assert step_ms is not None
    windows = [window for rank in measurement.ranks for window in rank.windows]
    steps = sum(window.steps for window in measurement.ranks[0].windows)
    return 1e3 * sum(window.samples for window in windows) / steps / step_ms


def free_plan(plan: Plan, devices: int) -> Plan:
    """Return the plan of an edited script on the same devices, which chooses its own workers."""
    return Plan(
        device=plan.device,
        devices=devices,
        cores_per_device=plan.cores_per_device,
        strategy="ddp" if devices > 1 else plan.strategy,
        steps=plan.steps,
        warmup_steps=plan.warmup_steps,
    )


def original_plan(results: Path) -> Plan:
    """Return the plan of the last run of the original: its only intervention is the seed."""
    with Store.open_readonly(results) as store:
        found = [
            one.plan
            for one in store.measurements()
            if one.status == "ok" and one.variant == Variant(random_seed=SEED)
        ]
    return found[-1]


@dataclass(frozen=True)
class Arm:
    """One of the scripts that run in turns: its command, its plan and the remedies in its run."""

    script: Path
    arguments: list[str]
    trial: Trial

    def rate(self, results: Path) -> float:
        """Run it once. Raises RuntimeError if it fails."""
        trial = self.trial
        here = os.getcwd()
        os.chdir(self.script.parent)
        try:
            found = run(
                Workload.from_script(self.script.name, *self.arguments),
                trial.plan,
                trial.variant,
                machine=inspect_machine(),
                options=RunOptions(results=results, time_limit_s=LIMIT_S),
            )
        finally:
            os.chdir(here)
        if found.status != "ok":
            raise RuntimeError(f"{self.script.name}: {found.cause.text if found.cause else ''}")
        return rate(found, trial)


def arms(subject: Subject, devices: str, told: Any, results: Path, folder: Path) -> dict[str, Arm]:
    """Return the original if it was changed, the result of ``nfold tune``, the expert's script."""
    plan = original_plan(results)
    count = int(devices.rpartition(":")[2])
    free = free_plan(plan, count)
    usual = Variant(random_seed=SEED)
    remedies = {one["name"]: one["value"] for one in told["kept"]}
    patch = told["files"].get("patch")
    if CONVERSION in remedies:
        copied = folder / "tuned"
        shutil.copytree(subject.script.parent, copied)
        file = subject.script.parent / patch
        subprocess.run(["patch", "-p1", "-i", file], cwd=copied, check=True)
        script, trial = copied / subject.script.name, Trial(plan=free, variant=usual)
    else:
        script, trial = subject.script, Trial(plan=plan, variant=usual)
        for name, value in remedies.items():
            change = {name: value}
            trial = trial.under(**change) if name in REGISTRY else trial.edit(**change)
    given = subject.arguments_on(devices)
    found = {"tuned": Arm(script, given, trial)}
    if remedies:
        found = {"unchanged": Arm(subject.script, given, Trial(plan=plan, variant=usual)), **found}
    script = subject.expert.write(subject.script, folder / "expert")
    own = subject.arguments_on(devices, subject.expert.arguments)
    found["expert"] = Arm(script, own, Trial(plan=free, variant=usual))
    return found


def compare(found: dict[str, Arm], results: Path, turns: int, end: float) -> dict[str, list[float]]:
    """Run the arms in turns until ``end``; return their rates. Raises RuntimeError if one fails."""
    rates: dict[str, list[float]] = {name: [] for name in found}
    for number in range(turns):
        started = time.monotonic()
        for name in [*found][:: -1 if number % 2 else 1]:
            rates[name].append(found[name].rate(results))
        if time.monotonic() + (time.monotonic() - started) > end:
            break
    return rates


def tuned(name: str, subject: Subject, asked: argparse.Namespace, end: float) -> TunedScript:
    """Tune a script and compare the result with the expert's."""
    gpus = inspect_machine().gpus
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary, "results")
        left_s = end - time.monotonic() - RESERVE_S
        status, seconds, told = tune(subject, asked.devices, asked.budget, results, left_s)
        rates: dict[str, list[float]] = {}
        reason = (told["objection"] or "") if told else "nfold tune failed"
        if told:
            try:
                ours = arms(subject, asked.devices, told, results, Path(temporary))
                rates = compare(ours, results, asked.turns, end)
            except (RuntimeError, ValueError) as error:
                reason = str(error)
    kept = told["kept"] if told else []
    known = [one["predicted"] for one in kept if one["predicted"]]
    is_known = known and not any(one["name"] == CONVERSION for one in kept)
    predicted = math.prod(one["value"] for one in known) if is_known else None
    gain = told and told["gain"]
    return TunedScript(
        script=name,
        devices=asked.devices,
        device=gpus[0].name if gpus and not asked.devices.startswith("cpu") else "cpu",
        budget=asked.budget,
        status=status,
        tune_s=seconds,
        gain=(gain["value"], gain["low"], gain["high"]) if gain else None,
        predicted=predicted,
        kept=tuple(one["label"] for one in kept),
        tried=tuple(map(outcome, told["tried"])) if told else (),
        reason=reason,
        original=told["original"]["samples_per_s"] if told else None,
        **{arm: tuple(values) for arm, values in rates.items()},
    )


def read(file: Path) -> list[TunedScript]:
    rows = records.read([file]) if file.exists() else []
    return [TunedScript(**row) for row in rows]


def table(rows: Sequence[TunedScript]) -> list[str]:
    """As lines of Markdown."""
    lines = [HEADS, ("---",) * len(HEADS), *(row.cells for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def missing(subject: Subject, devices: str) -> str:
    """Why a script cannot run here; empty if it can."""
    if subject.small is None and devices.startswith("cpu"):
        return "it needs GPUs"
    lacking = [name for name in subject.modules if importlib.util.find_spec(name) is None]
    if lacking:
        return f"{lacking[0]} is not installed"
    return "" if subject.script.exists() else f"{subject.script} does not exist; next: --public"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", help="2, 4, cpu:2; default: all GPUs, else cpu:2")
    parser.add_argument("--budget", default="10m", help="of one nfold tune")
    parser.add_argument("--turns", type=int, default=2, help="of result and expert")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of all of them")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of scripts")
    parser.add_argument("--public", type=Path, default=Path("public"), help="checkouts")
    parser.add_argument("--out", type=Path, default=Path("tuned.jsonl"))
    parser.add_argument("--read", type=Path, help="print the table of such a file")
    asked = parser.parse_args()
    asked.devices = asked.devices or str(len(inspect_machine().gpus) or "cpu:2")
    end = time.monotonic() + asked.limit_s
    known = subjects(asked.public.absolute())
    done = {row.script for row in read(asked.read or asked.out)}
    chosen = [] if asked.read else [one for one in asked.only or known if one not in done]
    for name in chosen:
        if name not in known:
            raise SystemExit(f"{name}: allowed are {', '.join(known)}")
        write_data(name, known[name].script)
        reason = missing(known[name], asked.devices)
        if not reason and end - time.monotonic() < parse_seconds(asked.budget) + 2 * RESERVE_S:
            reason = "no time is left; next: the same command again"
        if reason:
            print(f"{name}: skipped: {reason}", flush=True)
            continue
        row = tuned(name, known[name], asked, end)
        records.add(asked.out, row)
        print(table([row])[-1], flush=True)
    print("\n".join(["", *table(read(asked.read or asked.out))]))


if __name__ == "__main__":
    main()
