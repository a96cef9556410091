"""Scripts as people of other fields write them, explained: what is named, and what is said of it.

    python benchmarks/diagnosis/unfamiliar.py --on cpu:2 --script speech --out told.jsonl
    python benchmarks/diagnosis/unfamiliar.py --read told.jsonl

They have no fault that was put in: whoever reads the table holds it against the script. What nfold
got wrong when they were first run is in docs/decisions/unmodified-scripts.md.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
from asking_nfold import explained, hidden_gpus

STRANGERS = Path(__file__).parent / "strangers"
NAMES = sorted(path.stem for path in STRANGERS.glob("*.py"))
HEADS = ("script", "on", "ms a step of one device", "speedup", "named", "it said")


@dataclass(frozen=True)
class Told:
    """What nfold said of one; ``named`` are causes with their milliseconds of all devices' step."""

    script: str
    on: str
    one_ms: float
    speedup: float
    named: tuple[tuple[str, float], ...]
    fix: str
    wrong: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """Of its row in the table."""
        causes = ", ".join(f"{cause} {ms:.2f} ms" for cause, ms in self.named) or "nothing"
        said = "; ".join((*self.wrong, self.fix)) or "nothing to change"
        first = (self.script, self.on, f"{self.one_ms:.2f}", f"{self.speedup:.2f} ×")
        return (*first, causes, said)


def told(script: str, on: str, found: Any) -> Told:
    """Of what ``nfold explain --json`` printed: rows that are named, of one device as well."""
    rows = [*found["single_device_budget"], *found["budget"]]
    named = {row["cause"]: row for row in rows if row["named"]}
    costs = {cause: row["whole_ms"]["value"] for cause, row in named.items()}
    ordered = sorted(costs, key=lambda cause: -costs[cause])
    return Told(
        script=script,
        on=on,
        one_ms=found["one_device"]["step_ms"]["value"],
        speedup=found["speedup"]["value"],
        named=tuple((cause, costs[cause]) for cause in ordered),
        fix=named[ordered[0]]["fix"] if ordered else "",
        wrong=tuple(found["wrong"]),
    )


def table(rows: list[Told]) -> list[str]:
    """As lines of Markdown."""
    lines = [HEADS, ("---",) * len(HEADS), *(row.cells for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def main() -> None:
    """Explain some of them, or read what was told, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--on", default="cpu:2", help="devices: cpu:2, 1, 2, 4")
    parser.add_argument("--script", action="append", choices=NAMES)
    parser.add_argument("--budget", default="90s", help="time of one explanation")
    parser.add_argument("--out", type=Path, help="a file to which every row is added")
    parser.add_argument("--read", type=Path, nargs="+", help="print the table of such files")
    parser.add_argument("--verbose", action="store_true", help="show every run")
    asked = parser.parse_args()
    rows = _read(asked.read) if asked.read else _run(asked)
    print("\n".join(["", *table(rows)]))


def _run(asked: argparse.Namespace) -> list[Told]:
    rows = []
    for name in asked.script or NAMES:
        command = [str(STRANGERS / f"{name}.py"), "--devices", asked.on]
        try:
            hidden = hidden_gpus(asked.on)
            found = explained(command, asked.budget, environment=hidden, verbose=asked.verbose)
        except RuntimeError as error:
            print(f"{name}.py: FAILED: {error}", flush=True)
            continue
        rows.append(told(name, asked.on, found))
        print(table(rows[-1:])[-1], flush=True)
        records.add(asked.out, rows[-1])
    return rows


def _read(files: list[Path]) -> list[Told]:
    return [
        Told(**{**one, "named": tuple(map(tuple, one["named"])), "wrong": tuple(one["wrong"])})
        for one in records.read(files)
    ]


if __name__ == "__main__":
    main()
