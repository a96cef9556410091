"""How a script uses its devices, and what is unusual about it."""

from __future__ import annotations

from nfold.core.script_profile import ScriptProfile
from nfold.explain.advice import trainers

PARALLEL_NAMES = {"ddp": "DDP", "fsdp": "FSDP", "dp": "nn.DataParallel"}


def describe_parallelism(profile: ScriptProfile) -> str:
    """``DDP by Accelerate, 210 launches a step, busy for 4.20 ms``."""
    other = "a process group without a wrapper" if profile.process_group else "one process"
    text = PARALLEL_NAMES.get(profile.parallel, other)
    if profile.trainer:
        text += f" by {trainers.trainer_advice(profile).name}"
    if profile.companion_loaders:
        text += f", {1 + len(profile.companion_loaders)} DataLoaders a step"
    elif profile.batch_function is not None:
        text += f", batches by {profile.batch_function.call_text}"
    trace = profile.trace
    if trace is not None and trace.device_busy_ms is not None:
        text += f", {trace.launches_per_step:.0f} launches a step"
        text += f", busy for {trace.device_busy_ms:.2f} ms"
    return text


def write_headline(profile: ScriptProfile, devices: int, failure: str = "") -> str:
    """Notes to read before the numbers; empty for a usual script.

    ``failure`` is the error of the script when it was started as one process per device.
    """
    one_process = devices > 1 and not profile.process_group
    fixed = "No DataLoader whose batch size can be changed"
    if profile.fixed_batch_error:
        fixed = f"With smaller batches it fails ({profile.fixed_batch_error})"
    notes = {
        "No torch optimizer steps in it: nfold.mark_step() ends its steps.": (
            profile.has_no_optimizer
        ),
        "Samples per step are unknown: each step counts as one sample per device.": (
            profile.global_batch_size is None and not profile.samples_per_step
        ),
        "Every rank builds the whole batch and computes its slice of it.": profile.slices_batches,
        "nn.DataParallel does nothing on CPU devices: it computes the whole batch at once.": (
            one_process and profile.parallel == "dp" and profile.device == "cpu"
        ),
        "To change: DistributedDataParallel, or three lines of nfold.Run (docs/own-script).": (
            one_process and profile.parallel != "dp" and not profile.trainer and not failure
        ),
        f"{fixed}: a step below is {devices} of the script's own.": (
            one_process and not profile.accepts_batch_size
        ),
    }
    return " ".join(note for note, applies in notes.items() if applies)
