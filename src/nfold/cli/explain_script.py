"""``nfold explain`` of a script: which of the command line is whose, and what its devices are."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from nfold.bench.axes import parse_axes
from nfold.cli.flags import PlanOptions
from nfold.errors import UnknownValue, UsageError
from nfold.explain.experiment import Experiment
from nfold.explain.ladder import ExperimentDesign, Scaling
from nfold.explain.script import probe_script
from nfold.frameworks.scratch import clean_up_stale
from nfold.machine import Machine
from nfold.measurement import Measurement
from nfold.place import display_path
from nfold.plan import Plan, WorkloadDefaults
from nfold.run.handoff import HandoffFolder
from nfold.run.run import MEASUREMENTS_FOLDER
from nfold.seen import ScriptProfile
from nfold.sources import module_file
from nfold.workload import MODULE_FLAG, Workload

SCRIPT_OPTIONS = (
    "--devices, --device, --scaling, --budget, --again, --results, --telemetry-interval, "
    "--hang-timeout, --json, --plain, --no-report"
)
"""The options that a script leaves to nfold."""
LAUNCHER_COMMAND = re.compile(
    r"python[\d.]*|torchrun|accelerate|deepspeed|lightning|fabric|mpirun|mpiexec|srun|uv|poetry"
)
"""Commands that people start their scripts with."""
SHELL_SCRIPT_HINT = (
    "a shell script; allowed is the Python script that it starts; next: nfold explain train.py "
    "--devices N, what is the script's own behind --"
)
NOTEBOOK_HINT = (
    "a notebook; allowed is a Python script; next: jupyter nbconvert --to script, and explain that"
)
UNSUPPORTED_SUFFIXES = dict.fromkeys((".sh", ".bash", ".sbatch", ".slurm"), SHELL_SCRIPT_HINT) | {
    ".ipynb": NOTEBOOK_HINT
}
"""What else people train with, by how its name ends."""
DOTTED_NAME = re.compile(r"\w+(?:\.\w+)+")
SCRIPT_SCALINGS: tuple[Scaling, ...] = ("weak", "strong")


def is_script(target: str) -> bool:
    """Whether a target is the path of a script, there or not, and no workload's name."""
    return target.endswith(".py") or os.sep in target or os.path.isfile(target)


def check_script_target(target: str, arguments: Sequence[str], *, module: bool) -> None:
    """UsageError for a command that starts a script, and for a module without its ``-m``."""
    if LAUNCHER_COMMAND.fullmatch(os.path.basename(target)):
        given = dropwhile(lambda one: not (module or is_script(one)), arguments)
        script, *own = [*given] or ["train.py"]
        named = [MODULE_FLAG, script] if module else [script]
        command = [*named, "--devices", "N", *(["--"] if own else ())]
        raise UsageError(
            f"{target} starts a script, which nfold explain does itself, a process a device; "
            f"allowed is the script; next: nfold explain {shlex.join([*command, *own])}"
        )
    dotted = not module and DOTTED_NAME.fullmatch(target)
    if dotted and module_file(target, os.getcwd()) is not None:
        raise UsageError(
            f"{target} is a module; allowed is {MODULE_FLAG} before its name; next: nfold explain "
            f"{shlex.join([MODULE_FLAG, target, *arguments])}"
        )


@dataclass(frozen=True, kw_only=True)
class ScriptSubject:
    """A script with its arguments, on the devices of ``place``."""

    workload: Workload
    placement: Plan
    scaling: Scaling | None
    machine: Machine
    flags: PlanOptions

    def design(self, experiment: Experiment) -> ExperimentDesign:
        """Run it once, for a first look."""
        return probe_script(experiment, self.placement, self.scaling, self.machine, self._profiles)

    def _profiles(self, measurement: Measurement) -> tuple[ScriptProfile, ...]:
        folder = self.flags.results / (measurement.folder or MEASUREMENTS_FOLDER)
        return HandoffFolder(folder).read_profiles()


def build_script_subject(
    target: str,
    arguments: Sequence[str],
    scaling: str | None,
    flags: PlanOptions,
    machine: Machine,
    *,
    module: bool = False,
) -> ScriptSubject:
    """What was asked for, a path or a module's name; UsageError where it cannot be."""
    workload = _module(target, arguments) if module else _script(target, arguments)
    _check_flags(flags, f"{MODULE_FLAG} {target}" if module else target)
    known = next((one for one in SCRIPT_SCALINGS if one == scaling), None)
    if scaling is not None and known is None:
        raise UnknownValue("scaling", scaling, SCRIPT_SCALINGS)
    return ScriptSubject(
        workload=workload,
        placement=_place(flags, machine),
        scaling=known,
        machine=machine,
        flags=flags,
    )


def undo_interrupted_runs(flags: PlanOptions) -> list[str]:
    """What runs that were killed with their nfold had written, undone; a line for each."""
    found = [
        touched for touched in clean_up_stale(flags.results / MEASUREMENTS_FOLDER) if touched.files
    ]
    lines = [f"an earlier run that was killed {touched}" for touched in found]
    return lines + [text for touched in found for text in touched.restore_errors]


def _script(target: str, arguments: Sequence[str]) -> Workload:
    if os.path.isdir(target):
        inside = os.path.join(target, "*.py")
        raise UsageError(f"{target} is a folder; allowed is a Python script; next: {inside}")
    workload = Workload.from_script(target, *arguments)
    _check_python(target, target)
    return workload


def _module(target: str, arguments: Sequence[str]) -> Workload:
    if is_script(target):
        raise UsageError(
            f"{MODULE_FLAG} {target}: that is a file; allowed is a module's name, as python -m has it; "
            f"next: nfold explain {target}; what is the script's own goes behind --"
        )
    workload = Workload.from_module(target, *arguments)
    file = module_file(target, os.getcwd())
    assert file is not None
    _check_python(file, f"{MODULE_FLAG} {target}")
    return workload


def _check_python(file: str, target: str) -> None:
    """UsageError where Python could not compile the file, or it is for something else."""
    other = UNSUPPORTED_SUFFIXES.get(os.path.splitext(file)[1])
    if other is not None:
        raise UsageError(f"{target} is {other}")
    with open(file, "rb") as source:
        content = source.read()
    try:
        compile(content, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(
            f"{display_path(file)}{line} is not Python ({error.args[0]}); allowed is a Python "
            f"script; next: python {target}"
        ) from None


def _check_flags(flags: PlanOptions, target: str) -> None:
    """A script decides itself how it trains; NFOLD_DATA, which is a flag too, it may read."""
    fields = {name: f" {value}" for name, value in flags.axis_fields.items() if value is not None}
    said = {**fields, **({"skip_bad": ""} if flags.skip_bad else {})}
    said.pop("devices", None)
    if not said:
        return
    options = {f"--{name.replace('_', '-')}": value for name, value in said.items()}
    names = ", ".join(options)
    own = " ".join(f"{name}{value}" for name, value in options.items())
    raise UsageError(
        f"{names} with a script: {target} decides that itself; allowed are {SCRIPT_OPTIONS}; next: what is "
        f"the script's own goes behind --, as in nfold explain {target} -- {own}"
    )


def _place(flags: PlanOptions, machine: Machine) -> Plan:
    """The devices, and which kind."""
    axes = parse_axes("script", flags.axis_fields, common=Plan(device=flags.device))
    changes: dict[str, Any] = flags.plan_changes(axes, "explain")
    asked = Plan().edit(**changes).edit(steps=1)
    plan = asked.resolve(machine, WorkloadDefaults(batch=1, epochs=None))
    check_devices(flags, plan)
    return Plan(
        device=plan.device, devices=plan.devices, cores_per_device=plan.cores_per_device, steps=1
    )


def check_devices(flags: PlanOptions, plan: Plan) -> None:
    """UsageError where nobody said how many and the machine does not either: CPUs are no GPUs."""
    if plan.device != "cuda" and flags.axis_fields.get("devices") is None:
        raise UsageError(
            "no --devices, and no GPU here whose number it would be: allowed are cpu:1, cpu:2, "
            "...; next: --devices cpu:2"
        )
