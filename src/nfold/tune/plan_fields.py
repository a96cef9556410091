"""The fields of a plan as remedies: how each may change a training, and the values to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nfold.core.plan import ALLOWED_VALUES, Plan
from nfold.core.script_profile import ScriptProfile
from nfold.core.source_edit import SourceEdit
from nfold.interventions.intervention import Numerics
from nfold.tune.plan_edits import loader_batch_edits, loader_worker_edits

KeepInScript = Callable[[Any, ScriptProfile], tuple[SourceEdit, ...] | None]
MIN_WORKER_LIMIT = 8  # workers that wait for storage need no core
MAX_WORKER_COUNTS = 3


@dataclass(frozen=True, kw_only=True)
class TunableField:
    """A field that a user can change for speed.

    ``numerics`` and ``permission`` are as those of an intervention. ``values``: those that can be
    faster than others; default: all that the field allows. ``in_run``: a script's nfold.Run has it,
    and these ``remedies`` of other scripts would do the same. ``edits`` keep a value in a script whose
    loop has no nfold.Run. ``draws``: a data set draws other random numbers with another value.
    ``label`` is a format of the value.
    """

    numerics: Numerics
    permission: str = ""
    values: tuple[Any, ...] = ()
    in_run: bool = False
    remedies: tuple[str, ...] = ()
    edits: KeepInScript | None = None
    draws: bool = False
    label: str = ""


TUNABLE_FIELDS: dict[str, TunableField] = {
    "workers": TunableField(
        numerics="same", edits=loader_worker_edits, draws=True, label="num_workers={}"
    ),
    "strategy": TunableField(numerics="same", values=("nfold", "ddp")),
    "step": TunableField(numerics="rounding", in_run=True, remedies=("compiled", "captured")),
    "input": TunableField(numerics="same", in_run=True),
    "layout": TunableField(numerics="rounding", in_run=True, remedies=("channels_last",)),
    "kernels": TunableField(numerics="rounding", values=("tuned",)),
    "steps_per_execution": TunableField(numerics="same", values=(4, 16)),
    "cache": TunableField(numerics="same", values=("decoded",)),
    "decode": TunableField(numerics="rounding"),
    "accumulate": TunableField(numerics="rounding", values=(1,)),
    "augment": TunableField(numerics="training", permission="augmentation"),
    "precision": TunableField(
        numerics="training", permission="precision", in_run=True, remedies=("autocast_bf16",)
    ),
    "exchange": TunableField(
        numerics="training", permission="communication", values=("bf16",), in_run=True
    ),
    "batch_norm": TunableField(
        numerics="training", permission="batch_norm", values=("device",), in_run=True
    ),
    "batch": TunableField(
        numerics="training",
        permission="batch",
        edits=loader_batch_edits,
        label="{} samples in a step",
    ),
}
"""In the order in which they are tried. What a framework cannot do, its rules refuse."""


EXCLUDED_WITH_RUN = (
    *(name for field in TUNABLE_FIELDS.values() for name in field.remedies),
    "cudnn_benchmark",
    "fused_optimizer",
    "batch",
)
"""Not tried on scripts with nfold.Run: its plan has them, it always does them, or it divides the batch."""
OF_SEVERAL_DEVICES = ("strategy", "exchange", "batch_norm")


def field_values(name: str, plan: Plan, cores: int) -> tuple[Any, ...]:
    """Return the values of a field to try on a workload, other than that of the plan."""
    own = getattr(plan, name)
    if name == "workers":
        return worker_counts(plan, cores) if plan.input != "resident" else ()
    if name in OF_SEVERAL_DEVICES and plan.devices == 1:
        return ()
    if name == "batch":
        return (2 * own,) if own else ()
    values = TUNABLE_FIELDS[name].values or ALLOWED_VALUES[name]
    return tuple(value for value in values if value != own)


def worker_limit(plan: Plan, cores: int) -> int:
    return max(MIN_WORKER_LIMIT, cores // (plan.devices or 1))


def worker_counts(plan: Plan, cores: int) -> tuple[int, ...]:
    own, share = plan.workers or 0, max(1, cores // (plan.devices or 1))
    if plan.device == "cpu":  # workers have no cores of their own
        counts = [2 * own or 2, own // 2 or 1, 0]
    else:
        counts = [min(share, max(4, 2 * own)), share, own // 2, 2 * own]
    limit = worker_limit(plan, cores)
    allowed = [count for count in counts if count <= limit and count != own]
    return tuple(dict.fromkeys(allowed))[:MAX_WORKER_COUNTS]
