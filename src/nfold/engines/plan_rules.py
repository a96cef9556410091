"""Rules about plans that all frameworks share."""

from __future__ import annotations

from collections.abc import Mapping

from nfold.core.plan import Plan
from nfold.workloads.workload_info import WorkloadInfo

Rules = Mapping[str, bool]  # message of a rule -> whether the complete plan breaks it


def first_broken_rule(rules: Rules) -> str | None:
    return next((reason for reason, broken in rules.items() if broken), None)


def precision_rules(plan: Plan) -> Rules:
    cpu = plan.device == "cpu"
    return {
        "tf32 is a mode of NVIDIA's tensor cores; a CPU device has none": (
            plan.precision == "tf32" and cpu
        ),
        "fp16 training needs a GPU; bf16 also runs on CPU devices": (
            plan.precision == "fp16" and cpu
        ),
    }


def shared_rules(plan: Plan) -> Rules:
    return {
        **precision_rules(plan),
        "the global batch is smaller than the number of devices; next: a larger --batch": (
            (plan.batch or 0) < (plan.devices or 1)
        ),
        "memory and optimizer_state apply only to a script with nfold.Run; next: omit them": (
            plan.memory != "fixed" or plan.optimizer_state != "whole"
        ),
    }


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
