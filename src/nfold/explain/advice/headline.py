"""What is said of a script before all numbers: how it uses devices, and what is unusual in it."""

from __future__ import annotations

from nfold.core.script_profile import ScriptProfile
from nfold.explain.advice import trainers


def describe_parallelism(profile: ScriptProfile) -> str:
    """How the script uses devices; of GPUs, how many launches of a step keep them busy how long."""
    traced = profile.trace
    if traced is None or traced.device_busy_ms is None:
        return _parallelism_and_input(profile)
    busy = (
        f"{traced.launches_per_step:.0f} launches a step, busy for {traced.device_busy_ms:.2f} ms"
    )
    return f"{_parallelism_and_input(profile)}, {busy}"


def _parallelism_and_input(profile: ScriptProfile) -> str:
    made = (
        f", batches by {profile.batch_function.call_text}"
        if profile.batch_function is not None
        else ""
    )
    if profile.companion_loaders:
        made = f", {1 + len(profile.companion_loaders)} DataLoaders a step"
    return f"{_parallelism(profile)}{made}"


def _parallelism(profile: ScriptProfile) -> str:
    own = {"ddp": "DDP", "fsdp": "FSDP", "dp": "nn.DataParallel"}
    other = "a process group without a wrapper" if profile.process_group else "one process"
    found = own.get(profile.parallel, other)
    return f"{found} by {trainers.trainer_advice(profile).name}" if profile.trainer else found


def write_headline(name: str, profile: ScriptProfile, devices: int, failure: str = "") -> str:
    """What is to be known before all numbers; empty where there is nothing unusual.

    ``failed``: why it does not train as a process a device.
    """
    told = [f"As {devices} processes, as torchrun starts it, it fails: {failure}."] * bool(failure)
    if profile.has_no_optimizer:
        told.append("No optimizer of torch steps in it: a step is a backward.")
    if profile.global_batch_size is None and not profile.samples_per_step:
        told.append("How many samples a step has could not be seen: a device's step counts as one.")
    if profile.slices_batches:
        told.append("Each rank makes the whole of every batch, and computes its part of it.")
    if devices > 1 and not profile.process_group:
        told += _one_process_notes(name, profile, devices)
    return " ".join(told)


def _one_process_notes(name: str, profile: ScriptProfile, devices: int) -> list[str]:
    cpu, told = profile.device == "cpu", []
    if profile.parallel != "dp":
        used = "its threads alone use several cores" if cpu else f"it uses one of {devices}"
        told = [
            f"{name} divides its work over no devices: {used}. What a process a device would gain "
            "is told below, by copies of it."
        ]
    elif cpu:
        told = ["nn.DataParallel does nothing on CPU devices: the whole batch is computed at once."]
    if not profile.accepts_batch_size:
        fails = f"With smaller batches it fails ({profile.fixed_batch_error})"
        why = fails if profile.fixed_batch_error else "Nothing gives it smaller batches"
        told.append(f"{why}: a step below is {devices} of its own.")
    return told
