"""What no framework can do of a plan, and the form in which each says what it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nfold.core.plan import Plan
from nfold.workloads.workload_info import WorkloadInfo

Rule = tuple[Callable[[Plan], bool], str]
"""Whether a complete plan breaks it, and the reason that a user reads."""

PRECISION_RULES: tuple[Rule, ...] = (
    (
        lambda plan: plan.precision == "tf32" and plan.device == "cpu",
        "tf32 is a mode of NVIDIA's tensor cores; a CPU device has none",
    ),
    (
        lambda plan: plan.precision == "fp16" and plan.device == "cpu",
        "fp16 training needs a GPU; bf16 also runs on CPU devices",
    ),
)
MIN_BATCH_RULE: Rule = (
    lambda plan: (plan.batch or 0) < (plan.devices or 1),
    "the global batch is smaller than the number of devices: some would have no sample",
)


def first_broken_rule(rules: Iterable[Rule], plan: Plan) -> str | None:
    """The reason of the first rule that the plan breaks, or None."""
    return next((reason for breaks, reason in rules if breaks(plan)), None)


def image_file_refusal(info: WorkloadInfo, plan: Plan) -> str | None:
    """Why the plan does not suit a workload of image files, or one of arrays; None: it does."""
    if info.defaults.encoded:
        resident = plan.input == "resident" and plan.framework != "torch"
        reason = "only torch keeps photographs on a device, decoded; next: --input loader"
        return reason if resident else None
    plain = Plan()
    asked = ("decode", "cache", "bad_images")
    said = [name for name in asked if getattr(plan, name) != getattr(plain, name)]
    return f"{said[0]}: {info.name} has no image files to decode" if said else None
