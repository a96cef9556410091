"""What to change in a script, with the line of its own code where that was seen."""

from __future__ import annotations

from collections.abc import Sequence

from nfold.seen import Loader, Seen

LEAST_READ = 10_000
"""Bytes of a batch: below, what was read were no samples."""
NCCL = "init_process_group('nccl'): gloo sends what is on GPUs through the host"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where it is started"
BATCH_NORM = "BatchNorm in place of SyncBatchNorm, if the training allows it"


def at(place: str | None, text: str) -> str:
    """``train.py:31: text``, or the text alone."""
    return f"{place}: {text}" if place else text


def loader(seen: Seen) -> Loader:
    """The DataLoader that feeds the training, or one that nothing is known of."""
    return seen.loader or Loader()


def workers(seen: Seen, count: int) -> str:
    """Another number of workers."""
    return at(loader(seen).place, f"DataLoader(..., num_workers={count})")


def more_input(seen: Seen, tried: Sequence[int] = ()) -> str:
    """Where no number of workers was measured to help; those that were ``tried`` do not."""
    fed = loader(seen)
    if not (fed.workers or tried):
        return workers(seen, 2)
    less = "less work a sample in the data set"
    if seen.device != "cpu":
        less += " (whole batches can be changed on the GPU)"
    if not tried:
        return at(fed.place, f"{less}, or another num_workers (fewer may be faster)")
    numbers = " and ".join(map(str, tried))
    return at(fed.place, f"{less} (num_workers={numbers}: no gain beyond the noise)")


def faster_reads(seen: Seen) -> str:
    """Less waiting for samples, or more at the same time; and where the bytes come from."""
    fed = loader(seen)
    more = workers(seen, 4 * (fed.workers or 1))
    text = f"{more} (workers that wait need no core), or the data in memory or on a local disk"
    read = seen.fetches
    if read is None or read.read_bytes < LEAST_READ * max(1, read.batches):
        return text
    of_batch, part = read.read_bytes / read.batches / 1e6, read.disk_bytes / read.read_bytes
    return f"{text}; a batch reads {of_batch:.2f} MB, {min(1.0, part):.0%} of it from a local disk"


def between_epochs(seen: Seen, *, waits: bool) -> str:
    """Workers that stay, fewer first batches to wait for, less to do while no step is made.

    ``waits``: most of the time is waited for a first batch.
    """
    fed, text = loader(seen), "evaluate, log and save less often"
    if not fed.workers:
        return text
    if not fed.persistent_workers:
        stay = at(fed.place, "DataLoader(..., persistent_workers=True)")
        return f"{stay}, and {text}" if waits else f"{text}; {stay}"
    if not waits:
        return text
    longer = "a sampler that goes through the data several times"
    return at(fed.place, f"less work a sample, or {longer} (every pass waits for its first batch)")


def reordering(seen: Seen) -> str:
    """One order of dimensions throughout, so that nothing is written out in another one."""
    own, other = ("last", "first") if seen.channels_last else ("first", "last")
    moved = at(seen.first_place("model"), f"model and images in channels_{other}")
    return f"{moved} (now channels_{own}), and no .contiguous() after a permute in a step"


def copies(seen: Seen) -> str:
    """Pinned memory, and copies that the host does not wait for."""
    moved = at(seen.first_place("copy"), ".to(device, non_blocking=True)")
    if loader(seen).pin_memory:
        return moved
    return f"{at(loader(seen).place, 'DataLoader(..., pin_memory=True)')} and {moved}"


def larger_batch(seen: Seen, also: str = "") -> str:
    """More work a step."""
    return at(loader(seen).place, f"a larger batch_size{also}")


def allocator(seen: Seen) -> str:
    """Memory that grows in place, or less of it."""
    less = at(loader(seen).place, "a smaller batch_size")
    return f"{EXPANDABLE}, or {less} ({seen.alloc_retries:.1f} allocator retries a step)"


def bytes_sent(seen: Seen) -> str:
    """Fewer gradient bytes."""
    place = seen.first_place("wrapper")
    if seen.parallel != "ddp":
        return at(seen.first_place("collective"), "send less: bf16, or less often")
    return at(place, "send half: model.register_comm_hook(None, bf16_compress_hook)")


def buffers(seen: Seen) -> str:
    """Buffers that are sent in every forward."""
    place = seen.first_place("wrapper")
    return at(place, "DistributedDataParallel(..., broadcast_buffers=False)")


def waiting_points(seen: Seen) -> str:
    """What makes ranks meet more often than gradients need."""
    place = seen.first_place("wrapper")
    if seen.find_unused_parameters:
        return at(place, "DistributedDataParallel(..., find_unused_parameters=False)")
    own = seen.first_place("collective")
    if own is not None:
        return at(own, "a collective in every step: do it every 50, or after the epoch")
    if seen.exchanges > 1:
        return one_exchange(seen)
    return larger_batch(seen, ", or an optimizer step after several batches")


def one_exchange(seen: Seen) -> str:
    """Gradients of several batches summed before they are exchanged."""
    return at(seen.first_place("step"), "all backwards but the last in model.no_sync()")


def host_syncs(seen: Seen) -> str:
    """Values that the host reads in every step."""
    text = ".item() in every step makes the host wait: read it every 50 steps"
    return at(seen.first_place("host_sync"), text)


def process_each(seen: Seen, devices: int) -> str:
    """A process a device in place of one for all."""
    start = f"started by nfold run --devices {devices}"
    if seen.parallel == "dp":
        place = seen.first_place("wrapper")
        return at(place, f"DistributedDataParallel in place of DataParallel, {start}")
    place = seen.first_place("model") or seen.first_place("step")
    return at(place, f"DistributedDataParallel(model), a DistributedSampler, {start}")


def way(seen: Seen) -> str:
    """How the script uses devices; of GPUs, how many launches of a step keep them busy how long."""
    traced = seen.traced
    if traced is None or traced.busy_ms is None:
        return _wrapper(seen)
    busy = f"{traced.launches:.0f} launches a step, busy for {traced.busy_ms:.2f} ms"
    return f"{_wrapper(seen)}, {busy}"


def _wrapper(seen: Seen) -> str:
    if seen.process_group:
        own = {"ddp": "DistributedDataParallel", "fsdp": "FSDP", "dp": "nn.DataParallel"}
        return own.get(seen.parallel, "a process group without a wrapper")
    return "nn.DataParallel" if seen.parallel == "dp" else "one process"


def headline(name: str, seen: Seen, devices: int) -> str:
    """What is to be known before all numbers; empty where a process drives each device."""
    cpu = seen.device == "cpu"
    if seen.process_group or (seen.parallel == "dp" and not cpu):
        return ""
    if seen.parallel == "dp":
        return "nn.DataParallel does nothing on CPU devices: the whole batch is computed at once."
    used = "its threads alone use several cores" if cpu else f"it uses one of {devices}"
    return (
        f"{name} divides its work over no devices: {used}. What a process a device would gain is "
        "told below, by copies of it."
    )


def whole_epochs(seen: Seen) -> str | None:
    """That every rank goes through the whole data set, where that is so."""
    fed = seen.loader
    if fed is None or fed.divides is not False or seen.world_size < 2:
        return None
    samples = f"all {fed.samples:,} samples" if fed.samples else "the whole data set"
    return at(
        fed.place,
        f"every rank goes through {samples} ({fed.sampler} divides nothing): an epoch on "
        f"{seen.world_size} devices is {seen.world_size} epochs",
    )


def divide(seen: Seen) -> str:
    """Samples of its own for every rank."""
    text = "DataLoader(..., sampler=DistributedSampler(dataset)), and set_epoch in every epoch"
    return at(loader(seen).place, text)


def fewer_processes(seen: Seen) -> str:
    """Less on the host that is in each other's way."""
    fewer = f" and {at(loader(seen).place, 'fewer num_workers')}" if loader(seen).workers else ""
    return f"fewer threads a rank: OMP_NUM_THREADS=1 where it is started{fewer}"


def threads(seen: Seen, count: int) -> str:
    """Fewer threads a rank, where the script sets them or where it is started."""
    where = seen.first_place("threads")
    if where is None:
        return f"OMP_NUM_THREADS={count} where it is started"
    return f"{where}: torch.set_num_threads({count})"
