"""``nfold explain`` of a script: which of the command line is whose, and what its devices are."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from nfold.bench.axes import read_axes
from nfold.cli.flags import Flags
from nfold.errors import UnknownValue, UsageError
from nfold.explain.experiment import Experiment
from nfold.explain.ladder import Ladder, Scaling
from nfold.explain.script import first_look
from nfold.frameworks.scratch import left_over
from nfold.machine import Machine
from nfold.measurement import Measurement
from nfold.place import shown_path
from nfold.plan import Defaults, Plan
from nfold.run.handoff import Folder
from nfold.run.run import FOLDER
from nfold.seen import Seen
from nfold.sources import module_file
from nfold.workload import MODULE, Workload

COUNT = (
    "--devices, --device, --scaling, --budget, --again, --results, --telemetry-interval, "
    "--hang-timeout, --json, --plain, --no-report"
)
"""The options that a script leaves to nfold."""
LAUNCHER = re.compile(
    r"python[\d.]*|torchrun|accelerate|deepspeed|lightning|fabric|mpirun|mpiexec|srun|uv|poetry"
)
"""Commands that people start their scripts with."""
SHELL = (
    "a shell script; allowed is the Python script that it starts; next: nfold explain train.py "
    "--devices N, what is the script's own behind --"
)
NOTEBOOK = (
    "a notebook; allowed is a Python script; next: jupyter nbconvert --to script, and explain that"
)
OTHERS = dict.fromkeys((".sh", ".bash", ".sbatch", ".slurm"), SHELL) | {".ipynb": NOTEBOOK}
"""What else people train with, by how its name ends."""
DOTTED = re.compile(r"\w+(?:\.\w+)+")
SCALINGS: tuple[Scaling, ...] = ("weak", "strong")


def is_script(target: str) -> bool:
    """Whether a target is the path of a script, there or not, and no workload's name."""
    return target.endswith(".py") or os.sep in target or os.path.isfile(target)


def check_target(target: str, arguments: Sequence[str], *, module: bool) -> None:
    """UsageError for a command that starts a script, and for a module without its ``-m``."""
    if LAUNCHER.fullmatch(os.path.basename(target)):
        given = dropwhile(lambda one: not (module or is_script(one)), arguments)
        script, *own = [*given] or ["train.py"]
        named = [MODULE, script] if module else [script]
        command = [*named, "--devices", "N", *(["--"] if own else ())]
        raise UsageError(
            f"{target} starts a script, which nfold explain does itself, a process a device; "
            f"allowed is the script; next: nfold explain {shlex.join([*command, *own])}"
        )
    dotted = not module and DOTTED.fullmatch(target)
    if dotted and module_file(target, os.getcwd()) is not None:
        raise UsageError(
            f"{target} is a module; allowed is {MODULE} before its name; next: nfold explain "
            f"{shlex.join([MODULE, target, *arguments])}"
        )


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script with its arguments, on the devices of ``place``."""

    workload: Workload
    place: Plan
    scaling: Scaling | None
    machine: Machine
    flags: Flags

    def ladder(self, experiment: Experiment) -> Ladder:
        """Run it once, for a first look."""
        return first_look(experiment, self.place, self.scaling, self.machine, self._seen)

    def _seen(self, measurement: Measurement) -> tuple[Seen, ...]:
        folder = self.flags.results / (measurement.folder or FOLDER)
        return Folder(folder).read_seen()


def script_of(
    target: str,
    arguments: Sequence[str],
    scaling: str | None,
    flags: Flags,
    machine: Machine,
    *,
    module: bool = False,
) -> Script:
    """What was asked for, a path or a module's name; UsageError where it cannot be."""
    workload = _module(target, arguments) if module else _script(target, arguments)
    _check_flags(flags, f"{MODULE} {target}" if module else target)
    known = next((one for one in SCALINGS if one == scaling), None)
    if scaling is not None and known is None:
        raise UnknownValue("scaling", scaling, SCALINGS)
    return Script(
        workload=workload,
        place=_place(flags, machine),
        scaling=known,
        machine=machine,
        flags=flags,
    )


def undo_left_over(flags: Flags) -> list[str]:
    """What runs that were killed with their nfold had written, undone; a line for each."""
    found = [touched for touched in left_over(flags.results / FOLDER) if touched.files]
    lines = [f"an earlier run that was killed {touched}" for touched in found]
    return lines + [text for touched in found for text in touched.failed]


def _script(target: str, arguments: Sequence[str]) -> Workload:
    if os.path.isdir(target):
        inside = os.path.join(target, "*.py")
        raise UsageError(f"{target} is a folder; allowed is a Python script; next: {inside}")
    workload = Workload.of_script(target, *arguments)
    _check_python(target, target)
    return workload


def _module(target: str, arguments: Sequence[str]) -> Workload:
    if is_script(target):
        raise UsageError(
            f"{MODULE} {target}: that is a file; allowed is a module's name, as python -m has it; "
            f"next: nfold explain {target}; what is the script's own goes behind --"
        )
    workload = Workload.of_module(target, *arguments)
    file = module_file(target, os.getcwd())
    assert file is not None
    _check_python(file, f"{MODULE} {target}")
    return workload


def _check_python(file: str, target: str) -> None:
    """UsageError where Python could not compile the file, or it is for something else."""
    other = OTHERS.get(os.path.splitext(file)[1])
    if other is not None:
        raise UsageError(f"{target} is {other}")
    with open(file, "rb") as source:
        content = source.read()
    try:
        compile(content, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(
            f"{shown_path(file)}{line} is not Python ({error.args[0]}); allowed is a Python "
            f"script; next: python {target}"
        ) from None


def _check_flags(flags: Flags, target: str) -> None:
    """A script decides itself how it trains; NFOLD_DATA, which is a flag too, it may read."""
    fields = {name: f" {value}" for name, value in flags.fields.items() if value is not None}
    said = {**fields, **({"skip_bad": ""} if flags.skip_bad else {})}
    said.pop("devices", None)
    if not said:
        return
    options = {f"--{name.replace('_', '-')}": value for name, value in said.items()}
    names = ", ".join(options)
    own = " ".join(f"{name}{value}" for name, value in options.items())
    raise UsageError(
        f"{names} with a script: {target} decides that itself; allowed are {COUNT}; next: what is "
        f"the script's own goes behind --, as in nfold explain {target} -- {own}"
    )


def _place(flags: Flags, machine: Machine) -> Plan:
    """The devices, and which kind."""
    axes = read_axes("script", flags.fields, common=Plan(device=flags.device))
    changes: dict[str, Any] = flags.changes(axes, "explain")
    asked = Plan().edit(**changes).edit(steps=1)
    plan = asked.resolve(machine, Defaults(batch=1, epochs=None))
    check_devices(flags, plan)
    return Plan(
        device=plan.device, devices=plan.devices, cores_per_device=plan.cores_per_device, steps=1
    )


def check_devices(flags: Flags, plan: Plan) -> None:
    """UsageError where nobody said how many and the machine does not either: CPUs are no GPUs."""
    if plan.device != "cuda" and flags.fields.get("devices") is None:
        raise UsageError(
            "no --devices, and no GPU here whose number it would be: allowed are cpu:1, cpu:2, "
            "...; next: --devices cpu:2"
        )
