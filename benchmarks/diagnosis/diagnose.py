"""Injects causes of known size, has them found, and prints the score.

    python benchmarks/diagnosis/diagnose.py --on simulated --healthy 20
    python benchmarks/diagnosis/diagnose.py --on cpu:2 --cause imbalance --doses 2,5,10,20
    python benchmarks/diagnosis/diagnose.py --on 2 --script ddp --pairs --healthy 5 --out d.jsonl
    python benchmarks/diagnosis/diagnose.py --on 1 --script ddp --cause copies --cause input
    python benchmarks/diagnosis/diagnose.py --on 2 --script ddp --tool traceml --out d.jsonl
    python benchmarks/diagnosis/diagnose.py --read d.jsonl

On the simulated framework costs are exact; ``planted.py`` puts them into a built-in workload;
scripts get them from ``dosed/faults.py``. Doses are milliseconds a step on N devices.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import records
import traced
from asking_nfold import explained
from diagnosis_score import Case, table
from own_clock import Doses
from planted_target import Planted, importing
from targets import SCRIPTS, Script, Simulated, Target

DOSES = "0.5,1,2,4"


def jobs(asked: argparse.Namespace, target: Target) -> list[tuple[Doses, int]]:
    """Every cause at every dose, pairs at each dose, healthy runs; in a random order."""
    found: list[tuple[Doses, int]] = []
    for cause in asked.cause or target.causes:
        doses = asked.doses[-1:] if cause in target.switches else asked.doses
        found += [(dict.fromkeys(cause.split("+"), dose), 0) for dose in doses]
    if asked.pairs:
        found += [(dict.fromkeys(pair, dose), 0) for pair in target.pairs for dose in asked.doses]
    found += [({}, seed) for seed in range(asked.healthy)]
    random.Random(asked.seed).shuffle(found)
    return found


def cases(asked: argparse.Namespace, target: Target) -> Iterator[Case]:
    """One explanation after the other, while there is time."""
    end = time.monotonic() + asked.seconds
    every = jobs(asked, target)
    if isinstance(target, Script | Planted):
        _learn(asked.clock, target, [doses for doses, _ in every])
    for doses, seed in every:
        if time.monotonic() > end:
            print(f"{target.name}: out of time", flush=True)
            return
        try:
            case = _case(asked, target, doses, seed)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"{target.name} {dict(doses)}: FAILED: {error}", flush=True)
            continue
        found = ", ".join(f"{cause} {ms:.2f} ms" for cause, ms in case.attributed.items())
        injected = ", ".join(f"{cause} {ms:.2f} ms" for cause, ms in case.injected.items())
        print(f"{injected or 'healthy'}: {found or case.said}, {case.named}", flush=True)
        yield case


def _learn(clock: Path | None, target: Script | Planted, every: list[Doses]) -> None:
    """What the target's own clock says of all doses; kept in a file for the next time."""
    if clock and clock.exists():
        target.readings.read(clock)
    target.learn(every)
    if clock:
        target.readings.keep(clock)


def _case(asked: argparse.Namespace, target: Target, doses: Doses, seed: int) -> Case:
    if asked.tool == "traceml":
        assert isinstance(target, Script)
        return traced.case(target, doses)
    found = explained(
        target.command(),
        asked.budget,
        python=asked.python,
        environment={"PYTHONPATH": importing(), **target.environment(doses, seed)},
        verbose=asked.verbose,
    )
    if asked.keep:
        asked.keep.mkdir(parents=True, exist_ok=True)
        name = "-".join([target.name, *(f"{c}-{ms:g}" for c, ms in doses.items()), str(seed)])
        (asked.keep / f"{name.replace(' ', '-')}.json").write_text(json.dumps(found, indent=1))
    return read(target.name, found, target.injected(doses, found), strong=target.strong)


def read(target: str, found: Any, injected: dict[str, float], *, strong: bool) -> Case:
    """The case that an explanation is; ``strong`` where it counts from a fixed global batch."""
    step = found["n_devices"]["step_ms"]["value"]
    rows = [*found["budget"], *found["single_device_budget"]]
    promised = [
        row["predicted_speedup"]["value"] / _alone_too(found, row)
        for row in found["budget"]
        if row["cause"] in injected and row["predicted_speedup"]
    ]
    lost = _attributed(found, strong)
    return Case(
        target=target,
        injected=injected,
        attributed={cause: lost[cause] for cause in injected or lost if cause in lost},
        step_ms=step,
        others_ms=found["others_ms"]["value"],
        unexplained_ms=found["unexplained_ms"]["value"],
        named=tuple(found["named"]),
        interaction_ms=sum(
            one["lost_ms"]["value"]
            for one in found["interactions"]
            if set(one["causes"]) == set(injected)
        ),
        speedup=found["speedup"]["value"],
        predicted=promised[0] if len(injected) == 1 and promised else None,
        said=_untested(injected, rows, found),
    )


def _alone_too(found: Any, row: Any) -> float:
    """How many times as fast the change that a row has tried makes one device alone.

    The row's speedup is then over one device as it was, that of healthy runs over a healthy one.
    """
    alone = [one for one in found["single_device_budget"] if one["cause"] == row["cause"]]
    return float(alone[0]["predicted_speedup"]["value"]) if alone and row["proven"] else 1.0


def _untested(injected: Doses, rows: list[Any], found: Any) -> str:
    """Why nothing is attributed to an injected cause that has no row."""
    missing = {f"untested_{cause}" for cause in injected} - {f"untested_{r['cause']}" for r in rows}
    reasons = [doubt for doubt in found["warnings"] if doubt["kind"] in missing]
    return "; ".join(f"{one['kind'].replace('_', ' ')}: {one['text']}" for one in reasons)


def _attributed(found: Any, strong: bool) -> dict[str, float]:
    """Of N devices; weakly scaled, what one device loses in the same way is lost on N too."""
    blocks = [found["budget"], found["single_device_budget"]]
    lost: dict[str, float] = {}
    for number, block in enumerate(blocks):
        for row in block:
            # Without worker processes nothing hides the input, on one device or on several.
            alone = row["cause"] in ("input", "storage") and found["plan"]["workers"] == 0
            if not strong or number == alone:
                lost[row["cause"]] = lost.get(row["cause"], 0.0) + row["lost_ms"]["value"]
    return lost


def main(arguments: list[str] | None = None) -> list[Case]:
    """Run all cases, or read them, and print the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--on", default="simulated", help="simulated, or devices: cpu:2, 1, 2, 4")
    parser.add_argument("--script", choices=list(SCRIPTS), help="a script of dosed/")
    parser.add_argument("--tool", choices=["nfold", "traceml"], default="nfold")
    parser.add_argument("--python", default=sys.executable, help="with the script's libraries")
    parser.add_argument("--argument", action="append", default=[], help="of the script: --width=8")
    parser.add_argument("--cause", action="append", help="a cause, or two: imbalance+link")
    parser.add_argument("--doses", default=DOSES)
    parser.add_argument("--pairs", action="store_true", help="two causes at once, too")
    parser.add_argument("--healthy", type=int, default=0, help="runs without any injection")
    parser.add_argument("--budget", default="3m", help="time of one explanation")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after these")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cases")
    parser.add_argument("--out", type=Path, help="a file to which every case is added")
    parser.add_argument("--keep", type=Path, help="a folder for the whole explanations")
    parser.add_argument("--clock", type=Path, help="keeps what a script's own clock said of doses")
    parser.add_argument("--read", type=Path, nargs="+", help="print the score of such files")
    parser.add_argument("--verbose", action="store_true", help="show every run")
    asked = parser.parse_args(arguments)
    asked.doses = [float(dose) for dose in asked.doses.split(",") if dose]
    found = _read_all(asked.read) if asked.read else _run_all(asked, _target(parser, asked))
    print("\n".join(["", *table(found)]))
    return found


def _target(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> Target:
    target: Target
    if asked.script:
        target = Script(asked.script, asked.on, asked.python, tuple(asked.argument))
    else:
        target = Simulated() if asked.on == "simulated" else Planted(asked.on)
    causes = {cause for text in asked.cause or () for cause in text.split("+")}
    unknown = sorted(causes - set(target.causes))
    if unknown:
        allowed = ", ".join(target.causes)
        parser.error(f"cause {unknown[0]!r}: for {target.name} allowed are {allowed}")
    if asked.tool == "traceml" and not asked.script:
        parser.error("tool 'traceml': it needs a script; next: --script ddp")
    return target


def _run_all(asked: argparse.Namespace, target: Target) -> list[Case]:
    found = []
    for case in cases(asked, target):
        found.append(case)
        records.add(asked.out, case)
    return found


def _read_all(files: list[Path]) -> list[Case]:
    return [Case(**{**one, "named": tuple(one["named"])}) for one in records.read(files)]


if __name__ == "__main__":
    main()
