"""What ``nfold train`` does once its options are read."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from nfold.cli import output
from nfold.cli.epochs import EpochProgress
from nfold.cli.preparing import prepare_data
from nfold.cli.screen import open_screen
from nfold.cli.signals import stop_on_signals
from nfold.cli.steps import StepProgress
from nfold.cli.training_plan import TrainOptions, TrainRequest, build_request
from nfold.errors import RunFailure
from nfold.frameworks.checkpoints import list_attempts, lock_folder
from nfold.inert import terminal_safe
from nfold.measurement import Epoch, Measurement
from nfold.place import display_path
from nfold.run.options import RunOptions, RunProgress, StopRequest
from nfold.run.run import run
from nfold.store.store import Store
from nfold.summary import JSON_SCHEMA_VERSION, epochs

CHANGED_ENVIRONMENT = ", with other imports or in another environment"


def run_train(request: TrainOptions) -> int:
    """Train, or show what was trained before; the exit code. Raises RunFailure where it fails."""
    asked = build_request(request)
    kept = asked.checkpoint_epochs()
    with Store.open(request.results) as store:
        before = None if request.again else _before(store, asked, kept)
        changed = CHANGED_ENVIRONMENT if before is not None and before.cell != asked.cell else ""
        complete = asked.checkpoint_folder is None or len(kept) == asked.total_epochs
        if before is not None and before.status == "ok" and complete:
            _note(f"trained before{changed}; --again starts over")
            _show(request, asked, before)
            return 0
        if changed:
            _note(f"begun{changed}; it goes on with those of now, --again starts over")
        prepare_data(asked.workload, asked.plan, request.data)
        with (
            nullcontext()
            if asked.checkpoint_folder is None
            else lock_folder(asked.checkpoint_folder.parent)
        ):
            return _train(request, asked, kept, store)


def _before(store: Store, train_request: TrainRequest, kept: Sequence[Epoch]) -> Measurement | None:
    """The same training, or the latest that left what is kept, whatever it imported."""
    if not kept:
        return store.find(train_request.cell, 0)
    stored = store.measurements(str(train_request.workload))
    alike = (
        m
        for m in reversed(stored)
        if m.repeat == 0 and m.checkpoint_id == train_request.checkpoint_id
    )
    return next(alike, None)


def _train(
    request: TrainOptions, train_request: TrainRequest, kept: Sequence[Epoch], store: Store
) -> int:
    """Train what is left, and say what came of it."""
    with stop_on_signals() as stop:
        with open_screen(sys.stderr, plain=request.plain) as shown:
            lines = EpochProgress(shown, train_request.total_epochs, len(kept))
            if kept:
                shown.print_line(f"resuming after epoch {len(kept)}")
            steps = StepProgress(shown, request.log_every)
            options = _options(request, train_request, (steps, lines), stop)
            measurement = run(
                train_request.workload,
                train_request.plan,
                machine=train_request.machine,
                options=options,
            )
            steps.finished(measurement.ranks)
            lines.finished(epochs(measurement))
        store.append(measurement)
        _remove_older(train_request)
        _show(request, train_request, measurement)
    return (
        128 + stop.signum
        if stop.signum is not None
        else _judge(request, train_request, measurement)
    )


def _options(
    request: TrainOptions,
    train_request: TrainRequest,
    epoch_printers: tuple[StepProgress, EpochProgress],
    stop: StopRequest,
) -> RunOptions:
    def watch(progress: RunProgress) -> None:
        for lines in epoch_printers:
            lines.progress(progress)

    def started(folder: Path) -> None:
        for lines in epoch_printers:
            lines.started(folder)

    return request.run_options(
        stop=stop,
        watch=watch,
        started=started,
        checkpoint=train_request.checkpoint_folder,
        checkpoint_every=train_request.checkpoint_every,
    )


def _remove_older(train_request: TrainRequest) -> None:
    """Attempts before this one go as soon as this one has a checkpoint."""
    if train_request.checkpoint_folder is None or train_request.newest_checkpoint is None:
        return
    begun = list_attempts(train_request.checkpoint_folder.parent)
    for older in begun[: begun.index(train_request.checkpoint_folder)]:
        shutil.rmtree(older, ignore_errors=True)


def _show(request: TrainOptions, train_request: TrainRequest, measurement: Measurement) -> None:
    """The summary, or one JSON object; how to go on, where it was stopped."""
    if request.as_json:
        output.print_json(train_document(train_request, measurement))
    elif measurement.status == "ok":
        for line in summary_lines(train_request, measurement):
            output.print_line(line)
        for doubt in measurement.warnings:
            _note(f"doubt: {doubt.text}")
    if measurement.status == "interrupted":
        _note(f"stopped; {_next(request, train_request)}")


def _judge(request: TrainOptions, train_request: TrainRequest, measurement: Measurement) -> int:
    if measurement.status == "ok":
        return 0
    cause = measurement.cause
    text = f"{measurement.status}: {cause.text if cause else 'it ended without a word'}"
    if measurement.folder is not None:
        rank = cause.rank if cause else None
        log = "agent.log" if rank is None else f"rank-{rank}.log"
        text += f"\n  log: {display_path(request.results / measurement.folder / log)}"
    if measurement.status == "killed":
        text += f"\n  {_next(request, train_request)}"
    raise RunFailure(text)


def _next(request: TrainOptions, train_request: TrainRequest) -> str:
    """How to go on after an interruption."""
    kept, without = (
        len(train_request.checkpoint_epochs()),
        " without --again" if request.again else "",
    )
    if not kept:
        return "no epoch was kept; next: run the same command again"
    return (
        f"kept after epoch {kept}/{train_request.total_epochs} in {display_path(Path(str(train_request.newest_checkpoint)))}; "
        f"next: run the same command again{without}, it goes on from there"
    )


def summary_lines(train_request: TrainRequest, measurement: Measurement) -> list[str]:
    """Accuracy, seconds of training, samples per second over all epochs; where it is kept."""
    done = epochs(measurement)
    seconds = math.fsum(epoch.seconds for epoch in done)
    rate = sum(epoch.samples for epoch in done) / seconds
    accuracy = done[-1].accuracy
    head = "" if accuracy is None else f"accuracy {accuracy:.4f}, "
    passes = f"{len(done)} epoch{'s' * (len(done) != 1)}"
    lines = [f"{head}{passes} in {seconds:.1f} s of training, {rate:,.0f} samples/s"]
    if train_request.newest_checkpoint is not None:
        lines.append(f"checkpoint: {display_path(train_request.newest_checkpoint)}")
    return lines


def train_document(train_request: TrainRequest, measurement: Measurement) -> dict[str, object]:
    """The object that ``--json`` prints."""
    return {
        "schema": JSON_SCHEMA_VERSION,
        "workload": str(train_request.workload),
        "plan": train_request.plan.to_dict(),
        "status": measurement.status,
        "cause": measurement.cause.text if measurement.cause else None,
        "epochs": [
            {"seconds": e.seconds, "train_loss": e.train_loss, "accuracy": e.accuracy}
            for e in epochs(measurement)
        ],
        "checkpoint": None
        if train_request.newest_checkpoint is None
        else str(train_request.newest_checkpoint),
    }


def _note(text: str) -> None:
    sys.stderr.write(f"nfold: {terminal_safe(text)}\n")
