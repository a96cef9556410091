"""Efficiency, speedup, explanations and ``nfold tune`` on all GPUs of a machine, part by part.

    python benchmarks/four_gpus.py --part 1 --only cnn10,gpt2 --out FOLDER
    python benchmarks/four_gpus.py --part 3 --public /tmp/public --out FOLDER
    python benchmarks/four_gpus.py --read FOLDER

Part 1 compares the automatic plan with replicas without communication and with careful DDP at a
fixed batch per device, part 2 cnn10 with 512 samples in all on 1 and N devices. Part 3 explains
doses of each cause, healthy runs and public scripts. Part 4 runs ``nfold tune``. A call ends within
``--limit-s``, a later call with the same ``--out`` runs what is missing. ``--small`` has the same
runs with small models, for CPU devices. NFOLD_DATA has ``cifar10``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
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
from nfold.telemetry.machine_inspection import inspect_machine

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "peers"), str(HERE / "diagnosis")]

import gpu_times  # noqa: E402
import records  # noqa: E402
from asking_nfold import hidden_gpus  # noqa: E402
from results import efficiency, rates_of, ratio, shown  # noqa: E402
from rounds import Window  # noqa: E402
from targets import Script  # noqa: E402
from timed_scripts import absolute_data, cases, write_data  # noqa: E402

GRACE_S = 15.0
"""Until a command that is interrupted has stored its results."""
NOT_CONFIRMED = 3
"""Exit code of ``nfold tune`` if fresh runs do not confirm the gain."""
LEFT = "{left}"
"""In a command: the seconds that it may take."""
NFOLD, REPLICAS = "nfold:strategy=nfold", "ablated:strategy=nfold,without=exchange"
BUILT_IN = (NFOLD, REPLICAS, "careful")
OWN = ("run @step", "replicas @step", "ddp", "ddp compiled")
CAUSES = (
    *("link", "synchronization", "imbalance", "input", "storage", "layout"),
    *("copies", "memory", "threads", "undivided-work", "epoch-boundary"),
)
DOSES_MS = (10, 3)
HEALTHY = 10
EXPLAINED = ("imagenet", "cifar_ddp")
TUNED = ("cifar_ddp", "imagenet", "nanogpt")
TARGET_EFFICIENCY, TARGET_SPEEDUP = 0.97, 3.0


@dataclass(frozen=True)
class Run:
    """A command of a part; it is not started with less than ``least_s`` seconds left."""

    name: str
    command: tuple[str, ...]
    least_s: float
    folder: Path | None = None
    keeps_output: bool = False


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run that ended; ``status`` is None if it was interrupted at the limit."""

    part: int
    name: str
    devices: str
    small: bool
    status: int | None
    seconds: float
    output: Any = None


def peers_run(asked: argparse.Namespace, name: str, batch: str, devices: str) -> Run:
    """A built-in workload under nfold, replicas and careful DDP."""
    out = ("--out", str(asked.out / f"{name}.json"))
    workload = {"cnn10": "cnn10", "wide_resnet": "wide_resnet:depth=28,width=10"}[
        name.split("-")[0]
    ]
    arms = [part for arm in BUILT_IN for part in ("--arm", arm)]
    baselines = ("--baseline", REPLICAS, "--baseline", "careful")
    command = (str(HERE / "peers/peers.py"), "digits" if asked.small else workload)
    options = (*arms, *baselines, batch, "--devices", devices, "--one-by-one", *pace(asked), *out)
    return Run(name, (*command, *options), 60 if asked.small else 150)


def own_models_run(asked: argparse.Namespace, name: str) -> Run:
    """A model of a user under nfold.Run, replicas and careful DDP."""
    command = (str(HERE / "peers/own_models.py"), "tiny" if asked.small else name)
    options = ("--arms", ",".join(OWN), "--devices", count(asked), *pace(asked))
    out = ("--out", str(asked.out / f"{name}.json"))
    return Run(name, (*command, *options, *out), 60 if asked.small else 240)


def pace(asked: argparse.Namespace) -> tuple[str, ...]:
    """Rounds and windows of the interleaved arms, and where their logs go."""
    device = "cpu" if asked.devices.startswith("cpu") else "cuda"
    rounds = ("--rounds=3", "--window-seconds=0.3") if asked.small else ("--rounds=7",)
    logs = Path(tempfile.gettempdir(), "four-gpus-logs")
    return (*rounds, "--device", device, "--logs", str(logs))


def count(asked: argparse.Namespace) -> str:
    return str(asked.devices.rpartition(":")[2])


def part_1(asked: argparse.Namespace) -> list[Run]:
    batch = {"cnn10": "--batch=512", "wide_resnet": "--batch=256"}
    batch = dict.fromkeys(batch, "--batch=16") if asked.small else batch
    built_in = [peers_run(asked, name, value, count(asked)) for name, value in batch.items()]
    return [*built_in, *(own_models_run(asked, name) for name in ("resnet50", "gpt2"))]


def part_2(asked: argparse.Namespace) -> list[Run]:
    whole = f"--global-batch={32 if asked.small else 512}"
    return [peers_run(asked, "cnn10-strong", whole, f"1,{count(asked)}")]


def part_3(asked: argparse.Namespace) -> list[Run]:
    """One run for each explanation, so that every call fits its limit."""
    script = Script("ddp", asked.devices)
    doses = [
        f"ddp+{cause}={ms}"
        for ms in DOSES_MS
        for cause in CAUSES
        if cause in script.causes and (ms == DOSES_MS[0] or cause not in script.switches)
    ]
    healthy = [f"ddp#{number}" for number in range(1, HEALTHY + 1)]
    budget = asked.budget or ("40s" if asked.small else "60s")
    options = ("--devices", asked.devices, "--budget", budget, "--public", str(asked.public))
    out = ("--out", str(asked.out / "explained.jsonl"), "--limit-s", LEFT)
    driver = str(HERE / "diagnosis/gpu_times.py")
    least_s = parse_seconds(budget) + gpu_times.RESERVE_S
    return [
        Run(name, (driver, "--only", name, *options, *out), least_s)
        for name in (*EXPLAINED, *doses, *healthy)
    ]


def part_4(asked: argparse.Namespace) -> list[Run]:
    known, found = cases(asked.public), []
    names = ("resnet",) if asked.small else TUNED
    budget = asked.budget or ("60s" if asked.small else "170s")
    for name in names:
        write_data(name, known[name].script)
        reason = known[name].missing(asked.devices)
        if reason:
            print(f"{name}: skipped: {reason}", flush=True)
            continue
        target, *rest = known[name].command(asked.devices)
        options = ("--budget", budget, "--json", "--results", str(asked.out / f"tune-{name}"))
        command = ("-m", "nfold", "tune", target, *options, *rest)
        found.append(Run(name, command, 30, known[name].script.parent, keeps_output=True))
    return found


PARTS = {1: part_1, 2: part_2, 3: part_3, 4: part_4}


def execute(run: Run, asked: argparse.Namespace, left_s: float) -> FinishedRun:
    """Run a command; interrupt it ``GRACE_S`` before the limit."""
    started, limit_s = time.monotonic(), left_s - GRACE_S
    command = [f"{limit_s:.0f}" if part == LEFT else part for part in run.command]
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=run.folder,
        env={**os.environ, **absolute_data(), **hidden_gpus(asked.devices)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if run.keeps_output else None,
        text=True,
    )
    status: int | None = None
    output: Any = None
    try:
        output, _ = process.communicate(timeout=limit_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output = ended_output(process)
    with contextlib.suppress(TypeError, ValueError):
        output = json.loads(output)
    return FinishedRun(
        part=asked.part,
        name=run.name,
        devices=asked.devices,
        small=asked.small,
        status=status,
        seconds=time.monotonic() - started,
        output=output,
    )


def ended_output(process: subprocess.Popen[str]) -> str | None:
    """Return the output of an interrupted command; kill it if it does not end."""
    try:
        return process.communicate(timeout=GRACE_S / 2)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def run_part(asked: argparse.Namespace) -> None:
    end = time.monotonic() + asked.limit_s
    log = asked.out / "runs.jsonl"
    rows = records.read([log]) if log.exists() else []
    done = {(row["part"], row["name"]) for row in rows if row["status"] in (0, NOT_CONFIRMED)}
    runs = PARTS[asked.part](asked)
    unknown = sorted(set(asked.only or ()) - {run.name for run in runs})
    if unknown:
        print(f"{unknown[0]}: allowed are {', '.join(run.name for run in runs)}")
    for run in runs:
        if (asked.only and run.name not in asked.only) or (asked.part, run.name) in done:
            continue
        left_s = end - time.monotonic()
        if left_s < run.least_s + GRACE_S:
            print(f"{run.name}: {left_s:.0f} s are left; next: the same command again", flush=True)
            continue
        print(f"{run.name}: {' '.join(run.command)}", flush=True)
        finished = execute(run, asked, left_s)
        records.add(log, finished)
        print(f"{run.name}: status {finished.status}, {finished.seconds:.0f} s", flush=True)


def windows_of(found: dict[str, Any]) -> list[Window]:
    return [Window(**{**one, "seconds": tuple(one["seconds"])}) for one in found["windows"]]


def comparison(file: Path) -> list[str]:
    """Ratios of the automatic plan to the other arms, and to its rate on one device if there is one."""
    runs = {run["devices"]: windows_of(run) for run in json.loads(file.read_text())["runs"]}
    lines = []
    for devices, windows in runs.items():
        names = sorted({window.arm for window in windows})
        arm = next((one for one in names if one == NFOLD or one.endswith("run @step")), None)
        if arm is None or devices == 1:
            continue
        own = rates_of(windows, arm)
        found = {f"/ {one}": ratio(own, rates_of(windows, one)) for one in names if one != arm}
        if 1 in runs:
            found["/ one device"] = efficiency(own, rates_of(runs[1], arm), 1)
        said = [f"{name} {shown(interval, '.3f')}" for name, interval in found.items()]
        lines.append(f"{file.stem} on {devices}: {arm} {'; '.join(said)}")
    return lines


def report(folder: Path) -> None:
    """Print what a folder has: ratios, explanations, results of tune."""
    print(f"\ntargets: {TARGET_EFFICIENCY} × replicas, {TARGET_SPEEDUP} × one device (part 2)")
    for file in sorted(folder.glob("*.json")):
        print("\n".join(comparison(file)))
    explained = folder / "explained.jsonl"
    if explained.exists():
        print("\n".join(["", *gpu_times.table(gpu_times.read(explained))]))
    log = folder / "runs.jsonl"
    for row in records.read([log]) if log.exists() else []:
        if row["part"] == 4:
            print(f"tune {row['name']}: {row['seconds']:.0f} s: {json.dumps(row['output'])[:400]}")


def main(arguments: Sequence[str] | None = None) -> None:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    gpus = len(inspect_machine().gpus)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", type=int, choices=list(PARTS))
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of runs")
    parser.add_argument("--devices", default=str(gpus or "cpu:2"), help="default: all GPUs")
    parser.add_argument("--budget", help="time of one explanation or tuning")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of this call")
    parser.add_argument("--small", action="store_true", help="small models, for CPU devices")
    parser.add_argument("--public", type=Path, default=Path("public"), help="as of gpu_times.py")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"{today}-{gpus}-gpus")
    parser.add_argument("--read", type=Path, help="print what such a folder has")
    asked = parser.parse_args(arguments)
    if bool(asked.part) == bool(asked.read):
        parser.error("allowed is either --part or --read")
    asked.public, asked.out = asked.public.absolute(), asked.out.absolute()
    if asked.part:
        asked.out.mkdir(parents=True, exist_ok=True)
        run_part(asked)
    report(asked.read or asked.out)


if __name__ == "__main__":
    main()
