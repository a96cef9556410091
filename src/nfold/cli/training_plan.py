"""What ``nfold train`` was asked for: a workload, its complete plan, and where it is kept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from nfold import workloads
from nfold.bench.axes import read_axes
from nfold.cli.flags import Flags
from nfold.cli.preparing import completing
from nfold.errors import UsageError
from nfold.frameworks.checkpoints import Trained, attempt_of, newest, read_trained
from nfold.frameworks.registry import framework
from nfold.machine import Machine
from nfold.measurement import Epoch, cell_id
from nfold.plan import Plan
from nfold.run import attach
from nfold.telemetry.inspection import inspect_machine
from nfold.workload import Workload

PLAN_FILE = Path("nfold.toml")
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Request(Flags):
    """The options of ``nfold train`` as they were given, by the names of its parameters."""

    workload: str
    epochs: int | None
    checkpoint: Path | None
    checkpoint_every: int
    log_every: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be trained on this machine, by its complete plan, and where it is kept.

    ``folder`` is that of this attempt, None where nothing is kept.
    """

    workload: Workload
    plan: Plan
    machine: Machine
    folder: Path | None
    every: int

    @property
    def cell(self) -> str:
        """What the store knows this training by."""
        return cell_id(self.workload, self.plan, None, self.machine)

    @property
    def kept_as(self) -> str:
        """What its checkpoints know it by, whatever it imports."""
        return cell_id(self.workload.kept_as, self.plan, None, self.machine)

    @property
    def total(self) -> int:
        """Epochs in all."""
        return self.plan.epochs or 0

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint of this attempt."""
        return None if self.folder is None else newest(self.folder)

    def kept(self) -> tuple[Epoch, ...]:
        """The epochs until the newest checkpoint; UsageError where it is of another training."""
        found = self.newest
        if found is None:
            return ()
        trained = read_trained(found)
        if trained.cell != self.kept_as:
            raise UsageError(
                f"{found} is of another training: {_difference(trained, self)}; "
                "next: --again, or another --checkpoint folder"
            )
        return trained.epochs


def plan_of(request: Request, workload: Workload, file: Path = PLAN_FILE) -> Plan:
    """The plan that ``file`` and the flags ask for; flags win, and its length is in epochs."""
    axes = read_axes(str(workload), request.fields, common=Plan(device=request.device))
    changes = request.changes(axes, "train")
    told = _plan_in(file)
    epochs = told.epochs if request.epochs is None else request.epochs
    return told.edit(**changes).edit(steps=None, epochs=epochs)


def _plan_in(file: Path) -> Plan:
    try:
        return Plan.from_toml(file.read_text()) if file.exists() else Plan()
    except (UsageError, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None


def asked_of(request: Request) -> Asked:
    """What was asked for, refused where it cannot be."""
    if attach.attached():
        raise UsageError("nfold train starts its own ranks; next: unset RANK and WORLD_SIZE")
    workload = workloads.identified(Workload.parse(request.workload))
    workloads.parameters(workload)
    if workloads.info(workload.name).defaults.epochs is None:
        raise UsageError(
            f"workload {workload.name!r} has no epochs, there is nothing to train; "
            f"next: nfold bench {workload.name}"
        )
    machine = inspect_machine()
    plan = completing(machine, request.data)(workload, plan_of(request, workload))
    chosen = framework(plan.framework)
    reason = chosen.unsupported(workload, plan, machine)
    if chosen.in_parent:
        reason = f'framework {plan.framework!r} trains nothing; next: framework = "torch"'
    if reason is not None:
        raise UsageError(reason)
    asked = Asked(workload=workload, plan=plan, machine=machine, folder=None, every=1)
    if not chosen.keeps:
        _check_not_kept(request, plan)
        return asked
    return _with_folder(request, asked)


def _check_not_kept(request: Request, plan: Plan) -> None:
    """UsageError where a training was asked to be kept that its framework cannot keep."""
    if request.checkpoint is not None:
        raise UsageError(
            f"--checkpoint {request.checkpoint}: framework {plan.framework!r} keeps no "
            "checkpoints; next: leave it out, or --framework torch"
        )


def _with_folder(request: Request, asked: Asked) -> Asked:
    if not request.checkpoint_every:
        return asked
    home = request.checkpoint or request.results / CHECKPOINTS / asked.kept_as
    folder = attempt_of(home, again=request.again)
    return dataclasses.replace(asked, folder=folder, every=request.checkpoint_every)


def _difference(trained: Trained, asked: Asked) -> str:
    """What a checkpoint was trained as, where it is not what was asked for."""
    plan = Plan.from_dict(trained.plan).diff(asked.plan)
    parts = [f"{name} {theirs}, not {own}" for name, (theirs, own) in plan.items()]
    if trained.workload != str(asked.workload):
        parts.insert(0, f"{trained.workload}, not {asked.workload}")
    other = "another machine, or other code" if asked.workload.code else "another machine"
    return ", ".join(parts) or other
