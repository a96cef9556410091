"""What to change in a script, with the line of its own code where that was seen.

Written as what trains it is told such things: PyTorch, or a trainer.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from nfold.core.measurement import HostGapKind, HostGapLocation, Measurement
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, SourceLocation
from nfold.explain.advice import trainers
from nfold.explain.design import ExperimentDesign

LOCATION = re.compile(r"([^:;]+\.\w+:\d+(?:, [^:;]+\.\w+:\d+)*): ")
OPTION = re.compile(r"--[a-z-]+ [\w.]+(?: --[a-z-]+ [\w.]+)*(?=$|[,;]| \()")
CALL = re.compile(r"\.?[A-Za-z_][\w.]*\(")
MIN_READ_BYTES = 10_000
"""Bytes of a batch: below, what was read were no samples."""
USE_NCCL = "init_process_group('nccl'): gloo sends what is on GPUs through the host"
USE_EXPANDABLE_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where it is started"


def at_location(location: str | None, text: str) -> str:
    """``train.py:31: text``, or the text alone."""
    return f"{location}: {text}" if location else text


def split_location(text: str) -> tuple[str, str]:
    """Return the ``train.py:31`` that ``at_location`` put before a text, and the text."""
    found = LOCATION.match(text)
    return (found[1], text[found.end() :]) if found else ("", text)


def split_code(advice: str) -> tuple[str, str]:
    """Return what to type, ``DataLoader(..., num_workers=4)`` or ``--batch 64``, and the rest.

    The first is empty for advice in words.
    """
    option = OPTION.match(advice)
    if option is not None:
        return option[0], advice[option.end() :].lstrip(" ,;")
    call, depth = CALL.match(advice), 0
    for at in range(call.end() - 1 if call else len(advice), len(advice)):
        depth += {"(": 1, ")": -1}.get(advice[at], 0)
        if depth == 0:
            return advice[: at + 1], advice[at + 1 :].lstrip(" ,;")
    return "", advice


def training_loader(profile: ScriptProfile) -> DataLoaderProfile:
    """The DataLoader that feeds the training, or one that nothing is known of."""
    return profile.loader or DataLoaderProfile()


def at_loader(profile: ScriptProfile, text: str) -> str:
    """At the line where it is said what feeds the training."""
    return at_location(trainers.trainer_advice(profile).location(profile, "loader"), text)


def loader_setting(profile: ScriptProfile, value: str) -> str:
    """A setting of the DataLoader that feeds the training, ``num_workers=4``."""
    return at_loader(profile, trainers.trainer_advice(profile).loader.format(value))


def wrapper_setting(profile: ScriptProfile, value: str) -> str:
    """A setting of DistributedDataParallel."""
    words = trainers.trainer_advice(profile)
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
    words = trainers.trainer_advice(profile)
    place = (
        profile.most_frequent_line("trainer")
        or profile.most_frequent_line("wrapper")
        or profile.most_frequent_line("model")
    )
    return at_location(place, words.compiled if mode == "default" else words.cuda_graphs)


def use_pinned_copies(profile: ScriptProfile) -> str:
    """Pinned memory, and copies that the host does not wait for."""
    words = trainers.trainer_advice(profile)
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
    return trainers.trainer_advice(profile).batch if profile.accepts_batch_size else "batch"


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
            profile, own, trainers.trainer_advice(profile).fewer_gathers, "exchanges"
        ) or at_location(own.line, text)
    if profile.gradient_exchanges > 1:
        return all_reduce_once(profile)
    return increase_batch(profile, f", or {trainers.trainer_advice(profile).accumulation}")


def all_reduce_once(profile: ScriptProfile) -> str:
    """Gradients of several batches summed before they are exchanged."""
    words = trainers.trainer_advice(profile)
    return at_location(words.location(profile, "step"), words.all_reduce_once)


def use_local_batch_norm(profile: ScriptProfile) -> str:
    """Statistics of a rank's own samples."""
    return trainers.trainer_advice(profile).batch_norm


def reduce_host_reads(profile: ScriptProfile) -> str:
    """Values that the host reads in every step."""
    read = profile.most_frequent("host_sync")
    text = ".item() in every step makes the host wait: read it every 50 steps"
    if read is None:
        return text
    return _library_advice(
        profile, read, trainers.trainer_advice(profile).fewer_reads, "reads"
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
    if place.package_line is None:
        return None
    why = f"{place.package_line} {verb} a value in every step"
    if trainers.trainer_advice(profile).has_setting_for(place):
        return at_location(profile.most_frequent_line("trainer"), f"{change} ({why})")
    return at_location(place.line, f"{why}: have it do so every 50 steps")


def use_process_per_device(profile: ScriptProfile, devices: int) -> str:
    """A process a device in place of one for all."""
    start, words = f"started by nfold run --devices {devices}", trainers.trainer_advice(profile)
    if profile.trainer:
        return at_location(
            profile.most_frequent_line("trainer") if words.launch else None, words.launch + start
        )
    if profile.parallel == "dp":
        place = profile.most_frequent_line("wrapper")
        return at_location(place, f"DistributedDataParallel in place of DataParallel, {start}")
    place = profile.most_frequent_line("model") or profile.most_frequent_line("step")
    share, by_itself = trainers.divide_work(profile), trainers.manual_all_reduce(profile)
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
    return at_loader(profile, trainers.trainer_advice(profile).sampler)


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


MIN_SAMPLED_S = 0.01
"""Of all looks at a rank together: fewer may have met anything."""
OTHER_RANK_FRACTION = 0.25
"""A rank is alone where no other one is so large a part of its time in its own code."""
NEARLY_ALL = 0.9
"""Of the time, which need not be told."""
ITERABLE_SAMPLER = "_InfiniteConstantSampler"
"""What PyTorch has in a sampler's place where an IterableDataset gives the batches."""
LocationsByRank = Sequence[Sequence[HostGapLocation]]


def with_gap_locations(
    design: ExperimentDesign, measurements: Iterable[Measurement]
) -> ExperimentDesign:
    """The ladder, with where each rank was in all these runs on N devices, too.

    What shared a process tree has seen the same. Independent copies are all of them rank 0.
    """
    if not design.gap_locations:
        return design
    same = (one for one in measurements if one.variant is None or not one.variant.independent)
    on_n = (one for one in same if len(one.ranks) == len(design.gap_locations))
    trees = {one.folder or one.id: one for one in on_n}
    ranks = zip(design.gap_locations, *(gap_locations(one) for one in trees.values()), strict=True)
    return dataclasses.replace(
        design, gap_locations=tuple(_sum_locations(chain(*rank)) for rank in ranks)
    )


def gap_locations(measurement: Measurement) -> tuple[tuple[HostGapLocation, ...], ...]:
    """Where each rank was in a run while it made no step."""
    return tuple(rank.host_gap_locations for rank in measurement.ranks)


def _sum_locations(locations: Iterable[HostGapLocation]) -> tuple[HostGapLocation, ...]:
    seconds: dict[HostGapLocation, float] = defaultdict(float)
    for spot in locations:
        seconds[dataclasses.replace(spot, seconds=0.0)] += spot.seconds
    return tuple(dataclasses.replace(spot, seconds=total) for spot, total in seconds.items())


@dataclass(frozen=True)
class GapLocation:
    """The line where most of such pauses is spent, a part of all; by ``rank`` alone, if it is."""

    location: HostGapLocation
    fraction: float
    rank: int | None

    def annotate(self, text: str) -> str:
        """The text, with what is called there and how large a part it is, if that need be told."""
        told = [self.location.callee] if self.location.callee else []
        told += [f"{self.fraction:.0%} of it"] if self.fraction < NEARLY_ALL else []
        return f"{text} ({', '.join(told)})" if told else text


def busiest_gap(
    ranks: LocationsByRank, when: HostGapKind, rank: int | None = None
) -> GapLocation | None:
    """Of the rank, or of the one that does most then; None where nobody has looked long enough."""
    each = [[spot for spot in spots if spot.kind == when] for spots in ranks]
    whole = [sum(spot.seconds for spot in spots) for spots in each]
    who = max(range(len(whole)), key=whole.__getitem__, default=0) if rank is None else rank
    if who >= len(whole) or whole[who] < MIN_SAMPLED_S:
        return None
    others = [seconds for other, seconds in enumerate(whole) if other != who]
    alone = bool(others) and max(others) < OTHER_RANK_FRACTION * whole[who]
    spot = max(each[who], key=lambda one: one.seconds)
    return GapLocation(spot, spot.seconds / whole[who], who if alone else None)


def shorten_epoch_boundary(
    profile: ScriptProfile, *, waits: bool, ranks: LocationsByRank = ()
) -> str:
    """Workers that stay, fewer first batches to wait for, less to do while no step is made.

    ``waits``: most of the time is waited for a first batch.
    """
    fed, text = training_loader(profile), _epoch_gap_advice(profile, ranks)
    if not fed.num_workers:
        return text
    if not fed.persistent_workers:
        stay = loader_setting(profile, "persistent_workers=True")
        return f"{stay}, and {text}" if waits else f"{text}; {stay}"
    if not waits:
        return text
    longer = (
        "one iterator for several epochs, counted in steps"
        if fed.sampler == ITERABLE_SAMPLER
        else "a sampler that goes through the data several times"
    )
    less = "less work a sample, which gains what input costs as well"
    return at_loader(profile, f"{longer} (every pass waits for its first batch), or {less}")


def _epoch_gap_advice(profile: ScriptProfile, ranks: LocationsByRank) -> str:
    found = busiest_gap(ranks, "between passes")
    text = _change_text(profile, found, "do less there, or less often")
    if found is None:
        return text
    if found.rank is not None:
        text += f", or not on rank {found.rank} alone, which the others wait for"
    return at_location(found.location.location, found.annotate(text))


def _change_text(profile: ScriptProfile, found: GapLocation | None, change: str) -> str:
    return (
        trainers.trainer_advice(profile).evaluate_less_often
        if found is None or profile.trainer
        else change
    )


def reduce_periodic_work(design: ExperimentDesign, period: float, cost_ms: float) -> str:
    """What comes after every so many steps, and takes so many milliseconds each time."""
    assert design.profile is not None
    found, text = busiest_gap(design.gap_locations, "after some steps"), f"{cost_ms:.0f} ms"
    divide = "divide it"
    if found is not None and found.rank is not None:
        text += f" of rank {found.rank}, which the others wait for,"
        divide = "divide it over the ranks"
    text += f" come after one step in {period:.0f}"
    change = _change_text(design.profile, found, "do that less often")
    return _at_line(design.profile, found, text, f"{change}, or {divide}")


def reduce_host_gap(design: ExperimentDesign, gap_ms: float) -> str:
    """What the host does after every step until it asks for the next batch, or has it."""
    assert design.profile is not None
    until = (
        "the next batch is asked for" if design.can_replay_input else "its model is called again"
    )
    text = f"{gap_ms:.1f} ms pass after every step before {until}"
    found, change = (
        busiest_gap(design.gap_locations, "after a step"),
        "do less there, or less often",
    )
    if not design.can_replay_input:
        change += " (a batch made there: in a DataLoader's workers)"
    return _at_line(design.profile, found, text, change)


def reduce_rank_host_gap(design: ExperimentDesign, rank: int, extra_ms: float) -> str:
    """The same of a rank that does more than others."""
    assert design.profile is not None
    text = f"rank {rank} does something else for {extra_ms:.1f} ms between two steps"
    found = busiest_gap(design.gap_locations, "after a step", rank)
    return _at_line(design.profile, found, text, "do that less often")


def _at_line(profile: ScriptProfile, found: GapLocation | None, text: str, change: str) -> str:
    if found is None:
        return at_location(profile.most_frequent_line("step"), f"{text}: {change}")
    return at_location(found.location.location, f"{found.annotate(text)}: {change}")
