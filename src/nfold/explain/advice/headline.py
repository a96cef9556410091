"""How a script uses its devices, and what is unusual about it."""

from __future__ import annotations

from nfold.core.script_profile import ScriptProfile
from nfold.explain.advice import trainers


def describe_parallelism(profile: ScriptProfile) -> str:
    """``DDP by Accelerate, 210 launches a step, busy for 4.20 ms``."""
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
    """Notes to read before the numbers; empty for a usual script.

    ``failure`` is the error of the script when it was started as one process per device.
    """
    notes = [f"Started as {devices} processes, as torchrun does, it fails: {failure}."] * bool(
        failure
    )
    if profile.has_no_optimizer:
        notes.append("No torch optimizer steps in it: every backward counts as a step.")
    if profile.global_batch_size is None and not profile.samples_per_step:
        notes.append("Samples per step are unknown: each step counts as one sample per device.")
    if profile.slices_batches:
        notes.append("Every rank builds the whole batch and computes its slice of it.")
    if devices > 1 and not profile.process_group:
        notes += _one_process_notes(name, profile, devices)
    return " ".join(notes)


def _one_process_notes(name: str, profile: ScriptProfile, devices: int) -> list[str]:
    notes = []
    if profile.parallel == "dp" and profile.device == "cpu":
        notes = [
            "nn.DataParallel does nothing on CPU devices: it computes the whole batch at once."
        ]
    elif profile.parallel != "dp" and not profile.trainer:
        notes = [
            "To change: DistributedDataParallel, or three lines of nfold.Run (docs/own-script)."
        ]
    if not profile.accepts_batch_size:
        fails = f"With smaller batches it fails ({profile.fixed_batch_error})"
        why = (
            fails if profile.fixed_batch_error else "No DataLoader whose batch size can be changed"
        )
        notes.append(f"{why}: a step below is {devices} of the script's own.")
    return notes
