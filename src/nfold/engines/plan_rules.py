"""Rules about plans that all frameworks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nfold.core.plan import Plan
from nfold.workloads.workload_info import WorkloadInfo

# whether a complete plan breaks the rule, and the message
Rule = tuple[Callable[[Plan], bool], str]

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
    "the global batch is smaller than the number of devices; next: a larger --batch",
)


def first_broken_rule(rules: Iterable[Rule], plan: Plan) -> str | None:
    return next((reason for breaks, reason in rules if breaks(plan)), None)


def image_file_refusal(info: WorkloadInfo, plan: Plan) -> str | None:
    """Return why the plan does not fit a workload of image files, or of arrays, or None."""
    if info.defaults.encoded:
        resident = plan.input == "resident" and plan.framework != "torch"
        reason = "only torch keeps photographs on a device, decoded; next: --input loader"
        return reason if resident else None
    defaults = Plan()
    for name in ("decode", "cache", "bad_images"):
        if getattr(plan, name) != getattr(defaults, name):
            return f"{name}: {info.name} has no image files to decode"
    return None
