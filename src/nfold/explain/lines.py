"""What to change in a script, with the line of its own code where that was seen.

Written as what trains it is told such things: PyTorch, or a trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

from nfold.explain import wording
from nfold.seen import Loader, Place, Seen

LEAST_READ = 10_000
"""Bytes of a batch: below, what was read were no samples."""
NCCL = "init_process_group('nccl'): gloo sends what is on GPUs through the host"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where it is started"


def at(place: str | None, text: str) -> str:
    """``train.py:31: text``, or the text alone."""
    return f"{place}: {text}" if place else text


def loader(seen: Seen) -> Loader:
    """The DataLoader that feeds the training, or one that nothing is known of."""
    return seen.loader or Loader()


def fed_at(seen: Seen, text: str) -> str:
    """At the line where it is said what feeds the training."""
    return at(wording.of(seen).place(seen, "loader"), text)


def setting(seen: Seen, value: str) -> str:
    """A setting of the DataLoader that feeds the training, ``num_workers=4``."""
    return fed_at(seen, wording.of(seen).loader.format(value))


def wrapping(seen: Seen, value: str) -> str:
    """A setting of DistributedDataParallel."""
    words = wording.of(seen)
    return at(words.place(seen, "wrapper"), words.wrapper.format(value))


def workers(seen: Seen, count: int) -> str:
    """Another number of workers."""
    return setting(seen, f"num_workers={count}")


def more_input(seen: Seen, enough: int, tried: Sequence[int] = ()) -> str:
    """Where no number of workers was measured to help; those that were ``tried`` do not.

    ``enough``: of a script without any, as many as should keep up.
    """
    fed = loader(seen)
    if seen.maker is not None:
        unless = ", unless they depend on what the model did" if seen.accumulation > 1 else ""
        return at(
            seen.maker.place,
            f"less work in {seen.maker.called}, or a DataLoader, whose workers make the next "
            f"batches while the device computes{unless}",
        )
    if not (fed.workers or tried):
        return workers(seen, enough)
    less = "less work a sample in the data set"
    if seen.device != "cpu":
        less += " (whole batches can be changed on the GPU)"
    if not tried:
        return fed_at(seen, f"{less}, or another num_workers (fewer may be faster)")
    numbers = " and ".join(map(str, tried))
    return fed_at(seen, f"{less} (num_workers={numbers}: no gain beyond the noise)")


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


def reordering(seen: Seen) -> str:
    """One order of dimensions throughout, so that nothing is written out in another one."""
    own = f" (images are channels_{'last' if seen.channels_last else 'first'})"
    kept = "one order of dimensions throughout, no .contiguous() after a permute in a step"
    text = kept + own * bool(seen.convolutions)
    where = seen.first(f"order on {seen.device.partition(':')[0]}")
    if where is None:
        return at(seen.first_place("model"), text)
    return at(where.where, f"{text} ({where.inside})" if where.inside else text)


def channels_last(seen: Seen) -> str:
    """The order that convolutions on tensor cores compute in."""
    return at(seen.first_place("model"), "model and images in channels_last")


def compiled(seen: Seen, mode: str) -> str:
    """The model compiled; in mode ``reduce-overhead``, its launches replayed as CUDA graphs."""
    words = wording.of(seen)
    place = seen.first_place("trainer") or seen.first_place("wrapper") or seen.first_place("model")
    return at(place, words.compiled if mode == "default" else words.replayed)


def copies(seen: Seen) -> str:
    """Pinned memory, and copies that the host does not wait for."""
    words = wording.of(seen)
    moved = at(words.place(seen, "copy"), words.moved)
    if loader(seen).pin_memory:
        return moved
    if seen.maker is not None:
        return f"{at(seen.maker.place, 'batches in pinned memory')} and {moved}"
    return f"{setting(seen, 'pin_memory=True')} and {moved}"


def larger_batch(seen: Seen, also: str = "") -> str:
    """More work a step."""
    return fed_at(seen, f"a larger {_batch(seen)}{also}")


def allocator(seen: Seen) -> str:
    """Memory that grows in place, or less of it."""
    less = fed_at(seen, f"a smaller {_batch(seen)}")
    return f"{EXPANDABLE}, or {less} ({seen.alloc_retries:.1f} allocator retries a step)"


def _batch(seen: Seen) -> str:
    """As a setting, or a word where no DataLoader has one."""
    return wording.of(seen).batch if seen.rebatches else "batch"


def buffers(seen: Seen) -> str:
    """Buffers that are sent in every forward."""
    return wrapping(seen, "broadcast_buffers=False")


def all_used(seen: Seen) -> str:
    """Nobody looks for parameters without a gradient."""
    return wrapping(seen, "find_unused_parameters=False")


def waiting_points(seen: Seen) -> str:
    """What makes ranks meet more often than gradients need."""
    own = seen.first("collective")
    if own is not None:
        text = "a collective in every step: do it every 50, or after the epoch"
        return _of_library(seen, own, wording.of(seen).gathers, "exchanges") or at(own.where, text)
    if seen.exchanges > 1:
        return one_exchange(seen)
    return larger_batch(seen, f", or {wording.of(seen).several}")


def one_exchange(seen: Seen) -> str:
    """Gradients of several batches summed before they are exchanged."""
    words = wording.of(seen)
    return at(words.place(seen, "step"), words.last_only)


def each_normalised(seen: Seen) -> str:
    """Statistics of a rank's own samples."""
    return wording.of(seen).batch_norm


def host_syncs(seen: Seen) -> str:
    """Values that the host reads in every step."""
    read = seen.first("host_sync")
    text = ".item() in every step makes the host wait: read it every 50 steps"
    if read is None:
        return text
    return _of_library(seen, read, wording.of(seen).reads, "reads") or at(read.where, text)


def no_anomalies(seen: Seen) -> str:
    """Backwards that are not searched for what makes no number."""
    if seen.trainer == "lightning":
        return at(seen.first_place("trainer"), "Trainer(..., detect_anomaly=False)")
    text = "anomaly detection looks for NaN in every operator of a backward: only for debugging"
    return at(seen.first_place("anomaly"), text)


def _of_library(seen: Seen, place: Place, change: str, does: str) -> str | None:
    """What to change where not the user's own line does it in every step, but what it calls."""
    if place.inside is None:
        return None
    why = f"{place.inside} {does} a value in every step"
    if wording.of(seen).does(place):
        return at(seen.first_place("trainer"), f"{change} ({why})")
    return at(place.where, f"{why}: have it do so every 50 steps")


def process_each(seen: Seen, devices: int) -> str:
    """A process a device in place of one for all."""
    start, words = f"started by nfold run --devices {devices}", wording.of(seen)
    if seen.trainer:
        return at(seen.first_place("trainer") if words.process else None, words.process + start)
    if seen.parallel == "dp":
        place = seen.first_place("wrapper")
        return at(place, f"DistributedDataParallel in place of DataParallel, {start}")
    place = seen.first_place("model") or seen.first_place("step")
    share, by_itself = wording.share(seen), wording.exchanged_by_itself(seen)
    if by_itself:
        return at(place, f"dist.all_reduce() of {by_itself}, {share}, {start}")
    return at(place, words.process.format(share) + start)


def whole_epochs(seen: Seen) -> str | None:
    """That every rank goes through the whole data set, where that is so and epochs are counted."""
    return None if loader(seen).around else _all_of_it(seen)


def whole_without_end(seen: Seen) -> str | None:
    """The same where steps are counted: then nothing is done twice, unless in the same order."""
    told = _all_of_it(seen) if loader(seen).around else None
    return (
        f"{told}; who counts steps, as its generator lets one do, loses nothing" if told else None
    )


def _all_of_it(seen: Seen) -> str | None:
    fed = seen.loader
    if fed is None or fed.divides is not False or seen.world_size < 2 or seen.slices:
        return None
    samples = f"all {fed.samples:,} samples" if fed.samples else "the whole data set"
    return at(
        fed.place,
        f"every rank goes through {samples} ({fed.sampler} divides nothing): an epoch on "
        f"{seen.world_size} devices is {seen.world_size} epochs",
    )


def divide(seen: Seen) -> str:
    """Samples of its own for every rank."""
    return fed_at(seen, wording.of(seen).divided)


def fewer_processes(seen: Seen) -> str:
    """Less on the host that is in each other's way."""
    fewer = f" and {fed_at(seen, 'fewer num_workers')}" if loader(seen).workers else ""
    return f"fewer threads a rank: OMP_NUM_THREADS=1 where it is started{fewer}"


def threads(seen: Seen, count: int) -> str:
    """Fewer threads a rank, where the script sets them or where it is started."""
    where = seen.first_place("threads")
    if where is None:
        return f"OMP_NUM_THREADS={count} where it is started"
    return f"{where}: torch.set_num_threads({count})"
