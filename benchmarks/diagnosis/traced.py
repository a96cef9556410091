"""TraceML on the same scripts: what it says, and which cause that is.

Lightning is instrumented by TraceML itself, the script unchanged. A loop of one's own is given
what its documentation asks for: ``init`` first, and ``trace_step`` around every step.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diagnosis_score import Case
from own_clock import Doses, slowest_ms
from targets import Script

STEPS = 300
VERDICTS = {
    "INPUT-BOUND": "input",
    "H2D-BOUND": "copies",
    "INPUT STRAGGLER": "imbalance",
    "COMPUTE STRAGGLER": "imbalance",
    "H2D STRAGGLER": "imbalance",
    "STRAGGLER": "imbalance",
    "RESIDUAL-HEAVY": "residual",
}
"""The cause that a verdict means, in the kindest reading; the others name no cause of slowness."""
LOOP = re.compile(r"^( *)for .* in (?:loader|enumerate\(loader.*\)):\n", re.MULTILINE)
BEGIN = re.compile(r"^    \w+ = (?:asked|parser\.parse_args)\(\)\n", re.MULTILINE)
FUTURE = "from __future__ import annotations\n"
ENTRY = "import sys; from traceml_ai.launcher.cli import main; sys.exit(main())"


def case(script: Script, doses: Doses) -> Case:
    """One run of a script with doses in it, which count as asked for: it tells no sizes."""
    ranks = 0 if script.strong else script.count
    own = ["--steps", str(STEPS), *script.arguments]
    environment = {**os.environ, **script.environment(doses, 0)}
    with tempfile.TemporaryDirectory() as folder:
        found, step_ms = summary(script.file, Path(folder), script.python, ranks, own, environment)
    status, said = verdict(found)
    cause = VERDICTS.get(status)
    return Case(
        target=script.name,
        injected=dict(doses),
        attributed={},
        step_ms=step_ms,
        unexplained_ms=0.0,
        named=(cause,) if cause else (),
        tool="traceml",
        said=said,
    )


def verdict(found: Any) -> tuple[str, str]:
    """Its status, and status, reason and advice as it prints them."""
    primary = found.get("primary_diagnosis") or {}
    status = str(primary.get("status") or "NO VERDICT")
    told = (primary.get("summary"), primary.get("action"))
    return status, " ".join([f"{status}:", *(str(text) for text in told if text)])


def integrated(text: str) -> str:
    """A script with its loop instrumented as TraceML's documentation shows."""
    found = LOOP.search(text)
    if found is None:
        return text
    inner = len(found[1]) + 4
    after = text[found.end() :].splitlines(keepends=True)
    body = 0
    while body < len(after) and (not after[body].strip() or _indent(after[body]) >= inner):
        body += 1
    traced = f"{' ' * inner}with traceml.trace_step(getattr(model, 'module', model)):\n"
    inside = [f"    {line}" if line.strip() else line for line in after[:body]]
    looped = text[: found.end()] + traced + "".join([*inside, *after[body:]])
    begun = BEGIN.sub(lambda line: f"{line[0]}    traceml.init(mode='auto')\n", looped, count=1)
    return begun.replace(FUTURE, f"{FUTURE}import traceml_ai as traceml\n", 1)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def summary(
    script: Path,
    folder: Path,
    python: str,
    ranks: int,
    own: Sequence[str],
    environment: Mapping[str, str],
) -> tuple[Any, float]:
    """TraceML's final summary of a run, and the milliseconds a step that the script printed.

    ``ranks`` 0 is one process that nobody launches.
    """
    file = folder / script.name
    file.write_text(integrated(script.read_text()))
    path = os.pathsep.join([str(script.parent), environment.get("PYTHONPATH", "")])
    launched = ["--nproc-per-node", str(ranks)] if ranks else []
    done = subprocess.run(
        [python, "-c", ENTRY, "run", str(file), *launched, "--mode", "summary",
         "--logs-dir", str(folder), "--run-name", "run", "--no-save-training-output",
         "--args", *own],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=folder,
    )  # fmt: skip
    summaries = list(folder.rglob("final_summary.json"))
    if not summaries:
        raise RuntimeError(f"no final_summary.json: {(done.stdout + done.stderr)[-2000:]}")
    step_ms = slowest_ms(done.stdout).get(0, float("nan"))
    return json.loads(summaries[0].read_text()), step_ms
