"""Rules about plans of built-in training and of scripts in PyTorch. Imports no torch."""

from __future__ import annotations

from nfold.core.plan import Plan
from nfold.engines.plan_rules import Rules, precision_rules, shared_rules


def torch_rules(plan: Plan) -> Rules:
    """Return what PyTorch cannot do, in built-in training and in a script."""
    return {
        "step 'graph' is TensorFlow's tf.function; torch's are eager, compiled and captured": (
            plan.step == "graph"
        ),
        "input 'generator' and 'tf.data' are Keras's; next: input loader or resident": (
            plan.input in ("generator", "tf.data")
        ),
        "strategy 'mirrored' is TensorFlow's, 'data_parallel' JAX's; next: strategy ddp or nfold": (
            plan.strategy in ("mirrored", "data_parallel")
        ),
        "torch already allocates memory on demand; next: omit allocation": (
            plan.allocation != "default"
        ),
    }


def script_rules(plan: Plan, ranks: int) -> Rules:
    """Return what a script with nfold.Run cannot do on ``ranks`` devices; plans may be incomplete."""
    return {
        "a PyTorch script needs framework 'torch'": plan.framework != "torch",
        "devices differ from the ranks of this job; next: nfold run --devices N SCRIPT": (
            plan.devices not in (None, ranks)
        ),
        "strategy 'dp' drives all devices from one process; next: omit strategy": (
            plan.strategy == "dp"
        ),
        "decode and cache apply only to nfold's own image files; next: omit them": (
            plan.decode is not None or plan.cache != "off"
        ),
        "kernels and steps_per_execution apply only to nfold train and bench; next: omit them": (
            plan.kernels != "default" or plan.steps_per_execution > 1
        ),
        "run.loader(augment=...) runs on the device; next: augment in the data set": (
            plan.augment == "cpu"
        ),
        "memory 'fit' divides the samples of one device, synchronised batch norm those of all; "
        "next: accumulate=2 in place of memory": (
            plan.memory == "fit" and plan.batch_norm == "synchronised" and ranks > 1
        ),
        **torch_rules(plan),
        **precision_rules(plan),
    }


def run_device_rules(plan: Plan) -> Rules:
    """Return the fields that would change nothing in a script with nfold.Run on its devices."""
    return {
        "a captured step is a CUDA graph: it needs a GPU; next: step compiled or eager": (
            "captured" in str(plan.step) and plan.device == "cpu"
        ),
    }


def workload_rules(plan: Plan) -> Rules:
    """Return what built-in training cannot do."""
    step = str(plan.step)
    captured, compiled = "captured" in step, "compiled" in step
    cpu, dp, resident = plan.device == "cpu", plan.strategy == "dp", plan.input == "resident"
    on_cpu, on_device = plan.augment == "cpu", plan.decode == "device"
    synchronised = plan.batch_norm == "synchronised"
    return {
        "torch runs several steps per call as one CUDA graph over resident data; next: --step "
        "captured --input resident": (plan.steps_per_execution > 1 and not (captured and resident)),
        "a captured step is a CUDA graph: it needs a GPU; next: --step compiled or eager": (
            captured and cpu
        ),
        "a compiled or captured step exchanges gradients itself; next: --strategy nfold": (
            step != "eager" and plan.strategy in ("ddp", "dp")
        ),
        "synchronised batch norm cannot be compiled; next: --step captured or eager": (
            compiled and synchronised
        ),
        "only a compiled step has kernels to tune; next: --step compiled": (
            plan.kernels == "tuned" and not compiled
        ),
        "input 'resident' has no loader whose workers could augment on the CPU; next: "
        "--augment device": resident and on_cpu,
        "images decoded on the device are augmented on the device; next: --augment device": (
            on_device and on_cpu
        ),
        "decoding on the device uses nvJPEG, which needs a GPU; next: --decode cpu": (
            on_device and cpu
        ),
        "a cache of decoded images leaves nothing to decode on the device; next: --decode cpu": (
            on_device and plan.cache == "decoded"
        ),
        "resident photographs are decoded once, on the host; next: --decode cpu": (
            on_device and resident
        ),
        "nn.DataParallel sums gradients on one device: there is no exchange to compress": (
            dp and plan.exchange != "fp32"
        ),
        "nn.DataParallel runs its devices as threads of one process, which cannot wait for each "
        "other inside a layer; next: --strategy ddp or nfold": dp and synchronised,
        "nn.DataParallel needs GPUs; CPU devices are processes; next: --strategy ddp": dp and cpu,
        "DistributedDataParallel compresses on GPUs only; next: --strategy nfold": (
            plan.strategy == "ddp" and plan.exchange == "bf16" and cpu
        ),
        **torch_rules(plan),
        **shared_rules(plan),
    }
