"""One batch of images convolved with one filter, split over the devices: no training.

- ``problem.py``: the task of a rank, arrays, reference and comparison
- ``process.py``: the timed parts of one process, and other libraries on the CPU
- ``device.py``: the interface of a device
- ``torch.py``, ``triton_kernel.py``: PyTorch on CPU and GPU
- ``array_device.py``, ``tensorflow.py``, ``jax.py``: libraries with immutable arrays

This file imports none of them, so that the catalogue needs no framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from nfold.core.errors import ExtraMissing
from nfold.core.plan import KERAS_FRAMEWORKS, Plan, WorkloadDefaults
from nfold.workloads.workload_info import WorkloadInfo, WorkloadParameter


def flop_per_image(parameters: Mapping[str, int]) -> float:
    """Count the operations per image (a multiply-add is two); 0 with ``copy_only``."""
    if parameters["copy_only"]:
        return 0.0
    per_pixel = 2.0 * (parameters["channels"] * parameters["filter"]) ** 2
    return per_pixel * parameters["size"] ** 2


def impossible_parameters(parameters: Mapping[str, int]) -> str | None:
    """Return why the filter does not fit into the image, or None."""
    size, width = parameters["size"], parameters["filter"]
    if width > size:
        return f"filter {width} is wider than the image; allowed are 1 to {size} at size={size}"
    return None


def unsupported(plan: Plan) -> str | None:
    """Return why a complete plan is not possible, or None.

    Raises ExtraMissing without scipy, which computes the reference.
    """
    if find_spec("scipy") is None:
        raise ExtraMissing("scipy", "conv2d")
    if plan.steps is None:
        return "conv2d has no epochs; next: give its length as --steps 30"
    if plan.input != "loader":
        return f"input {plan.input!r}: conv2d times copies and resident data as parts; use 'loader'"
    if plan.augment != "cpu":
        return f"augment {plan.augment!r}: conv2d augments nothing; use 'cpu'"
    if plan.strategy == "nfold" or plan.exchange != "fp32":
        return "conv2d has no gradients to exchange; allowed are strategies ddp, dp"
    if plan.batch_norm != "device":
        return f"batch_norm {plan.batch_norm!r}: conv2d has no batch norm; use 'device'"
    if plan.framework not in KERAS_FRAMEWORKS and plan.step != "eager":
        return f"step {plan.step!r}: conv2d runs 'eager' only"
    if plan.framework in KERAS_FRAMEWORKS and plan.precision not in ("fp32", "tf32"):
        return (
            f"precision {plan.precision!r}: on {plan.framework} conv2d's arrays are NumPy's; "
            "allowed are fp32 and, on GPUs, tf32; next: --framework torch"
        )
    if plan.steps_per_execution > 1:
        return f"steps_per_execution {plan.steps_per_execution}: conv2d times every call; use 1"
    if plan.accumulate > 1:
        return f"accumulate {plan.accumulate}: conv2d has no gradients to add up; use 1"
    if plan.precision == "tf32" and plan.device == "cpu":
        return "tf32 is a mode of NVIDIA's tensor cores; allowed on a CPU are fp32, bf16, fp16"
    if (plan.batch or 0) < (plan.devices or 1):
        return f"batch {plan.batch} over {plan.devices} devices leaves one without an image"
    return None


INFO = WorkloadInfo(
    name="conv2d",
    summary="one batch of images convolved with one filter; copies, kernels and CPU peers apart",
    source=(
        "Two-dimensional convolution with zero padding to the same size, as "
        "scipy.signal.convolve2d(mode='same') defines it, summed over input channels"
    ),
    kind="operation",
    parameters={
        "size": WorkloadParameter(default=100, help="height and width of an image in pixels"),
        "channels": WorkloadParameter(default=1, help="channels of the images and of the results"),
        "filter": WorkloadParameter(default=3, help="height and width of the filter in pixels"),
        "copy_only": WorkloadParameter(
            default=0, help="1: copy there and back, convolve nothing", minimum=0, maximum=1
        ),
    },
    defaults=WorkloadDefaults(batch=840, epochs=None, steps=30),
    flop_per_sample=flop_per_image,
    check_parameters=impossible_parameters,
    unsupported=unsupported,
)
