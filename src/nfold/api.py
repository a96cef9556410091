"""The public names for a user's script: ``nfold.Run`` and the linear scaling rule."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

from nfold.core.errors import UsageError
from nfold.core.plan import KEPT_PLAN_VARIABLE, SAFE_PLAN, Plan
from nfold.engines.base import Observer, Phase
from nfold.engines.torch.lr_schedule import linear_scaling_rule
from nfold.engines.torch.precision import set_fp32_products
from nfold.engines.torch.run.job import complete_run_plan, join_job
from nfold.engines.torch.run.user_run import UserRun
from nfold.launch.handoff import HandoffFolder, HeartbeatWriter

__all__ = ["Run", "linear_scaling_rule"]

FOLDER_VARIABLE = "NFOLD_FOLDER"  # the folder of a run under ``nfold run``
PLAN_VARIABLE = "NFOLD_PLAN"  # plan fields as JSON, from the flags of ``nfold run``
PLAN_FILE = "nfold.toml"
# Plan fields that a script sets itself, and where. nfold.toml may hold them for ``nfold train``.
LOOP_FIELDS = {
    "batch": "run.loader(data, batch_size=...)",
    "steps": "the script's own loop",
    "epochs": "the script's own loop",
    "warmup_steps": "the script's own loop",
}


class Run(UserRun):
    """One rank of a data-parallel run.

        run = nfold.Run()
        model, optimizer = run.prepare(model, optimizer)
        loader = run.loader(dataset, batch_size=512)

    Joins the job of ``RANK`` and ``WORLD_SIZE``; without them it is the only rank. The plan comes
    from ``nfold.toml`` in the working directory, the flags of ``nfold run``, ``plan``, and
    ``fields`` (``precision="bf16"``, ``accumulate=4``, ...); later sources override earlier ones.
    Fields that ``nfold tune`` tries or keeps override all.
    On GPUs the field ``step``, if no source sets it, is chosen by measurement in the first steps of
    the training. ``plan="safe"`` leaves it, and the kernels of optimizers and convolutions, as
    PyTorch has them.

    Raises:
        UsageError: The plan cannot be followed by a script.
        DevicesMissing: This rank has no GPU of its own.
    """

    def __init__(self, plan: Plan | Literal["safe"] | None = None, **fields: Any) -> None:
        requested, is_safe = _merge_plan_sources(plan, fields)
        job = join_job(requested.device)
        folder = os.environ.get(FOLDER_VARIABLE)
        observer = (
            Observer()
            if folder is None
            else HeartbeatObserver(HandoffFolder(Path(folder)), job.rank)
        )
        if requested.precision is not None:
            set_fp32_products(requested.precision)
        automatic = job.device.type == "cuda" and not is_safe
        plan = complete_run_plan(requested, job, is_automatic=automatic)
        super().__init__(plan, job, observer, is_automatic=automatic)
        self._folder = None if folder is None else Path(folder)

    def log(self, **values: Any) -> None:
        """Print ``values`` on rank 0, and append them to the run's ``log.jsonl`` if it has one.

        Reading a tensor of one element waits for the device: do not log in every step.
        """
        if not self.is_main:
            return
        numbers = {
            name: value.item() if hasattr(value, "item") else value
            for name, value in values.items()
        }
        texts = (
            f"{name} {_format_float(value)}" if isinstance(value, float) else f"{name} {value}"
            for name, value in numbers.items()
        )
        sys.stdout.write(" · ".join(texts) + "\n")
        if self._folder is not None:
            line = json.dumps({"step": self.steps, "monotonic_s": time.monotonic(), **numbers})
            with (self._folder / "log.jsonl").open("a") as file:
                file.write(line + "\n")


class HeartbeatObserver(Observer):
    """Reports progress of this rank to the supervisor of ``nfold run``."""

    def __init__(self, folder: HandoffFolder, rank: int) -> None:
        self._heart = HeartbeatWriter(folder.reports.heartbeat_file(rank), os.getpid())

    def beat(self, phase: Phase, step: int, total: int = 0) -> None:
        self._heart.beat(phase, step, total, time.monotonic_ns())


def _format_float(value: float) -> str:
    return f"{value:.0f}" if 1e5 <= value < 1e12 else f"{value:.5g}"


def _merge_plan_sources(plan: Plan | str | None, fields: dict[str, Any]) -> tuple[Plan, bool]:
    """Return the merged plan, and whether it is safe: no field is left to a search."""
    file = Path(PLAN_FILE)
    merged = Plan.from_toml(file.read_text()) if file.exists() else Plan()
    values = _read_fields(PLAN_VARIABLE)
    is_safe = values.pop(SAFE_PLAN, False)
    flags = _non_default_fields(Plan.from_dict(values))
    if isinstance(plan, str):
        if plan != SAFE_PLAN:
            raise UsageError(f"plan {plan!r}: allowed are 'safe' and a nfold.Plan")
        plan, is_safe = None, True
    for name, setting in LOOP_FIELDS.items():
        if name in flags or name in fields:
            raise UsageError(f"{name} cannot be set in the plan of a script; next: {setting}")
    kept = _read_fields(KEPT_PLAN_VARIABLE)
    for source in (flags, {} if plan is None else _non_default_fields(plan), fields, kept):
        merged = merged.edit(**source)
    return merged, is_safe


def _read_fields(variable: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(os.environ.get(variable) or "{}")
    except ValueError as error:
        raise UsageError(f"{variable} is not JSON: {error}") from None
    return values


def _non_default_fields(plan: Plan) -> dict[str, Any]:
    return {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)
        if getattr(plan, field.name) != field.default
    }
