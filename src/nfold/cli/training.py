"""What ``nfold train`` does once its options are read."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from nfold.cli import output
from nfold.cli.epochs import EpochLines
from nfold.cli.preparing import prepare
from nfold.cli.screen import screen
from nfold.cli.signals import stop_on_signals
from nfold.cli.steps import StepLines
from nfold.cli.training_plan import Asked, Request, asked_of
from nfold.errors import RunFailure
from nfold.frameworks.checkpoints import attempts, held
from nfold.inert import inert
from nfold.measurement import Epoch, Measurement
from nfold.place import shown_path
from nfold.run.options import Options, Progress, Stop
from nfold.run.run import run
from nfold.store.store import Store
from nfold.summary import SCHEMA, epochs

CHANGED = ", with other imports or in another environment"


def train(request: Request) -> int:
    """Train, or show what was trained before; the exit code. Raises RunFailure where it fails."""
    asked = asked_of(request)
    kept = asked.kept()
    with Store.open(request.results) as store:
        before = None if request.again else _before(store, asked, kept)
        changed = CHANGED if before is not None and before.cell != asked.cell else ""
        complete = asked.folder is None or len(kept) == asked.total
        if before is not None and before.status == "ok" and complete:
            _note(f"trained before{changed}; --again starts over")
            _show(request, asked, before)
            return 0
        if changed:
            _note(f"begun{changed}; it goes on with those of now, --again starts over")
        prepare(asked.workload, asked.plan, request.data)
        with nullcontext() if asked.folder is None else held(asked.folder.parent):
            return _train(request, asked, kept, store)


def _before(store: Store, asked: Asked, kept: Sequence[Epoch]) -> Measurement | None:
    """The same training, or the latest that left what is kept, whatever it imported."""
    if not kept:
        return store.find(asked.cell, 0)
    stored = store.measurements(str(asked.workload))
    alike = (m for m in reversed(stored) if m.repeat == 0 and m.kept_as == asked.kept_as)
    return next(alike, None)


def _train(request: Request, asked: Asked, kept: Sequence[Epoch], store: Store) -> int:
    """Train what is left, and say what came of it."""
    with stop_on_signals() as stop:
        with screen(sys.stderr, plain=request.plain) as shown:
            lines = EpochLines(shown, asked.total, len(kept))
            if kept:
                shown.say(f"resuming after epoch {len(kept)}")
            steps = StepLines(shown, request.log_every)
            options = _options(request, asked, (steps, lines), stop)
            measurement = run(asked.workload, asked.plan, machine=asked.machine, options=options)
            steps.finished(measurement.ranks)
            lines.finished(epochs(measurement))
        store.append(measurement)
        _remove_older(asked)
        _show(request, asked, measurement)
    return 128 + stop.signum if stop.signum is not None else _judge(request, asked, measurement)


def _options(
    request: Request, asked: Asked, told: tuple[StepLines, EpochLines], stop: Stop
) -> Options:
    def watch(progress: Progress) -> None:
        for lines in told:
            lines.progress(progress)

    def started(folder: Path) -> None:
        for lines in told:
            lines.started(folder)

    return request.options(
        stop=stop,
        watch=watch,
        started=started,
        checkpoint=asked.folder,
        checkpoint_every=asked.every,
    )


def _remove_older(asked: Asked) -> None:
    """Attempts before this one go as soon as this one has a checkpoint."""
    if asked.folder is None or asked.newest is None:
        return
    begun = attempts(asked.folder.parent)
    for older in begun[: begun.index(asked.folder)]:
        shutil.rmtree(older, ignore_errors=True)


def _show(request: Request, asked: Asked, measurement: Measurement) -> None:
    """The summary, or one JSON object; how to go on, where it was stopped."""
    if request.as_json:
        output.print_json(document(asked, measurement))
    elif measurement.status == "ok":
        for line in summary(asked, measurement):
            output.say(line)
        for doubt in measurement.warnings:
            _note(f"doubt: {doubt.text}")
    if measurement.status == "interrupted":
        _note(f"stopped; {_next(request, asked)}")


def _judge(request: Request, asked: Asked, measurement: Measurement) -> int:
    if measurement.status == "ok":
        return 0
    cause = measurement.cause
    text = f"{measurement.status}: {cause.text if cause else 'it ended without a word'}"
    if measurement.folder is not None:
        rank = cause.rank if cause else None
        log = "agent.log" if rank is None else f"rank-{rank}.log"
        text += f"\n  log: {shown_path(request.results / measurement.folder / log)}"
    if measurement.status == "killed":
        text += f"\n  {_next(request, asked)}"
    raise RunFailure(text)


def _next(request: Request, asked: Asked) -> str:
    """How to go on after an interruption."""
    kept, without = len(asked.kept()), " without --again" if request.again else ""
    if not kept:
        return "no epoch was kept; next: run the same command again"
    return (
        f"kept after epoch {kept}/{asked.total} in {shown_path(Path(str(asked.newest)))}; "
        f"next: run the same command again{without}, it goes on from there"
    )


def summary(asked: Asked, measurement: Measurement) -> list[str]:
    """Accuracy, seconds of training, samples per second over all epochs; where it is kept."""
    done = epochs(measurement)
    seconds = math.fsum(epoch.seconds for epoch in done)
    rate = sum(epoch.samples for epoch in done) / seconds
    accuracy = done[-1].accuracy
    head = "" if accuracy is None else f"accuracy {accuracy:.4f}, "
    passes = f"{len(done)} epoch{'s' * (len(done) != 1)}"
    lines = [f"{head}{passes} in {seconds:.1f} s of training, {rate:,.0f} samples/s"]
    if asked.newest is not None:
        lines.append(f"checkpoint: {shown_path(asked.newest)}")
    return lines


def document(asked: Asked, measurement: Measurement) -> dict[str, object]:
    """The object that ``--json`` prints."""
    return {
        "schema": SCHEMA,
        "workload": str(asked.workload),
        "plan": asked.plan.to_dict(),
        "status": measurement.status,
        "cause": measurement.cause.text if measurement.cause else None,
        "epochs": [
            {"seconds": e.seconds, "train_loss": e.train_loss, "accuracy": e.accuracy}
            for e in epochs(measurement)
        ],
        "checkpoint": None if asked.newest is None else str(asked.newest),
    }


def _note(text: str) -> None:
    sys.stderr.write(f"nfold: {inert(text)}\n")
