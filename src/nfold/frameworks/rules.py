"""What no framework can do of a plan, and the form in which each says what it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nfold.plan import Plan

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
