"""``nfold run --with``: applies remedies in every process of a script. Imports no torch.

The hooks are installed when the script imports torch. Each process writes which remedies it has
applied; the parent reads what none of the processes of a rank has applied.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from nfold.core.import_hooks import call_after_import
from nfold.core.serialization import deserialize, replace_file
from nfold.core.variant import RunRemedies
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.start_cores import StartCores
from nfold.interventions.registry import REGISTRY

if TYPE_CHECKING:
    from nfold.instrument.hooks.remedy_hooks import RemedyHooks

REMEDIES_VARIABLE = "NFOLD_REMEDIES"  # RunRemedies as JSON
REPORT_FILES = "remedies-{rank}-{pid}.json"
TARGET = "_target"  # of a process of multiprocessing
LOADER_PACKAGE = "torch.utils.data"  # its processes prepare batches
NEEDED_BY_LOADER_FIELDS = "DataLoader of the training"


class RemediedProcess:
    """Applies remedies in this process and in the processes that it starts."""

    installed: ClassVar[RemediedProcess | None] = None

    def __init__(self, remedies: str, folder: Path, rank: int) -> None:
        """``remedies``: RunRemedies as JSON. ``folder``: for the report of each process."""
        self._remedies = remedies
        self._folder = folder
        self._rank = rank
        self.hooks: RemedyHooks | None = None

    def install(self) -> None:
        """Install the hooks, now or when torch is imported. A forked process has them already."""
        if RemediedProcess.installed is None:
            RemediedProcess.installed = self
            StartCores.record()
            Patches().wrap(BaseProcess, "start", self._start_child)
            call_after_import({"torch": self._install_hooks})

    def write_report(self) -> None:
        """Write the remedies that were applied; None if the process did not import torch."""
        process = RemediedProcess.installed
        hooks = None if process is None else process.hooks
        file = self._folder / REPORT_FILES.format(rank=self._rank, pid=os.getpid())
        with replace_file(file) as temporary:
            temporary.write_text(json.dumps(None if hooks is None else hooks.applied()))

    def _install_hooks(self, _torch: ModuleType) -> None:
        from nfold.instrument.hooks.remedy_hooks import RemedyHooks

        self.hooks = RemedyHooks(deserialize(RunRemedies, json.loads(self._remedies)))
        self.hooks.install(Patches())

    def _start_child(self, original: Any, process: Any) -> None:
        target = vars(process).get(TARGET)
        if target is not None and not _prepares_batches(target):
            child = ChildTarget(target, self._remedies, str(self._folder), self._rank)
            vars(process)[TARGET] = child
        original(process)


@dataclass
class ChildTarget:
    """The target of a child process, with the remedies before it and the report after it."""

    target: Callable[..., Any]
    remedies: str
    folder: str
    rank: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        process = RemediedProcess(self.remedies, Path(self.folder), self.rank)
        process.install()
        try:
            return self.target(*args, **kwargs)
        finally:
            process.write_report()


def _prepares_batches(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith(LOADER_PACKAGE)


def describe_unapplied(folder: Path, remedies: RunRemedies, rank: int = 0) -> list[str]:
    """Return a line for each remedy that no process of the rank has applied, with the reason.

    ``folder`` has the reports of the processes. Without a report, of a rank that was killed,
    nothing is known: the list has only remedies that these devices do not have.
    """
    files = list(folder.glob(REPORT_FILES.format(rank=rank, pid="*")))
    reports = [json.loads(file.read_text()) for file in files]
    with_torch = [set(report) for report in reports if report is not None]
    reasons = dict(remedies.refused)
    for name in remedies.names if reports else ():
        if not with_torch:
            reasons[name] = "the script did not import torch"
        elif not any(name in applied for applied in with_torch):
            reasons[name] = f"no {needed_by(name)}"
    return [f"{name} was not applied: {reason}" for name, reason in reasons.items()]


def needed_by(name: str) -> str:
    """Return what a script must have for the remedy to change anything."""
    return REGISTRY[name].needed_in_run if name in REGISTRY else NEEDED_BY_LOADER_FIELDS
