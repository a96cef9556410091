"""What Keras's back ends cannot do of a plan, each with the reason that a user reads."""

from __future__ import annotations

from nfold.choices import OWN_STRATEGY
from nfold.frameworks.rules import PRECISIONS, TOO_FEW, Rule, first_broken
from nfold.plan import Plan

STEPS: dict[str, tuple[str, ...]] = {
    "tensorflow": ("eager", "graph", "compiled"),
    "jax": ("compiled",),
    "keras-torch": ("eager", "compiled"),
}
NHWC_ONLY = (
    "TensorFlow on a CPU: 'The Conv2D op currently only supports the NHWC tensor format on the "
    "CPU'; next: --layout channels_last, or --step compiled (XLA can)"
)

COMMON: tuple[Rule, ...] = (
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
    *PRECISIONS,
    (
        lambda plan: plan.input == "resident" and plan.augment == "cpu",
        "input 'resident' passes nothing through the host, which could augment it; next: "
        "--augment device",
    ),
    TOO_FEW,
)

TENSORFLOW: tuple[Rule, ...] = (
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

EVEN: Rule = (
    lambda plan: (plan.batch or 0) % (plan.devices or 1) != 0,
    "JAX cuts a batch into equal parts: it must divide by the number of devices",
)
"""Of a program over all devices; an operation's devices have a program each."""

JAX: tuple[Rule, ...] = (
    EVEN,
    (
        lambda plan: plan.input == "tf.data",
        "input 'tf.data' is TensorFlow's; next: --input loader or generator",
    ),
)

KERAS_TORCH: tuple[Rule, ...] = (
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

OWN: dict[str, tuple[Rule, ...]] = {
    "tensorflow": TENSORFLOW,
    "jax": JAX,
    "keras-torch": KERAS_TORCH,
}


def broken(plan: Plan, *, operation: bool = False) -> str | None:
    """The first rule that the plan of a training breaks, or of an operation; None: it runs."""
    own = (rule for rule in OWN[plan.framework] if not operation or rule is not EVEN)
    return _names(plan) or first_broken((*own, *COMMON), plan)


def _names(plan: Plan) -> str | None:
    """A step or a strategy that is another framework's."""
    steps = STEPS[plan.framework]
    if plan.step not in steps:
        return f"{plan.framework} has no step {plan.step!r}; allowed are {', '.join(steps)}"
    own = OWN_STRATEGY.get(plan.framework)
    if (plan.devices or 1) > 1 and own and plan.strategy != own:
        return f"{plan.framework} has no strategy {plan.strategy!r}; allowed is {own}"
    return None
