"""Plans that ask for what needs image files, or for what files do not allow."""

from __future__ import annotations

from nfold.plan import Plan
from nfold.workloads.base import WorkloadInfo


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
