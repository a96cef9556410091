"""nfold's step and its peers', interleaved on the same devices.

    python benchmarks/peers/peers.py cnn10 --batch 512 --devices 1,2,4 --arm careful \
        --arm prototype --arm jax --arm nfold:input=resident,precision=bf16 --out cnn10.json

All arms of a run are alive at the same time and train in turns, a window each, in a random order
in every round, so that ratios are formed round by round. Every arm trains the same model on the
same data; incomplete last batches are left out in all of them. jax and plain use one device
however many there are. An arm that fails is told as failed, the others go on. The file is
written after every window, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fleet import Arm, Spec, Work, stop_all
from results import efficiencies, summary, table
from rounds import Pace, Window, measure, started

from nfold.cli.plan_completion import prepare_data
from nfold.core.plan import Plan
from nfold.core.serialization import serialize
from nfold.core.workload import Workload
from nfold.telemetry.machine_inspection import inspect_machine

PLACES = ("out", "logs")
"""Arguments that say where results go, which are not part of them."""
BASELINES = ("prototype", "careful")
LIBRARIES = (
    "torch",
    "triton",
    "torchvision",
    "jax",
    "jaxlib",
    "lightning",
    "pytorch-lightning",
    "accelerate",
    "numpy",
)


@dataclass
class Record:
    """Everything that a call of this script found so far, kept in its file."""

    file: Path
    asked: dict[str, Any]
    machine: Any
    runs: list[tuple[Work, list[Arm], list[Window]]] = field(default_factory=list)

    @classmethod
    def of(cls, asked: argparse.Namespace) -> Record:
        """An empty record of a command line on this machine."""
        said = {key: str(value) for key, value in vars(asked).items() if key not in PLACES}
        return cls(asked.out, said, inspect_machine())

    def add_run(self, work: Work, arms: list[Arm]) -> tuple[list[Window], Callable[[Window], None]]:
        """Add a run; return its windows, and what adds one to them and writes the file."""
        windows: list[Window] = []
        self.runs.append((work, arms, windows))

        def keep(window: Window) -> None:
            windows.append(window)
            self.save()

        return windows, keep

    def save(self) -> None:
        """Write the file anew."""
        written = {
            "asked": self.asked,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": serialize(self.machine),
            "versions": versions(),
            "runs": [summary(arms, windows, work.devices) for work, arms, windows in self.runs],
        }
        self.file.write_text(json.dumps(written, indent=1) + "\n")


def main(arguments: list[str]) -> None:
    """Measure on every number of devices, one after the other, and print what was found."""
    asked = parsed(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    prepare_data(Workload.parse(asked.workload), Plan(), None)
    record = Record.of(asked)
    try:
        for devices in asked.devices:
            one_run(asked, devices, record)
    except KeyboardInterrupt:
        print("interrupted: the file has what was measured", file=sys.stderr)
    finally:
        record.save()
    rates = [(work.devices, windows) for work, _, windows in record.runs]
    print(efficiencies(rates, [spec.name for spec in asked.arm]))


def one_run(asked: argparse.Namespace, devices: int, record: Record) -> None:
    """All arms on so many devices; nothing of them is left afterwards."""
    work = Work(
        workload=asked.workload,
        batch=asked.global_batch or asked.batch,
        whole=asked.global_batch is not None,
        device=asked.device,
        devices=devices,
        warmup=asked.warmup,
    )
    pace = Pace(
        rounds=asked.rounds,
        window_s=asked.window_seconds,
        settle_s=asked.settle_seconds,
        ready_s=asked.ready_seconds,
    )
    asked.logs.mkdir(parents=True, exist_ok=True)
    arms = [Arm(spec, work, asked.logs) for spec in asked.arm]
    windows, keep = record.add_run(work, arms)
    try:
        started(arms, pace, one_by_one=asked.one_by_one)
        measure(arms, pace, keep)
    finally:
        stop_all(arms)
        names = [arm.spec.name for arm in arms]
        chosen = [name for name in asked.baseline or BASELINES if name in names]
        print(f"{work.workload} on {devices} × {work.device}, batch {_batch(work)}")
        print(table(arms, windows, chosen) + "\n", flush=True)


def _batch(work: Work) -> str:
    return f"{work.batch} in all" if work.whole else f"{work.batch} per device"


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line; a wrong one ends the process with what is allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("workload", help="cnn10, mnist, wide_resnet:depth=28,width=10, ...")
    batch = parser.add_mutually_exclusive_group(required=True)
    batch.add_argument("--batch", type=int, help="samples of a step, per device")
    batch.add_argument("--global-batch", type=int, help="samples of a step, over all devices")
    parser.add_argument("--devices", type=counts, default=[1], help="for example 1,2,4")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--arm", type=Spec.parse, action="append", required=True)
    parser.add_argument("--baseline", action="append", help="an arm; ratios are to it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--window-seconds", type=float, default=1.0)
    parser.add_argument("--settle-seconds", type=float, default=0.3)
    parser.add_argument("--ready-seconds", type=float, default=240.0)
    parser.add_argument("--warmup", type=int, default=30, help="steps before an arm is ready")
    parser.add_argument("--one-by-one", action="store_true", help="start arms one after the other")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, help="folder of the ranks' logs; beside --out")
    found = parser.parse_args(arguments)
    names = [spec.name for spec in found.arm]
    if len(set(names)) < len(names):
        parser.error("an arm is given twice")
    found.logs = found.logs or found.out.with_suffix(".logs")
    return found


def counts(text: str) -> list[int]:
    """``1,2,4`` as numbers of devices."""
    return [int(part) for part in text.split(",")]


def versions() -> dict[str, str]:
    """The versions of those libraries that are installed."""
    installed = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    return {name: installed[name] for name in LIBRARIES if name in installed}


if __name__ == "__main__":
    main(sys.argv[1:])
