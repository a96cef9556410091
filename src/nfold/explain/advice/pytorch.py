"""What to change in a script, with the line of user code, in the settings of its trainer."""

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
"""Per batch: fewer bytes are not samples."""
USE_NCCL = "init_process_group('nccl'): gloo sends what is on GPUs through the host"
USE_EXPANDABLE_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the launch command"


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
    """Return the profile of the DataLoader that feeds the training, or an empty profile."""
    return profile.loader or DataLoaderProfile()


def at_loader(profile: ScriptProfile, text: str) -> str:
    """Put the location of the training DataLoader before a text."""
    return at_location(trainers.trainer_advice(profile).location(profile, "loader"), text)


def loader_setting(profile: ScriptProfile, value: str) -> str:
    """Return the code that changes a setting of the training DataLoader."""
    return at_loader(profile, trainers.trainer_advice(profile).loader.format(value))


def wrapper_setting(profile: ScriptProfile, value: str) -> str:
    """Return the code that changes a setting of DistributedDataParallel."""
    words = trainers.trainer_advice(profile)
    return at_location(words.location(profile, "wrapper"), words.wrapper.format(value))


def num_workers_setting(profile: ScriptProfile, count: int) -> str:
    """Return the code that sets the number of loader workers."""
    return loader_setting(profile, f"num_workers={count}")


def speed_up_input(
    profile: ScriptProfile, sufficient_workers: int, tried_workers: Sequence[int] = ()
) -> str:
    """Advise on slow input if no measured number of workers helps.

    ``sufficient_workers`` should keep up with the step; ``tried_workers`` were measured.
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
    less = "less work per sample in the data set"
    if profile.device != "cpu":
        less += " (whole batches can be changed on the GPU)"
    if not tried_workers:
        return at_loader(profile, f"{less}, or another num_workers (fewer may be faster)")
    numbers = " and ".join(map(str, tried_workers))
    return at_loader(profile, f"{less} (num_workers={numbers}: no gain beyond the noise)")


def speed_up_reads(profile: ScriptProfile) -> str:
    """Advise on input that waits for storage."""
    fed = training_loader(profile)
    more = num_workers_setting(profile, 4 * (fed.num_workers or 1))
    text = f"{more} (waiting workers need no core), or keep the data in memory or on a local disk"
    read = profile.fetches
    if read is None or read.read_bytes < MIN_READ_BYTES * max(1, read.batches):
        return text
    of_batch, part = read.read_bytes / read.batches / 1e6, read.disk_bytes / read.read_bytes
    return f"{text}; a batch reads {of_batch:.2f} MB, {min(1.0, part):.0%} of it from a local disk"


def keep_memory_format(profile: ScriptProfile) -> str:
    """Advise one memory format; "" for copies inside a library, which users cannot change."""
    event = f"order on {profile.device.partition(':')[0]}"
    copies = profile.source_locations.get(event, ())
    own_lines = [copy.line for copy in copies if copy.package_line is None]
    if copies and not own_lines:
        return ""
    own = f" (images are channels_{'last' if profile.channels_last else 'first'})"
    kept = "keep one memory format: no .contiguous() after a permute in a step"
    text = kept + own * bool(profile.convolutions)
    return at_location(own_lines[0] if own_lines else profile.most_frequent_line("model"), text)


def use_channels_last(profile: ScriptProfile) -> str:
    """Advise channels_last, the native format of convolutions on tensor cores."""
    return at_location(profile.most_frequent_line("model"), "model and images in channels_last")


def compile_model(profile: ScriptProfile, mode: str) -> str:
    """Return the code that compiles the model; ``reduce-overhead`` uses CUDA graphs."""
    words = trainers.trainer_advice(profile)
    place = (
        profile.most_frequent_line("trainer")
        or profile.most_frequent_line("wrapper")
        or profile.most_frequent_line("model")
    )
    return at_location(place, words.compiled if mode == "default" else words.cuda_graphs)


def use_pinned_copies(profile: ScriptProfile) -> str:
    """Advise pinned memory and non-blocking copies."""
    words = trainers.trainer_advice(profile)
    moved = at_location(words.location(profile, "copy"), words.non_blocking_copy)
    if training_loader(profile).pin_memory:
        return moved
    if profile.batch_function is not None:
        return f"{at_location(profile.batch_function.defined_at, 'batches in pinned memory')} and {moved}"
    return f"{loader_setting(profile, 'pin_memory=True')} and {moved}"


def increase_batch(profile: ScriptProfile, alternative: str = "") -> str:
    """Advise a larger batch."""
    return at_loader(profile, f"a larger {_batch_setting(profile)}{alternative}")


def reduce_allocator_retries(profile: ScriptProfile) -> str:
    """Advise expandable segments or a smaller batch."""
    less = at_loader(profile, f"a smaller {_batch_setting(profile)}")
    return f"{USE_EXPANDABLE_SEGMENTS}, or {less} ({profile.alloc_retries:.1f} allocator retries a step)"


def _batch_setting(profile: ScriptProfile) -> str:
    return trainers.trainer_advice(profile).batch if profile.accepts_batch_size else "batch"


def disable_buffer_broadcast(profile: ScriptProfile) -> str:
    """Return the code that stops broadcasting buffers in every forward."""
    return wrapper_setting(profile, "broadcast_buffers=False")


def disable_unused_search(profile: ScriptProfile) -> str:
    """Return the code that stops the search for unused parameters."""
    return wrapper_setting(profile, "find_unused_parameters=False")


def reduce_collectives(profile: ScriptProfile) -> str:
    """Advise on collectives beyond those of the gradients."""
    own = profile.most_frequent("collective")
    if own is not None:
        text = "a collective in every step: call it every 50 steps or after the epoch"
        return _library_advice(
            profile, own, trainers.trainer_advice(profile).fewer_gathers, "exchanges"
        ) or at_location(own.line, text)
    if profile.gradient_exchanges > 1:
        return all_reduce_once(profile)
    return increase_batch(profile, f", or {trainers.trainer_advice(profile).accumulation}")


def all_reduce_once(profile: ScriptProfile) -> str:
    """Advise one all-reduce per optimizer step under gradient accumulation."""
    words = trainers.trainer_advice(profile)
    return at_location(words.location(profile, "step"), words.all_reduce_once)


def use_local_batch_norm(profile: ScriptProfile) -> str:
    """Advise BatchNorm instead of SyncBatchNorm."""
    return trainers.trainer_advice(profile).batch_norm


def reduce_host_reads(profile: ScriptProfile) -> str:
    """Advise on values that the host reads from the device in every step."""
    read = profile.most_frequent("host_sync")
    text = ".item() in every step makes the host wait: read it every 50 steps"
    if read is None:
        return text
    return _library_advice(
        profile, read, trainers.trainer_advice(profile).fewer_reads, "reads"
    ) or at_location(read.line, text)


def disable_anomaly_detection(profile: ScriptProfile) -> str:
    """Advise to switch off anomaly detection."""
    if profile.trainer == "lightning":
        return at_location(
            profile.most_frequent_line("trainer"), "Trainer(..., detect_anomaly=False)"
        )
    text = "anomaly detection checks every backward operator for NaN: use it for debugging only"
    return at_location(profile.most_frequent_line("anomaly"), text)


def _library_advice(
    profile: ScriptProfile, place: SourceLocation, change: str, verb: str
) -> str | None:
    if place.package_line is None:
        return None
    why = f"{place.package_line} {verb} a value in every step"
    if trainers.trainer_advice(profile).has_setting_for(place):
        return at_location(profile.most_frequent_line("trainer"), f"{change} ({why})")
    return at_location(place.line, f"{why}: do it every 50 steps")


def use_process_per_device(profile: ScriptProfile, devices: int) -> str:
    """Advise one process per device."""
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
    """Return an error if every rank visits the whole data set and the script counts epochs."""
    return None if training_loader(profile).cycled else _duplication_text(profile)


def duplicated_samples(profile: ScriptProfile) -> str | None:
    """Return a caveat if every rank visits the whole data set and the script counts steps."""
    text = _duplication_text(profile) if training_loader(profile).cycled else None
    return f"{text}; a training that counts steps instead of epochs loses nothing" if text else None


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
        f"every rank visits {samples} ({fed.sampler} divides nothing): an epoch on "
        f"{profile.world_size} devices is {profile.world_size} epochs",
    )


def divide_samples(profile: ScriptProfile) -> str:
    """Advise a sampler that divides the samples among ranks."""
    return at_loader(profile, trainers.trainer_advice(profile).sampler)


def reduce_host_contention(profile: ScriptProfile) -> str:
    """Advise fewer threads and loader workers."""
    fewer = (
        f" and {at_loader(profile, 'fewer num_workers')}"
        if training_loader(profile).num_workers
        else ""
    )
    return f"fewer threads per rank: OMP_NUM_THREADS=1 in the launch command{fewer}"


def limit_threads(profile: ScriptProfile, count: int) -> str:
    """Return the code or the variable that limits the threads of a rank."""
    where = profile.most_frequent_line("threads")
    if where is None:
        return f"OMP_NUM_THREADS={count} in the launch command"
    return f"{where}: torch.set_num_threads({count})"


MIN_SAMPLED_S = 0.01  # of all stack samples of a rank: fewer show nothing
OTHER_RANK_FRACTION = 0.25  # below this part of its time on every other rank, one rank is alone
NEARLY_ALL = 0.9  # a larger part is not printed
ITERABLE_SAMPLER = "_InfiniteConstantSampler"  # PyTorch's, of an IterableDataset
LocationsByRank = Sequence[Sequence[HostGapLocation]]


def with_gap_locations(
    design: ExperimentDesign, measurements: Iterable[Measurement]
) -> ExperimentDesign:
    """Return the design with the host gap locations of these measurements added.

    Interleaved trials share their samples. Replicas are left aside: all of them are rank 0.
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
    """Return, for each rank, where its host was between steps."""
    return tuple(rank.host_gap_locations for rank in measurement.ranks)


def _sum_locations(locations: Iterable[HostGapLocation]) -> tuple[HostGapLocation, ...]:
    seconds: dict[HostGapLocation, float] = defaultdict(float)
    for spot in locations:
        seconds[dataclasses.replace(spot, seconds=0.0)] += spot.seconds
    return tuple(dataclasses.replace(spot, seconds=total) for spot, total in seconds.items())


@dataclass(frozen=True)
class GapLocation:
    """The line with most of the host gap time, its fraction, and the rank if only one has it."""

    location: HostGapLocation
    fraction: float
    rank: int | None

    def annotate(self, text: str) -> str:
        """Add to a text what is called there, and the fraction if it is not nearly all."""
        facts = [self.location.callee] if self.location.callee else []
        facts += [f"{self.fraction:.0%} of it"] if self.fraction < NEARLY_ALL else []
        return f"{text} ({', '.join(facts)})" if facts else text


def busiest_gap(
    ranks: LocationsByRank, when: HostGapKind, rank: int | None = None
) -> GapLocation | None:
    """Return the location with most gap time, of one rank or of the busiest; None without enough
    samples.
    """
    each = [[spot for spot in spots if spot.kind == when] for spots in ranks]
    totals = [sum(spot.seconds for spot in spots) for spots in each]
    busiest = max(range(len(totals)), key=totals.__getitem__, default=0) if rank is None else rank
    if busiest >= len(totals) or totals[busiest] < MIN_SAMPLED_S:
        return None
    others = [seconds for other, seconds in enumerate(totals) if other != busiest]
    is_alone = bool(others) and max(others) < OTHER_RANK_FRACTION * totals[busiest]
    spot = max(each[busiest], key=lambda one: one.seconds)
    return GapLocation(spot, spot.seconds / totals[busiest], busiest if is_alone else None)


def shorten_epoch_boundary(
    profile: ScriptProfile, *, waits: bool, ranks: LocationsByRank = ()
) -> str:
    """Advise on the time between epochs; ``waits``: most of it is spent on a first batch."""
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
    less = "less work per sample, which also shortens the input"
    return at_loader(profile, f"{longer} (every epoch waits for its first batch), or {less}")


def _epoch_gap_advice(profile: ScriptProfile, ranks: LocationsByRank) -> str:
    found = busiest_gap(ranks, "between passes")
    text = _change_text(profile, found, "do less there, or less often")
    if found is None:
        return text
    if found.rank is not None:
        text += f", or not on rank {found.rank} alone while the others wait"
    return at_location(found.location.location, found.annotate(text))


def _change_text(profile: ScriptProfile, found: GapLocation | None, change: str) -> str:
    return (
        trainers.trainer_advice(profile).evaluate_less_often
        if found is None or profile.trainer
        else change
    )


def reduce_periodic_work(design: ExperimentDesign, period: float, cost_ms: float) -> str:
    """Advise on work of ``cost_ms`` after every ``period`` steps."""
    assert design.profile is not None
    found, text = busiest_gap(design.gap_locations, "after some steps"), f"{cost_ms:.0f} ms"
    divide = "divide it"
    if found is not None and found.rank is not None:
        text += f" on rank {found.rank}, while the others wait,"
        divide = "divide it over the ranks"
    text += f" every {period:.0f} steps"
    change = _change_text(design.profile, found, "do that less often")
    return _at_line(design.profile, found, text, f"{change}, or {divide}")


def reduce_host_gap(design: ExperimentDesign, gap_ms: float) -> str:
    """Advise on host work after every step."""
    assert design.profile is not None
    until = (
        "the next batch is requested" if design.can_replay_input else "the model is called again"
    )
    text = f"{gap_ms:.1f} ms pass after every step before {until}"
    found, change = (
        busiest_gap(design.gap_locations, "after a step"),
        "do less there, or less often",
    )
    if not design.can_replay_input:
        change += " (if it makes batches: use DataLoader workers)"
    return _at_line(design.profile, found, text, change)


def reduce_rank_host_gap(design: ExperimentDesign, rank: int, extra_ms: float) -> str:
    """Advise on host work of one rank after every step."""
    assert design.profile is not None
    text = f"rank {rank} spends {extra_ms:.1f} ms outside of training between steps"
    found = busiest_gap(design.gap_locations, "after a step", rank)
    return _at_line(design.profile, found, text, "do that less often")


def _at_line(profile: ScriptProfile, found: GapLocation | None, text: str, change: str) -> str:
    if found is None:
        return at_location(profile.most_frequent_line("step"), f"{text}: {change}")
    return at_location(found.location.location, f"{found.annotate(text)}: {change}")
