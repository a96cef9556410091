"""Scripts with a fault of a public thread: explained, then compared with the repaired script.

    python benchmarks/diagnosis/repaired.py --on 2 --script ddp --script dataparallel
    python benchmarks/diagnosis/repaired.py --on 2 --tool traceml --out repaired.jsonl
    python benchmarks/diagnosis/repaired.py --read repaired.jsonl

What is predicted is the rate without the fault, of the row that names it; what is achieved is that
of ``*_fixed.py``, explained in the same way; with ``--turns N`` by the clocks of both scripts, in N
turns without nfold, half of them before the explanation and the rest after it (gained.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diagnose
import records
import traced
from asking_nfold import explained, hidden_gpus
from gained import Clocked, Script

from nfold.core.stats import midmean

LISTS = ("named", "gains")
"""What of a verdict JSON makes lists of."""
FOLDER = Path(__file__).resolve().parent / "scripts"


@dataclass(frozen=True)
class Fault:
    """What is wrong with a script: the thread that reports it, the cause by nfold's name."""

    thread: str
    cause: str
    alone: bool = False
    """Whether it is a fault on one device already."""
    alike: bool = True
    """Whether a step of the repaired script trains as many samples."""


FAULTS = {
    "ddp": Fault("pytorch/pytorch#22260, dmlc/dgl#3609", "threads"),
    "with_lightning": Fault("speechbrain/speechbrain#1517", "undivided-work", alike=False),
    "with_accelerate": Fault("huggingface/accelerate#192", "synchronization"),
    "dataparallel": Fault("keras-team/keras#11342, #9204", "single-process", alike=False),
    "with_trainer": Fault("huggingface/transformers#20581", "input", alone=True),
    "single": Fault("Lightning-AI/pytorch-lightning#1216", "input", alone=True),
    "mixed_precision": Fault("pytorch/pytorch#42311", "layout", alone=True),
    "characters": Fault("karpathy/build-nanogpt#6", "launch-bound", alone=True),
    "cifar_ddp": Fault("pytorch/pytorch#73600", "input"),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a tool said of a faulty script; speedups over one device of the same script.

    For a script that uses one device only, ``before`` is 1 and the others are over that.
    """

    script: str
    devices: str
    tool: str
    named: tuple[str, ...]
    said: str
    before: float | None = None
    predicted: float | None = None
    achieved: float | None = None
    unexplained: float | None = None
    gains: tuple[float, ...] = ()
    """Of every turn: how many times as fast the repaired script is by the scripts' own clocks."""

    @property
    def promised(self) -> float | None:
        """How many times as fast it is said to become."""
        return self.predicted / self.before if self.predicted and self.before else None

    @property
    def right(self) -> bool:
        """Whether the fault was named first."""
        return self.named[:1] == (FAULTS[self.script].cause,)


def judge(name: str, asked: argparse.Namespace) -> Verdict:
    """Explain a script and its repaired form."""
    if asked.tool == "traceml":
        return _traced(name, asked)
    own = asked.argument if asked.fixed_argument is None else asked.fixed_argument
    if asked.turns:
        return _in_turns(name, asked, own)
    faulty = _explained(name, asked, asked.budget, asked.argument)
    fixed = _explained(f"{name}_fixed", asked, asked.fixed_budget, own)
    return verdict(name, asked.on, faulty, fixed)


def _in_turns(name: str, asked: argparse.Namespace, own: list[str]) -> Verdict:
    """An explanation, and before and after it both scripts by their own clocks."""
    fault = FAULTS[name]
    if not fault.alike:
        raise RuntimeError("a step of the repaired script trains other samples; next: no --turns")
    clocked = Clocked(devices=asked.on, alone=fault.alone, python=asked.python)
    faulty: Script = [FOLDER / f"{name}.py", *asked.argument]
    fixed: Script = [FOLDER / f"{name}_fixed.py", *own]
    before = range(asked.turns // 2)
    gains = _gains(clocked, before, faulty, fixed)
    found = verdict(name, asked.on, _explained(name, asked, asked.budget, asked.argument))
    gains += _gains(clocked, range(len(before), asked.turns), faulty, fixed)
    assert found.before is not None
    achieved = found.before * midmean(gains) if gains else None
    return dataclasses.replace(found, achieved=achieved, gains=tuple(gains))


def _gains(clocked: Clocked, turns: range, faulty: Script, fixed: Script) -> list[float]:
    """Of every turn; one that fails is told, and loses nothing else."""
    found = []
    for number in turns:
        try:
            found.append(clocked.gain(number, faulty, fixed))
        except RuntimeError as error:
            print(f"own clock, turn {number + 1}: FAILED: {error}", file=sys.stderr, flush=True)
    return found


def verdict(name: str, devices: str, faulty: Any, fixed: Any = None) -> Verdict:
    """What an explanation makes of a script, and one of the repaired script."""
    fault = FAULTS[name]
    case = diagnose.read(name, faulty, {fault.cause: 0.0}, strong=True)
    block = "single_device_budget" if fault.alone else "budget"
    rows = [row for row in faulty[block] if row["cause"] == fault.cause]
    said = rows[0]["fix"] if rows else "no such row"
    rate = "one_device" if fault.alone else "n_devices"
    alone = faulty["one_device"]["samples_per_s"]["value"]
    wrong = " ".join(faulty["wrong"])
    predicted = None
    if rows and fault.alone:
        predicted = rows[0]["predicted_speedup"]["value"]
    elif rows and rows[0]["predicted_samples_per_s"]:
        predicted = rows[0]["predicted_samples_per_s"]["value"] / alone
    return Verdict(
        script=name,
        devices=devices,
        tool="nfold",
        named=case.named,
        said=f"{wrong} {said}".strip(),
        before=faulty[rate]["samples_per_s"]["value"] / alone,
        predicted=predicted,
        achieved=fixed[rate]["samples_per_s"]["value"] / alone if fixed else None,
        unexplained=case.unexplained_ms / case.step_ms,
    )


def _explained(name: str, asked: argparse.Namespace, budget: str, arguments: list[str]) -> Any:
    found = explained(
        [str(FOLDER / f"{name}.py"), "--devices", asked.on, "--", *arguments],
        budget,
        python=asked.python,
        environment=hidden_gpus(asked.on),
        verbose=asked.verbose,
    )
    if asked.keep:
        asked.keep.mkdir(parents=True, exist_ok=True)
        (asked.keep / f"{name}.json").write_text(json.dumps(found, indent=1))
    return found


def _traced(name: str, asked: argparse.Namespace) -> Verdict:
    count = int(asked.on.rpartition(":")[2])
    ranks = count if FAULTS[name].cause not in ("single-process", "input") else 0
    with tempfile.TemporaryDirectory() as folder:
        summary, _ = traced.summary(
            FOLDER / f"{name}.py",
            Path(folder),
            asked.python,
            ranks,
            ["--epochs", str(asked.epochs), *asked.argument],
            {**os.environ, **hidden_gpus(asked.on)},
        )
    status, said = traced.verdict(summary)
    cause = traced.VERDICTS.get(status)
    named = (cause,) if cause else ()
    return Verdict(script=name, devices=asked.on, tool="traceml", named=named, said=said)


def table(found: list[Verdict]) -> list[str]:
    """One row a script and tool, in Markdown."""
    lines = [
        "| script | devices | fault (thread) | tool | named first | speedup | predicted | achieved "
        "| gain said | gain in turns | unexplained | it said |",
        "|---|---|---|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for one in found:
        fault = FAULTS[one.script]
        first = (*one.named, "nothing")[0]
        speeds = [_number(value) for value in (one.before, one.predicted, one.achieved)]
        rest = "" if one.unexplained is None else f"{one.unexplained:.1%}"
        gained = f"{_number(one.promised)} | {', '.join(map(_number, one.gains))}"
        start = f"{one.script}.py | {one.devices} | {fault.cause} ({fault.thread}) | {one.tool}"
        lines.append(
            f"| {start} | {first} | {' | '.join(speeds)} | {gained} | {rest} | {one.said} |"
        )
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(arguments: list[str] | None = None) -> list[Verdict]:
    """Judge every script, or read what was judged, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--on", default="cpu:2", help="devices: cpu:2, 2, 4")
    parser.add_argument("--script", action="append", choices=list(FAULTS))
    parser.add_argument("--tool", choices=["nfold", "traceml"], default="nfold")
    parser.add_argument("--python", default=sys.executable, help="with the scripts' libraries")
    parser.add_argument("--argument", action="append", default=[], help="of the script: --batch=8")
    parser.add_argument("--fixed-argument", action="append", help="of the repaired one")
    parser.add_argument("--epochs", type=int, default=2, help="under TraceML: to their end")
    parser.add_argument("--budget", default="3m", help="time of one explanation")
    parser.add_argument("--fixed-budget", default="60s", help="the repaired script's, for rates")
    parser.add_argument(
        "--turns", type=int, default=0, help="of both scripts by their own clocks, in its place"
    )
    parser.add_argument("--out", type=Path, help="a file to which every verdict is added")
    parser.add_argument("--keep", type=Path, help="a folder for what nfold said, as JSON")
    parser.add_argument("--read", type=Path, nargs="+", help="print the table of such files")
    parser.add_argument("--verbose", action="store_true", help="show every run")
    asked = parser.parse_args(arguments)
    found = _read(asked.read) if asked.read else _run(asked)
    print("\n".join(["", *table(found)]))
    return found


def _run(asked: argparse.Namespace) -> list[Verdict]:
    found = []
    for name in asked.script or FAULTS:
        try:
            found.append(judge(name, asked))
        except RuntimeError as error:
            print(f"{name}.py: FAILED: {error}", flush=True)
            continue
        print(table(found[-1:])[-1], flush=True)
        records.add(asked.out, found[-1])
    return found


def _read(files: list[Path]) -> list[Verdict]:
    rows = records.read(files)
    return [Verdict(**one | {key: tuple(one.get(key, ())) for key in LISTS}) for one in rows]


if __name__ == "__main__":
    main()
