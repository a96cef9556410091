"""nfold's own step in two versions of its source, several processes of each, interleaved.

    git archive OLD src | tar x -C /tmp/old
    python benchmarks/peers/two_versions.py /tmp/old/src src cnn10 --batch 512 \
        --field input=resident --field precision=bf16 --out two_versions.json

cuDNN searches its algorithms anew in every process. So the ratio of two single processes contains
that luck, and the rates of all processes are printed above the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from fleet import Arm, Place, Spec, Work, stop_all
from peers import Record
from results import rates_of, ratio, shown, table
from rounds import Pace, Window, measure, started


@dataclass(frozen=True, kw_only=True)
class SourcePlace(Place):
    """All cores and GPUs, with nfold imported from ``source``."""

    source: Path

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.source.resolve())}


def main() -> None:
    asked = parsed()
    asked.logs.mkdir(parents=True, exist_ok=True)
    record = Record.of(asked)
    work = Work(
        workload=asked.workload, batch=asked.batch, device=asked.device, devices=asked.devices
    )
    fields = tuple((name, value) for name, _, value in (f.partition("=") for f in asked.field))
    cores = frozenset(os.sched_getaffinity(0))
    arms = [
        Arm(
            Spec(f"{name} {number}", "nfold", fields),
            work,
            asked.logs,
            SourcePlace(cores=cores, source=source),
        )
        for number in range(1, asked.processes + 1)
        for name, source in (("old", asked.old), ("new", asked.new))
    ]
    windows, keep = record.add_run(work, arms)
    try:
        # One by one: no process's search for algorithms is disturbed by another's.
        pace = Pace(rounds=asked.rounds)
        started(arms, pace, one_by_one=True)
        measure(arms, pace, keep)
    finally:
        stop_all(arms)
        record.save()
    sys.stdout.write(table(arms, windows, ["old 1"]) + "\n" + comparison(windows) + "\n")


def comparison(windows: list[Window]) -> str:
    """Mean rate of the processes of the new version over that of the old, round by round."""
    names = sorted({window.arm for window in windows})
    rates = {name: rates_of(windows, name) for name in names}
    means = {
        version: {
            number: statistics.mean(found)
            for number in {window.round for window in windows}
            if (found := [r[number] for n, r in rates.items() if version in n and number in r])
        }
        for version in ("old", "new")
    }
    return f"new / old: {shown(ratio(means['new'], means['old']), '.4f')}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("old", type=Path, help="the folder src of one version")
    parser.add_argument("new", type=Path, help="the folder src of the other")
    parser.add_argument("workload", help="cnn10, wide_resnet:depth=28,width=10, ...")
    parser.add_argument("--batch", type=int, required=True, help="samples of a step, per device")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--field", action="append", default=[], help="NAME=VALUE of the plan")
    parser.add_argument("--processes", type=int, default=3, help="of each version")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, help="folder of the ranks' logs; beside --out")
    found = parser.parse_args()
    found.logs = found.logs or found.out.with_suffix(".logs")
    return found


if __name__ == "__main__":
    main()
