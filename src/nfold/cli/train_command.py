"""``nfold train``: train a workload to the end, with checkpoints."""

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
from nfold.core.format import pluralize
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
    skipped_checkpoints_warning,
)
from nfold.launch import workload_run
from nfold.launch.launch_spec import RunOptions, RunProgress, StopRequest
from nfold.launch.workload_run import run
from nfold.store.store import Store
from nfold.telemetry.machine_inspection import inspect_machine

CHANGED_ENVIRONMENT = ", with other imports or in another environment"
PLAN_FILE = Path("nfold.toml")
CHECKPOINTS_FOLDER = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class TrainOptions(PlanOptions):
    """The options of ``nfold train``, by the names of its parameters."""

    workload: str
    epochs: int | None
    checkpoint: Path | None
    checkpoint_every: int
    log_every: int


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """A training run on this machine: its complete plan, and the checkpoint folder of this attempt.

    Without a folder there are no checkpoints.
    """

    workload: Workload
    plan: Plan
    machine: Machine
    checkpoint_folder: Path | None
    checkpoint_every: int

    @property
    def cell(self) -> str:
        """The id in the store."""
        return cell_id(self.workload, self.plan, None, self.machine)

    @property
    def checkpoint_id(self) -> str:
        """The id in checkpoints, which does not depend on what the workload imports."""
        return cell_id(self.workload.for_checkpoints, self.plan, None, self.machine)

    @property
    def total_epochs(self) -> int:
        return self.plan.epochs or 0

    @property
    def newest_checkpoint(self) -> Path | None:
        return None if self.checkpoint_folder is None else newest_checkpoint(self.checkpoint_folder)

    def checkpoint_epochs(self) -> tuple[Epoch, ...]:
        """Return the epochs of the newest checkpoint; raises UsageError if it is not this run's."""
        found = self.newest_checkpoint
        if found is None:
            return ()
        metadata = read_metadata(found)
        if metadata.cell != self.checkpoint_id:
            raise UsageError(
                f"{found} belongs to another training run: {_difference(metadata, self)}; "
                "next: --again, or another --checkpoint folder"
            )
        return metadata.epochs


def run_train(options: TrainOptions) -> int:
    """Train, or show the stored result; return the exit code. Raises RunFailure if it fails."""
    request = build_request(options)
    folder = request.checkpoint_folder
    if folder is not None and (skipped := skipped_checkpoints_warning(folder)):
        render.print_note(f"warning: {skipped}")
    kept = request.checkpoint_epochs()
    with Store.open(options.results) as store:
        earlier = None if options.again else _stored(store, request, kept)
        changed = (
            CHANGED_ENVIRONMENT if earlier is not None and earlier.cell != request.cell else ""
        )
        complete = request.checkpoint_folder is None or len(kept) == request.total_epochs
        if earlier is not None and earlier.status == "ok" and complete:
            render.print_note(f"trained before{changed}; --again starts over")
            _show(options, request, earlier)
            return 0
        if changed:
            render.print_note(
                f"started{changed}; continues with the present ones, --again starts over"
            )
        prepare_data(request.workload, request.plan, options.data)
        with (
            nullcontext()
            if request.checkpoint_folder is None
            else lock_folder(request.checkpoint_folder.parent)
        ):
            return _train(options, request, kept, store)


def _stored(store: Store, request: TrainRequest, kept: Sequence[Epoch]) -> Measurement | None:
    if not kept:
        return store.find(request.cell, 0)
    same = (
        m
        for m in reversed(store.measurements(str(request.workload)))
        if m.repeat == 0 and m.checkpoint_id == request.checkpoint_id
    )
    return next(same, None)


def _train(
    options: TrainOptions, request: TrainRequest, kept: Sequence[Epoch], store: Store
) -> int:
    with stop_on_signals() as stop:
        with open_screen(sys.stderr, plain=options.plain) as screen:
            epoch_lines = EpochProgress(screen, request.total_epochs, len(kept))
            step_lines = StepProgress(screen, options.log_every)
            if kept:
                screen.print_line(f"resuming after epoch {len(kept)}")
            measurement = run(
                request.workload,
                request.plan,
                machine=request.machine,
                options=_run_options(options, request, (step_lines, epoch_lines), stop),
            )
            step_lines.finished(measurement.ranks)
            epoch_lines.finished(epochs(measurement))
        store.append(measurement)
        _remove_older_attempts(request)
        _show(options, request, measurement)
    if stop.signum is not None:
        return 128 + stop.signum
    if measurement.status != "ok":
        raise RunFailure(_describe_failure(options, request, measurement))
    return 0


def _run_options(
    options: TrainOptions,
    request: TrainRequest,
    printers: tuple[StepProgress, EpochProgress],
    stop: StopRequest,
) -> RunOptions:
    def watch(progress: RunProgress) -> None:
        for printer in printers:
            printer.progress(progress)

    def started(folder: Path) -> None:
        for printer in printers:
            printer.started(folder)

    return options.run_options(
        stop=stop,
        on_progress=watch,
        on_start=started,
        checkpoint_folder=request.checkpoint_folder,
        checkpoint_every=request.checkpoint_every,
    )


def _remove_older_attempts(request: TrainRequest) -> None:
    if request.newest_checkpoint is None or request.checkpoint_folder is None:
        return
    attempts = list_attempts(request.checkpoint_folder.parent)
    for older in attempts[: attempts.index(request.checkpoint_folder)]:
        shutil.rmtree(older, ignore_errors=True)


def _show(options: TrainOptions, request: TrainRequest, measurement: Measurement) -> None:
    if options.as_json:
        render.print_json(train_document(request, measurement))
    elif measurement.status == "ok":
        for line in summary_lines(request, measurement):
            render.print_line(line)
        for caveat in measurement.warnings:
            render.print_note(f"caveat: {caveat.text}")
    if measurement.status == "interrupted":
        render.print_note(f"stopped; {_next_step(options, request)}")


def _describe_failure(
    options: TrainOptions, request: TrainRequest, measurement: Measurement
) -> str:
    cause = measurement.cause
    text = f"{measurement.status}: {cause.text if cause else 'no error message'}"
    if measurement.folder is not None:
        log = "agent.log" if cause is None or cause.rank is None else f"rank-{cause.rank}.log"
        text += f"\n  log: {display_path(options.results / measurement.folder / log)}"
    if measurement.status == "killed":
        text += f"\n  {_next_step(options, request)}"
    return text


def _next_step(options: TrainOptions, request: TrainRequest) -> str:
    kept = len(request.checkpoint_epochs())
    if not kept:
        return "there is no checkpoint yet; next: the same command starts again"
    folder = display_path(Path(str(request.newest_checkpoint)))
    without = " without --again" if options.again else ""
    return (
        f"checkpoint after epoch {kept}/{request.total_epochs} in {folder}; "
        f"next: the same command{without} resumes there"
    )


def summary_lines(request: TrainRequest, measurement: Measurement) -> list[str]:
    """Return accuracy, epochs, training time and throughput; then the checkpoint."""
    done = epochs(measurement)
    seconds = math.fsum(epoch.seconds for epoch in done)
    rate = sum(epoch.samples for epoch in done) / seconds
    accuracy = "" if done[-1].accuracy is None else f"accuracy {done[-1].accuracy:.4f}, "
    lines = [
        f"{accuracy}{pluralize(len(done), 'epoch')} in {seconds:.1f} s of training, "
        f"{rate:,.0f} samples/s"
    ]
    if request.newest_checkpoint is not None:
        lines.append(f"checkpoint: {display_path(request.newest_checkpoint)}")
    return lines


def train_document(request: TrainRequest, measurement: Measurement) -> dict[str, object]:
    """Return the object that ``--json`` prints."""
    checkpoint = request.newest_checkpoint
    return {
        "schema": JSON_SCHEMA_VERSION,
        "workload": str(request.workload),
        "plan": request.plan.to_dict(),
        "status": measurement.status,
        "cause": measurement.cause.text if measurement.cause else None,
        "epochs": [
            {"seconds": e.seconds, "train_loss": e.train_loss, "accuracy": e.accuracy}
            for e in epochs(measurement)
        ],
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }


def merge_plan(options: TrainOptions, workload: Workload, file: Path = PLAN_FILE) -> Plan:
    """Return the plan of ``file`` and the options, which override it. The length is in epochs."""
    axes = parse_axes(str(workload), options.axis_fields, common=Plan(device=options.device))
    changes = options.plan_changes(axes, "train")
    try:
        stored = Plan.from_toml(file.read_text()) if file.exists() else Plan()
    except (UsageError, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None
    length = stored.epochs if options.epochs is None else options.epochs
    return stored.edit(**changes).edit(steps=None, epochs=length)


def build_request(options: TrainOptions) -> TrainRequest:
    """Return the training run; raises UsageError if it is not supported."""
    if workload_run.in_external_job():
        raise UsageError("nfold train starts its own ranks; next: unset RANK and WORLD_SIZE")
    workload = workloads.with_fingerprint(Workload.parse(options.workload))
    workloads.parameters(workload)
    if workloads.info(workload.name).defaults.epochs is None:
        raise UsageError(
            f"workload {workload.name!r} has no epochs and cannot be trained; "
            f"next: nfold bench {workload.name}"
        )
    machine = inspect_machine()
    plan = build_plan_completer(machine, options.data)(workload, merge_plan(options, workload))
    framework = get_framework(plan.framework)
    reason = framework.unsupported_reason(workload, plan, machine)
    if framework.runs_in_parent:
        reason = f'framework {plan.framework!r} cannot train; next: framework = "torch"'
    if reason is not None:
        raise UsageError(reason)
    request = TrainRequest(
        workload=workload, plan=plan, machine=machine, checkpoint_folder=None, checkpoint_every=1
    )
    if not framework.supports_checkpoints:
        if options.checkpoint is not None:
            raise UsageError(
                f"--checkpoint {options.checkpoint}: framework {plan.framework!r} has no "
                "checkpoints; next: remove the option, or --framework torch"
            )
        return request
    if not options.checkpoint_every:
        return request
    home = options.checkpoint or options.results / CHECKPOINTS_FOLDER / request.checkpoint_id
    return dataclasses.replace(
        request,
        checkpoint_folder=select_attempt(home, restart=options.again),
        checkpoint_every=options.checkpoint_every,
    )


def _difference(metadata: CheckpointMetadata, request: TrainRequest) -> str:
    differences = Plan.from_dict(metadata.plan).diff(request.plan)
    parts = [f"{name} {theirs}, not {own}" for name, (theirs, own) in differences.items()]
    if metadata.workload != str(request.workload):
        parts.insert(0, f"{metadata.workload}, not {request.workload}")
    other = "another machine, or other code" if request.workload.code else "another machine"
    return ", ".join(parts) or other
