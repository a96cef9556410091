"""What Keras's back ends cannot do of a plan, each with the reason that a user reads."""

from __future__ import annotations

from nfold.choices import FRAMEWORK_STRATEGY
from nfold.frameworks.rules import MIN_BATCH_RULE, PRECISION_RULES, Rule, first_broken_rule
from nfold.plan import Plan

STEP_KINDS: dict[str, tuple[str, ...]] = {
    "tensorflow": ("eager", "graph", "compiled"),
    "jax": ("compiled",),
    "keras-torch": ("eager", "compiled"),
}
NHWC_ONLY = (
    "TensorFlow on a CPU: 'The Conv2D op currently only supports the NHWC tensor format on the "
    "CPU'; next: --layout channels_last, or --step compiled (XLA can)"
)

COMMON_RULES: tuple[Rule, ...] = (
    (lambda plan: plan.accumulate > 1, "accumulate above 1 is torch's; next: --framework torch"),
    (
        lambda plan: plan.exchange != "fp32",
        "Keras exchanges gradients as they are, in float32; next: --framework torch",
    ),
    (
        lambda plan: plan.kernels == "tuned",
        "kernels 'tuned' is a mode of torch.compile; next: --framework torch",
    ),
    (
        lambda plan: bool(plan.workers) and plan.decode is None,
        "Keras's input is made by one thread of its process, not by workers; next: --workers 0",
    ),
    (
        lambda plan: plan.decode == "device",
        "decoding on the device is nvJPEG's work, through PyTorch; next: --decode cpu",
    ),
    *PRECISION_RULES,
    (
        lambda plan: plan.input == "resident" and plan.augment == "cpu",
        "input 'resident' passes nothing through the host, which could augment it; next: "
        "--augment device",
    ),
    MIN_BATCH_RULE,
)

TENSORFLOW_RULES: tuple[Rule, ...] = (
    (
        lambda plan: (
            (plan.device, plan.layout) == ("cpu", "channels_first") and plan.step != "compiled"
        ),
        NHWC_ONLY,
    ),
    (
        lambda plan: plan.batch_norm == "synchronised",
        "batch norm under MirroredStrategy is each replica's own here; next: --framework torch",
    ),
    (
        lambda plan: plan.steps_per_execution > 1 and plan.step == "eager",
        "an eager step is one execution; next: --step graph or compiled",
    ),
)

EVEN_BATCH: Rule = (
    lambda plan: (plan.batch or 0) % (plan.devices or 1) != 0,
    "JAX cuts a batch into equal parts: it must divide by the number of devices",
)
"""Of a program over all devices; an operation's devices have a program each."""

JAX_RULES: tuple[Rule, ...] = (
    EVEN_BATCH,
    (
        lambda plan: plan.input == "tf.data",
        "input 'tf.data' is TensorFlow's; next: --input loader or generator",
    ),
)

KERAS_TORCH_RULES: tuple[Rule, ...] = (
    (
        lambda plan: (plan.devices or 1) > 1,
        "Keras's torch back end drives one device; next: --framework torch",
    ),
    (
        lambda plan: plan.input not in ("loader", "resident"),
        "input 'generator' and 'tf.data' are for --framework tensorflow or jax; next: "
        "--input loader",
    ),
    (
        lambda plan: plan.steps_per_execution > 1,
        "steps_per_execution above 1 needs a loop in a graph; next: --framework tensorflow or jax",
    ),
)

RULES_BY_FRAMEWORK: dict[str, tuple[Rule, ...]] = {
    "tensorflow": TENSORFLOW_RULES,
    "jax": JAX_RULES,
    "keras-torch": KERAS_TORCH_RULES,
}


def violated_rule(plan: Plan, *, operation: bool = False) -> str | None:
    """The first rule that the plan of a training breaks, or of an operation; None: it runs."""
    own = (
        rule
        for rule in RULES_BY_FRAMEWORK[plan.framework]
        if not operation or rule is not EVEN_BATCH
    )
    return _unknown_step_or_strategy(plan) or first_broken_rule((*own, *COMMON_RULES), plan)


def _unknown_step_or_strategy(plan: Plan) -> str | None:
    """A step or a strategy that is another framework's."""
    steps = STEP_KINDS[plan.framework]
    if plan.step not in steps:
        return f"{plan.framework} has no step {plan.step!r}; allowed are {', '.join(steps)}"
    own = FRAMEWORK_STRATEGY.get(plan.framework)
    if (plan.devices or 1) > 1 and own and plan.strategy != own:
        return f"{plan.framework} has no strategy {plan.strategy!r}; allowed is {own}"
    return None
