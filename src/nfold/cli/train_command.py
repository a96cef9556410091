"""What ``nfold train`` does once its options are read."""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from nfold import workloads
from nfold.analysis.cells import epochs
from nfold.bench.grid import parse_axes
from nfold.cli import render
from nfold.cli.options import PlanOptions
from nfold.cli.plan_completion import build_plan_completer, prepare_data
from nfold.cli.progress import EpochProgress, StepProgress
from nfold.cli.signals import stop_on_signals
from nfold.cli.terminal import open_screen
from nfold.core.errors import RunFailure, UsageError
from nfold.core.format import terminal_safe
from nfold.core.machine import Machine
from nfold.core.measurement import Epoch, Measurement, cell_id
from nfold.core.plan import Plan
from nfold.core.serialization import JSON_SCHEMA_VERSION
from nfold.core.source_location import display_path
from nfold.core.workload import Workload
from nfold.engines.base import get_framework
from nfold.engines.checkpoint_folder import (
    CheckpointMetadata,
    list_attempts,
    lock_folder,
    newest_checkpoint,
    read_metadata,
    select_attempt,
)
from nfold.launch import workload_run
from nfold.launch.launch_spec import RunOptions, RunProgress, StopRequest
from nfold.launch.workload_run import run
from nfold.store.store import Store
from nfold.telemetry.machine_inspection import inspect_machine

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
        on_progress=watch,
        on_start=started,
        checkpoint_folder=train_request.checkpoint_folder,
        checkpoint_every=train_request.checkpoint_every,
    )


def _remove_older(train_request: TrainRequest) -> None:
    if train_request.checkpoint_folder is None or train_request.newest_checkpoint is None:
        return
    begun = list_attempts(train_request.checkpoint_folder.parent)
    for older in begun[: begun.index(train_request.checkpoint_folder)]:
        shutil.rmtree(older, ignore_errors=True)


def _show(request: TrainOptions, train_request: TrainRequest, measurement: Measurement) -> None:
    if request.as_json:
        render.print_json(train_document(train_request, measurement))
    elif measurement.status == "ok":
        for line in summary_lines(train_request, measurement):
            render.print_line(line)
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
    kept, without = (
        len(train_request.checkpoint_epochs()),
        " without --again" if request.again else "",
    )
    if not kept:
        return "no epoch was kept; next: run the same command again"
    return (
        f"kept after epoch {kept}/{train_request.total_epochs} in "
        f"{display_path(Path(str(train_request.newest_checkpoint)))}; "
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


PLAN_FILE = Path("nfold.toml")
CHECKPOINTS_FOLDER = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class TrainOptions(PlanOptions):
    """The options of ``nfold train`` as they were given, by the names of its parameters."""

    workload: str
    epochs: int | None
    checkpoint: Path | None
    checkpoint_every: int
    log_every: int


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What is to be trained on this machine, by its complete plan, and where it is kept.

    ``folder`` is that of this attempt, None where nothing is kept.
    """

    workload: Workload
    plan: Plan
    machine: Machine
    checkpoint_folder: Path | None
    checkpoint_every: int

    @property
    def cell(self) -> str:
        """What the store knows this training by."""
        return cell_id(self.workload, self.plan, None, self.machine)

    @property
    def checkpoint_id(self) -> str:
        """What its checkpoints know it by, whatever it imports."""
        return cell_id(self.workload.for_checkpoints, self.plan, None, self.machine)

    @property
    def total_epochs(self) -> int:
        """Epochs in all."""
        return self.plan.epochs or 0

    @property
    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint of this attempt."""
        return None if self.checkpoint_folder is None else newest_checkpoint(self.checkpoint_folder)

    def checkpoint_epochs(self) -> tuple[Epoch, ...]:
        """The epochs until the newest checkpoint; UsageError where it is of another training."""
        found = self.newest_checkpoint
        if found is None:
            return ()
        trained = read_metadata(found)
        if trained.cell != self.checkpoint_id:
            raise UsageError(
                f"{found} is of another training: {_difference(trained, self)}; "
                "next: --again, or another --checkpoint folder"
            )
        return trained.epochs


def merge_plan(request: TrainOptions, workload: Workload, file: Path = PLAN_FILE) -> Plan:
    """The plan that ``file`` and the flags ask for; flags win, and its length is in epochs."""
    axes = parse_axes(str(workload), request.axis_fields, common=Plan(device=request.device))
    changes = request.plan_changes(axes, "train")
    told = _plan_in(file)
    epochs = told.epochs if request.epochs is None else request.epochs
    return told.edit(**changes).edit(steps=None, epochs=epochs)


def _plan_in(file: Path) -> Plan:
    try:
        return Plan.from_toml(file.read_text()) if file.exists() else Plan()
    except (UsageError, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None


def build_request(request: TrainOptions) -> TrainRequest:
    """What was asked for, refused where it cannot be."""
    if workload_run.in_external_job():
        raise UsageError("nfold train starts its own ranks; next: unset RANK and WORLD_SIZE")
    workload = workloads.with_fingerprint(Workload.parse(request.workload))
    workloads.parameters(workload)
    if workloads.info(workload.name).defaults.epochs is None:
        raise UsageError(
            f"workload {workload.name!r} has no epochs, there is nothing to train; "
            f"next: nfold bench {workload.name}"
        )
    machine = inspect_machine()
    plan = build_plan_completer(machine, request.data)(workload, merge_plan(request, workload))
    chosen = get_framework(plan.framework)
    reason = chosen.unsupported_reason(workload, plan, machine)
    if chosen.runs_in_parent:
        reason = f'framework {plan.framework!r} trains nothing; next: framework = "torch"'
    if reason is not None:
        raise UsageError(reason)
    asked = TrainRequest(
        workload=workload, plan=plan, machine=machine, checkpoint_folder=None, checkpoint_every=1
    )
    if not chosen.supports_checkpoints:
        _check_checkpoint_support(request, plan)
        return asked
    return _with_folder(request, asked)


def _check_checkpoint_support(request: TrainOptions, plan: Plan) -> None:
    if request.checkpoint is not None:
        raise UsageError(
            f"--checkpoint {request.checkpoint}: framework {plan.framework!r} keeps no "
            "checkpoints; next: leave it out, or --framework torch"
        )


def _with_folder(request: TrainOptions, train_request: TrainRequest) -> TrainRequest:
    if not request.checkpoint_every:
        return train_request
    home = request.checkpoint or request.results / CHECKPOINTS_FOLDER / train_request.checkpoint_id
    folder = select_attempt(home, restart=request.again)
    return dataclasses.replace(
        train_request, checkpoint_folder=folder, checkpoint_every=request.checkpoint_every
    )


def _difference(trained: CheckpointMetadata, train_request: TrainRequest) -> str:
    plan = Plan.from_dict(trained.plan).diff(train_request.plan)
    parts = [f"{name} {theirs}, not {own}" for name, (theirs, own) in plan.items()]
    if trained.workload != str(train_request.workload):
        parts.insert(0, f"{trained.workload}, not {train_request.workload}")
    other = "another machine, or other code" if train_request.workload.code else "another machine"
    return ", ".join(parts) or other
