"""What a user's script calls: ``nfold.Run`` and the linear scaling rule."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.engines.base import Observer, Phase
from nfold.engines.torch.lr_schedule import linear_scaling_rule
from nfold.engines.torch.run.job import complete_run_plan, join_job
from nfold.engines.torch.run.user_run import UserRun
from nfold.launch.handoff import HandoffFolder, HeartbeatWriter

__all__ = ["Run", "linear_scaling_rule"]

FOLDER_VARIABLE = "NFOLD_FOLDER"
"""Environment variable: the folder of a run that ``nfold run`` watches over."""
PLAN_VARIABLE = "NFOLD_PLAN"
"""Environment variable: plan fields as JSON, from the flags of ``nfold run``."""
PLAN_FILE = "nfold.toml"
LOOP_FIELDS = {
    "batch": "run.loader(data, batch_size=...)",
    "steps": "the script's own loop",
    "epochs": "the script's own loop",
    "warmup_steps": "the script's own loop",
}
"""Plan fields that a script decides, and where. In a file that ``nfold train`` reads too they
are left to it.
"""


class Run(UserRun):
    """One rank of a data-parallel run: joins the job that started this process, or is alone.

        run = nfold.Run()
        model, optimizer = run.prepare(model, optimizer)
        loader = run.loader(dataset, batch_size=512)

    The plan comes from, later ones winning: ``nfold.toml`` in the working directory, the flags
    of ``nfold run``, ``plan``, and ``fields`` (``precision="bf16"``, ``accumulate=4``, ...).
    Raises UsageError for a plan that a script cannot follow, and DevicesMissing where this
    rank has no GPU of its own.
    """

    def __init__(self, plan: Plan | None = None, **fields: Any) -> None:
        asked = _merge_plan_sources(plan, fields)
        job = join_job(asked.device)
        folder = os.environ.get(FOLDER_VARIABLE)
        observer = (
            Observer()
            if folder is None
            else HeartbeatObserver(HandoffFolder(Path(folder)), job.rank)
        )
        super().__init__(complete_run_plan(asked, job), job, observer)
        self._folder = None if folder is None else Path(folder)

    def log(self, **values: Any) -> None:
        """Print ``values`` on rank 0, and append them to the run's ``log.jsonl`` if it has one.

        A tensor of one element is read, which waits for the device: log once in many steps.
        """
        if not self.is_main:
            return
        plain = {name: _number(value) for name, value in values.items()}
        sys.stdout.write(" · ".join(f"{name} {_short(plain[name])}" for name in plain) + "\n")
        if self._folder is not None:
            line = json.dumps({"step": self.steps, "monotonic_s": time.monotonic(), **plain})
            with (self._folder / "log.jsonl").open("a") as file:
                file.write(line + "\n")


class HeartbeatObserver(Observer):
    """Tells the supervisor of ``nfold run`` that this rank lives."""

    def __init__(self, folder: HandoffFolder, rank: int) -> None:
        self._heart = HeartbeatWriter(folder.heartbeat_file(rank), os.getpid())

    def beat(self, phase: Phase, step: int, total: int = 0) -> None:
        self._heart.beat(phase, step, total, time.monotonic_ns())


def _merge_plan_sources(plan: Plan | None, fields: dict[str, Any]) -> Plan:
    file = Path(PLAN_FILE)
    asked = Plan.from_toml(file.read_text()) if file.exists() else Plan()
    told = _from_environment()
    for name in (one for one in LOOP_FIELDS if one in told or one in fields):
        raise UsageError(f"{name} is not a script's plan to say; next: {LOOP_FIELDS[name]}")
    for later in (told, {} if plan is None else _non_default_fields(plan), fields):
        asked = asked.edit(**later)
    return asked


def _from_environment() -> dict[str, Any]:
    text = os.environ.get(PLAN_VARIABLE)
    if not text:
        return {}
    try:
        return _non_default_fields(Plan.from_dict(json.loads(text)))
    except ValueError as error:
        raise UsageError(f"{PLAN_VARIABLE} is not JSON: {error}") from None


def _non_default_fields(plan: Plan) -> dict[str, Any]:
    return {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)
        if getattr(plan, field.name) != field.default
    }


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
