"""What to change in a script, with the line of its own code where that was seen.

Written as what trains it is told such things: PyTorch, or a trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

from nfold.explain import wording
from nfold.seen import DataLoaderProfile, ScriptProfile, SourceLocation

MIN_READ_BYTES = 10_000
"""Bytes of a batch: below, what was read were no samples."""
USE_NCCL = "init_process_group('nccl'): gloo sends what is on GPUs through the host"
USE_EXPANDABLE_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where it is started"


def at_location(location: str | None, text: str) -> str:
    """``train.py:31: text``, or the text alone."""
    return f"{location}: {text}" if location else text


def training_loader(profile: ScriptProfile) -> DataLoaderProfile:
    """The DataLoader that feeds the training, or one that nothing is known of."""
    return profile.loader or DataLoaderProfile()


def at_loader(profile: ScriptProfile, text: str) -> str:
    """At the line where it is said what feeds the training."""
    return at_location(wording.trainer_advice(profile).location(profile, "loader"), text)


def loader_setting(profile: ScriptProfile, value: str) -> str:
    """A setting of the DataLoader that feeds the training, ``num_workers=4``."""
    return at_loader(profile, wording.trainer_advice(profile).loader.format(value))


def wrapper_setting(profile: ScriptProfile, value: str) -> str:
    """A setting of DistributedDataParallel."""
    words = wording.trainer_advice(profile)
    return at_location(words.location(profile, "wrapper"), words.wrapper.format(value))


def num_workers_setting(profile: ScriptProfile, count: int) -> str:
    """Another number of workers."""
    return loader_setting(profile, f"num_workers={count}")


def speed_up_input(
    profile: ScriptProfile, sufficient_workers: int, tried_workers: Sequence[int] = ()
) -> str:
    """Where no number of workers was measured to help; those that were ``tried`` do not.

    ``enough``: of a script without any, as many as should keep up.
    """
    fed = training_loader(profile)
    if profile.batch_function is not None:
        unless = ", unless they depend on what the model did" if profile.accumulation > 1 else ""
        return at_location(
            profile.batch_function.defined_at,
            f"less work in {profile.batch_function.call_text}, or a DataLoader, whose workers make the next "
            f"batches while the device computes{unless}",
        )
    if not (fed.num_workers or tried_workers):
        return num_workers_setting(profile, sufficient_workers)
    less = "less work a sample in the data set"
    if profile.device != "cpu":
        less += " (whole batches can be changed on the GPU)"
    if not tried_workers:
        return at_loader(profile, f"{less}, or another num_workers (fewer may be faster)")
    numbers = " and ".join(map(str, tried_workers))
    return at_loader(profile, f"{less} (num_workers={numbers}: no gain beyond the noise)")


def speed_up_reads(profile: ScriptProfile) -> str:
    """Less waiting for samples, or more at the same time; and where the bytes come from."""
    fed = training_loader(profile)
    more = num_workers_setting(profile, 4 * (fed.num_workers or 1))
    text = f"{more} (workers that wait need no core), or the data in memory or on a local disk"
    read = profile.fetches
    if read is None or read.read_bytes < MIN_READ_BYTES * max(1, read.batches):
        return text
    of_batch, part = read.read_bytes / read.batches / 1e6, read.disk_bytes / read.read_bytes
    return f"{text}; a batch reads {of_batch:.2f} MB, {min(1.0, part):.0%} of it from a local disk"


def keep_memory_format(profile: ScriptProfile) -> str:
    """One order of dimensions throughout, so that nothing is written out in another one."""
    own = f" (images are channels_{'last' if profile.channels_last else 'first'})"
    kept = "one order of dimensions throughout, no .contiguous() after a permute in a step"
    text = kept + own * bool(profile.convolutions)
    where = profile.most_frequent(f"order on {profile.device.partition(':')[0]}")
    if where is None:
        return at_location(profile.most_frequent_line("model"), text)
    return at_location(where.line, f"{text} ({where.package_line})" if where.package_line else text)


def use_channels_last(profile: ScriptProfile) -> str:
    """The order that convolutions on tensor cores compute in."""
    return at_location(profile.most_frequent_line("model"), "model and images in channels_last")


def compile_model(profile: ScriptProfile, mode: str) -> str:
    """The model compiled; in mode ``reduce-overhead``, its launches replayed as CUDA graphs."""
    words = wording.trainer_advice(profile)
    place = (
        profile.most_frequent_line("trainer")
        or profile.most_frequent_line("wrapper")
        or profile.most_frequent_line("model")
    )
    return at_location(place, words.compiled if mode == "default" else words.cuda_graphs)


def use_pinned_copies(profile: ScriptProfile) -> str:
    """Pinned memory, and copies that the host does not wait for."""
    words = wording.trainer_advice(profile)
    moved = at_location(words.location(profile, "copy"), words.non_blocking_copy)
    if training_loader(profile).pin_memory:
        return moved
    if profile.batch_function is not None:
        return f"{at_location(profile.batch_function.defined_at, 'batches in pinned memory')} and {moved}"
    return f"{loader_setting(profile, 'pin_memory=True')} and {moved}"


def increase_batch(profile: ScriptProfile, alternative: str = "") -> str:
    """More work a step."""
    return at_loader(profile, f"a larger {_batch_setting(profile)}{alternative}")


def reduce_allocator_retries(profile: ScriptProfile) -> str:
    """Memory that grows in place, or less of it."""
    less = at_loader(profile, f"a smaller {_batch_setting(profile)}")
    return f"{USE_EXPANDABLE_SEGMENTS}, or {less} ({profile.alloc_retries:.1f} allocator retries a step)"


def _batch_setting(profile: ScriptProfile) -> str:
    """As a setting, or a word where no DataLoader has one."""
    return wording.trainer_advice(profile).batch if profile.accepts_batch_size else "batch"


def disable_buffer_broadcast(profile: ScriptProfile) -> str:
    """Buffers that are sent in every forward."""
    return wrapper_setting(profile, "broadcast_buffers=False")


def disable_unused_search(profile: ScriptProfile) -> str:
    """Nobody looks for parameters without a gradient."""
    return wrapper_setting(profile, "find_unused_parameters=False")


def reduce_collectives(profile: ScriptProfile) -> str:
    """What makes ranks meet more often than gradients need."""
    own = profile.most_frequent("collective")
    if own is not None:
        text = "a collective in every step: do it every 50, or after the epoch"
        return _library_advice(
            profile, own, wording.trainer_advice(profile).fewer_gathers, "exchanges"
        ) or at_location(own.line, text)
    if profile.gradient_exchanges > 1:
        return all_reduce_once(profile)
    return increase_batch(profile, f", or {wording.trainer_advice(profile).accumulation}")


def all_reduce_once(profile: ScriptProfile) -> str:
    """Gradients of several batches summed before they are exchanged."""
    words = wording.trainer_advice(profile)
    return at_location(words.location(profile, "step"), words.all_reduce_once)


def use_local_batch_norm(profile: ScriptProfile) -> str:
    """Statistics of a rank's own samples."""
    return wording.trainer_advice(profile).batch_norm


def reduce_host_reads(profile: ScriptProfile) -> str:
    """Values that the host reads in every step."""
    read = profile.most_frequent("host_sync")
    text = ".item() in every step makes the host wait: read it every 50 steps"
    if read is None:
        return text
    return _library_advice(
        profile, read, wording.trainer_advice(profile).fewer_reads, "reads"
    ) or at_location(read.line, text)


def disable_anomaly_detection(profile: ScriptProfile) -> str:
    """Backwards that are not searched for what makes no number."""
    if profile.trainer == "lightning":
        return at_location(
            profile.most_frequent_line("trainer"), "Trainer(..., detect_anomaly=False)"
        )
    text = "anomaly detection looks for NaN in every operator of a backward: only for debugging"
    return at_location(profile.most_frequent_line("anomaly"), text)


def _library_advice(
    profile: ScriptProfile, place: SourceLocation, change: str, verb: str
) -> str | None:
    """What to change where not the user's own line does it in every step, but what it calls."""
    if place.package_line is None:
        return None
    why = f"{place.package_line} {verb} a value in every step"
    if wording.trainer_advice(profile).has_setting_for(place):
        return at_location(profile.most_frequent_line("trainer"), f"{change} ({why})")
    return at_location(place.line, f"{why}: have it do so every 50 steps")


def use_process_per_device(profile: ScriptProfile, devices: int) -> str:
    """A process a device in place of one for all."""
    start, words = f"started by nfold run --devices {devices}", wording.trainer_advice(profile)
    if profile.trainer:
        return at_location(
            profile.most_frequent_line("trainer") if words.launch else None, words.launch + start
        )
    if profile.parallel == "dp":
        place = profile.most_frequent_line("wrapper")
        return at_location(place, f"DistributedDataParallel in place of DataParallel, {start}")
    place = profile.most_frequent_line("model") or profile.most_frequent_line("step")
    share, by_itself = wording.divide_work(profile), wording.manual_all_reduce(profile)
    if by_itself:
        return at_location(place, f"dist.all_reduce() of {by_itself}, {share}, {start}")
    return at_location(place, words.launch.format(share) + start)


def duplicated_epochs(profile: ScriptProfile) -> str | None:
    """That every rank goes through the whole data set, where that is so and epochs are counted."""
    return None if training_loader(profile).cycled else _duplication_text(profile)


def duplicated_samples(profile: ScriptProfile) -> str | None:
    """The same where steps are counted: then nothing is done twice, unless in the same order."""
    told = _duplication_text(profile) if training_loader(profile).cycled else None
    return (
        f"{told}; who counts steps, as its generator lets one do, loses nothing" if told else None
    )


def _duplication_text(profile: ScriptProfile) -> str | None:
    fed = profile.loader
    if (
        fed is None
        or fed.shards_dataset is not False
        or profile.world_size < 2
        or profile.slices_batches
    ):
        return None
    samples = f"all {fed.dataset_size:,} samples" if fed.dataset_size else "the whole data set"
    return at_location(
        fed.created_at,
        f"every rank goes through {samples} ({fed.sampler} divides nothing): an epoch on "
        f"{profile.world_size} devices is {profile.world_size} epochs",
    )


def divide_samples(profile: ScriptProfile) -> str:
    """Samples of its own for every rank."""
    return at_loader(profile, wording.trainer_advice(profile).sampler)


def reduce_host_contention(profile: ScriptProfile) -> str:
    """Less on the host that is in each other's way."""
    fewer = (
        f" and {at_loader(profile, 'fewer num_workers')}"
        if training_loader(profile).num_workers
        else ""
    )
    return f"fewer threads a rank: OMP_NUM_THREADS=1 where it is started{fewer}"


def limit_threads(profile: ScriptProfile, count: int) -> str:
    """Fewer threads a rank, where the script sets them or where it is started."""
    where = profile.most_frequent_line("threads")
    if where is None:
        return f"OMP_NUM_THREADS={count} where it is started"
    return f"{where}: torch.set_num_threads({count})"
