"""What ``nfold train`` was asked for: a workload, its complete plan, and where it is kept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from nfold import workloads
from nfold.bench.axes import parse_axes
from nfold.cli.flags import PlanOptions
from nfold.cli.preparing import build_plan_completer
from nfold.errors import UsageError
from nfold.frameworks.checkpoints import (
    CheckpointMetadata,
    newest_checkpoint,
    read_metadata,
    select_attempt,
)
from nfold.frameworks.registry import get_framework
from nfold.machine import Machine
from nfold.measurement import Epoch, cell_id
from nfold.plan import Plan
from nfold.run import attach
from nfold.telemetry.inspection import inspect_machine
from nfold.workload import Workload

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
    if attach.in_external_job():
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
    """UsageError where a training was asked to be kept that its framework cannot keep."""
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
    """What a checkpoint was trained as, where it is not what was asked for."""
    plan = Plan.from_dict(trained.plan).diff(train_request.plan)
    parts = [f"{name} {theirs}, not {own}" for name, (theirs, own) in plan.items()]
    if trained.workload != str(train_request.workload):
        parts.insert(0, f"{trained.workload}, not {train_request.workload}")
    other = "another machine, or other code" if train_request.workload.code else "another machine"
    return ", ".join(parts) or other
