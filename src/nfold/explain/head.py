"""What is said of a script before all numbers: how it uses devices, and what is unusual in it."""

from __future__ import annotations

from nfold.explain import wording
from nfold.seen import Seen


def way(seen: Seen) -> str:
    """How the script uses devices; of GPUs, how many launches of a step keep them busy how long."""
    traced = seen.traced
    if traced is None or traced.busy_ms is None:
        return _wrapper(seen)
    busy = f"{traced.launches:.0f} launches a step, busy for {traced.busy_ms:.2f} ms"
    return f"{_wrapper(seen)}, {busy}"


def _wrapper(seen: Seen) -> str:
    made = f", batches by {seen.maker.called}" if seen.maker is not None else ""
    if seen.beside:
        made = f", {1 + len(seen.beside)} DataLoaders a step"
    return f"{_parallel(seen)}{made}"


def _parallel(seen: Seen) -> str:
    own = {"ddp": "DistributedDataParallel", "fsdp": "FSDP", "dp": "nn.DataParallel"}
    other = "a process group without a wrapper" if seen.process_group else "one process"
    found = own.get(seen.parallel, other)
    return f"{found} by {wording.of(seen).name}" if seen.trainer else found


def headline(name: str, seen: Seen, devices: int, failed: str = "") -> str:
    """What is to be known before all numbers; empty where there is nothing unusual.

    ``failed``: why it does not train as a process a device.
    """
    told = [f"As {devices} processes, as torchrun starts it, it fails: {failed}."] * bool(failed)
    if seen.by_hand:
        told.append("No optimizer of torch steps in it: a step is a backward.")
    if seen.batch is None and not seen.samples_per_step:
        told.append("How many samples a step has could not be seen: a device's step counts as one.")
    if seen.slices:
        told.append("Each rank makes the whole of every batch, and computes its part of it.")
    if devices > 1 and not seen.process_group:
        told += _of_one_process(name, seen, devices)
    return " ".join(told)


def _of_one_process(name: str, seen: Seen, devices: int) -> list[str]:
    cpu, told = seen.device == "cpu", []
    if seen.parallel != "dp":
        used = "its threads alone use several cores" if cpu else f"it uses one of {devices}"
        told = [
            f"{name} divides its work over no devices: {used}. What a process a device would gain "
            "is told below, by copies of it."
        ]
    elif cpu:
        told = ["nn.DataParallel does nothing on CPU devices: the whole batch is computed at once."]
    if not seen.rebatches:
        fails = f"With smaller batches it fails ({seen.fixed_batch})"
        why = fails if seen.fixed_batch else "Nothing gives it smaller batches"
        told.append(f"{why}: a step below is {devices} of its own.")
    return told
