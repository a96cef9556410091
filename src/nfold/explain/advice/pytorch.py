"""What to change in a script, with the line of user code, in the settings of its trainer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nfold.core.format import pluralize
from nfold.core.measurement import STARTS_WORKERS, Caveat, HostGapKind, HostGapLocation, Measurement
from nfold.core.script_profile import ScriptProfile, SourceLocation
from nfold.explain.advice.trainers import divide_work, manual_all_reduce, trainer_advice
from nfold.explain.design import ExperimentDesign
from nfold.launch.training_checks import WHOLE_DATA

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


def at_event(profile: ScriptProfile, event: str, text: str) -> str:
    """Put the line to change for an event before a text: that of the trainer if it has a setting."""
    return at_location(trainer_advice(profile).location(profile, event), text)


def loader_setting(profile: ScriptProfile, value: str) -> str:
    return at_event(profile, "loader", trainer_advice(profile).loader.format(value))


def wrapper_setting(profile: ScriptProfile, value: str) -> str:
    return at_event(profile, "wrapper", trainer_advice(profile).wrapper.format(value))


def num_workers_setting(profile: ScriptProfile, count: int) -> str:
    return loader_setting(profile, f"num_workers={count}")


def speed_up_input(
    profile: ScriptProfile, sufficient_workers: int, tried_workers: Sequence[int] = ()
) -> str:
    """Advise on slow input if no measured number of workers helps.

    ``sufficient_workers``, at least 1, should keep up with the step; ``tried_workers`` were measured.
    """
    loader, function = profile.training_loader, profile.batch_function
    if loader.renewed_at is not None:
        workers = pluralize(loader.num_workers, "worker")
        costs = f"starts {workers}" if loader.num_workers else "draws a new order"
        return at_location(
            loader.renewed_at,
            "one iterator for all steps of an epoch (for batch in loader): a new one in every step "
            f"{costs} for one batch",
        )
    if function is not None:
        unless = ", unless they depend on what the model did" if profile.accumulation > 1 else ""
        return at_location(
            function.defined_at,
            f"less work in {function.call_text}, or a DataLoader, whose workers make the next "
            f"batches while the device computes{unless}",
        )
    if not tried_workers and sufficient_workers > loader.num_workers:
        return num_workers_setting(profile, max(2, sufficient_workers))
    less = "less work per sample in the data set"
    if profile.device != "cpu":
        less += " (whole batches can be changed on the GPU)"
    other = ", or another num_workers (fewer may be faster)"
    if tried_workers:
        numbers = " and ".join(map(str, sorted(tried_workers)))
        other = f" (num_workers={numbers}: no gain beyond the noise)"
    return at_event(profile, "loader", less + other)


def speed_up_reads(profile: ScriptProfile) -> str:
    """Advise on input that waits for storage."""
    more = num_workers_setting(profile, 4 * (profile.training_loader.num_workers or 1))
    text = f"{more} (waiting workers need no core), or keep the data in memory or on a local disk"
    read = profile.fetches
    if read is None or read.read_bytes < MIN_READ_BYTES * max(1, read.batches):
        return text
    of_batch, part = read.read_bytes / read.batches / 1e6, read.disk_bytes / read.read_bytes
    return f"{text}; a batch reads {of_batch:.2f} MB, {min(1.0, part):.0%} of it from a local disk"


def _format_copies(profile: ScriptProfile) -> Sequence[SourceLocation]:
    return profile.source_locations.get(f"order on {profile.device.partition(':')[0]}", ())


def format_changes(profile: ScriptProfile) -> list[str]:
    """Return the lines of the script that change the memory format of a tensor."""
    return [copy.line for copy in _format_copies(profile) if copy.package_line is None]


def keep_memory_format(profile: ScriptProfile) -> str:
    """Advise one memory format; "" for copies inside a library, which users cannot change."""
    own_lines = format_changes(profile)
    if _format_copies(profile) and not own_lines:
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
    words = trainer_advice(profile)
    lines = map(profile.most_frequent_line, ("trainer", "wrapper", "model"))
    code = words.compiled if mode == "default" else words.cuda_graphs
    return at_location(next(filter(None, lines), None), code)


def use_pinned_copies(profile: ScriptProfile) -> str:
    moved = at_event(profile, "copy", trainer_advice(profile).non_blocking_copy)
    if profile.training_loader.pin_memory:
        return moved
    pinned = loader_setting(profile, "pin_memory=True")
    if profile.batch_function is not None:
        pinned = at_location(profile.batch_function.defined_at, "batches in pinned memory")
    return f"{pinned} and {moved}"


def increase_batch(profile: ScriptProfile, alternative: str = "") -> str:
    return at_event(profile, "loader", f"a larger {_batch_setting(profile)}{alternative}")


def reduce_allocator_retries(profile: ScriptProfile) -> str:
    less = at_event(profile, "loader", f"a smaller {_batch_setting(profile)}")
    return f"{USE_EXPANDABLE_SEGMENTS}, or {less} ({profile.alloc_retries:.1f} allocator retries a step)"


def _batch_setting(profile: ScriptProfile) -> str:
    return trainer_advice(profile).batch if profile.accepts_batch_size else "batch"


def disable_buffer_broadcast(profile: ScriptProfile) -> str:
    return wrapper_setting(profile, "broadcast_buffers=False")


def disable_unused_search(profile: ScriptProfile) -> str:
    return wrapper_setting(profile, "find_unused_parameters=False")


def reduce_collectives(profile: ScriptProfile) -> str:
    """Advise on collectives beyond those of the gradients, which a script may exchange itself."""
    own, words = profile.most_frequent("collective"), trainer_advice(profile)
    exchanges_itself = profile.parallel == "other" and profile.exchanges_all_gradients
    if own is not None and not exchanges_itself:
        text = "a collective in every step: call it every 50 steps or after the epoch"
        if not profile.source_locations.keys().isdisjoint(("gathered_pairs", "gathered_work")):
            text = "the loss needs samples of all ranks: gather them as one tensor, in bf16"
        by_library = _library_advice(profile, own, words.fewer_gathers, "exchanges")
        return by_library or at_location(own.line, text)
    if profile.gradient_exchanges > 1:
        return all_reduce_once(profile)
    return increase_batch(profile, f", or {words.accumulation}")


def all_reduce_once(profile: ScriptProfile) -> str:
    """Advise one all-reduce per optimizer step under gradient accumulation."""
    return at_event(profile, "step", trainer_advice(profile).all_reduce_once)


def reduce_host_reads(profile: ScriptProfile) -> str:
    """Advise on values that the host reads from the device in every step."""
    read = profile.most_frequent("host_sync")
    text = ".item() in every step makes the host wait: read it every 50 steps"
    if read is None:
        return text
    by_library = _library_advice(profile, read, trainer_advice(profile).fewer_reads, "reads")
    return by_library or at_location(read.line, text)


def disable_anomaly_detection(profile: ScriptProfile) -> str:
    event = "anomaly"
    text = "anomaly detection checks every backward operator for NaN: use it for debugging only"
    if profile.trainer == "lightning":
        event, text = "trainer", "Trainer(..., detect_anomaly=False)"
    return at_location(profile.most_frequent_line(event), text)


def _library_advice(
    profile: ScriptProfile, place: SourceLocation, change: str, verb: str
) -> str | None:
    if place.package_line is None:
        return None
    why = f"{place.package_line} {verb} a value in every step"
    if trainer_advice(profile).has_setting_for(place):
        return at_location(profile.most_frequent_line("trainer"), f"{change} ({why})")
    return at_location(place.line, f"{why}: do it every 50 steps")


def use_process_per_device(profile: ScriptProfile, devices: int) -> str:
    start, words = f"started by nfold run --devices {devices}", trainer_advice(profile)
    if profile.trainer:
        place = profile.most_frequent_line("trainer") if words.launch else None
        return at_location(place, words.launch + start)
    if profile.parallel == "dp":
        place = profile.most_frequent_line("wrapper")
        return at_location(place, f"DistributedDataParallel in place of DataParallel, {start}")
    place = profile.most_frequent_line("model") or profile.most_frequent_line("step")
    share, by_itself = divide_work(profile), manual_all_reduce(profile)
    if by_itself:
        return at_location(place, f"dist.all_reduce() of {by_itself}, {share}, {start}")
    return at_location(place, words.launch.format(share) + start)


def duplicated_epochs(profile: ScriptProfile) -> str | None:
    """Return an error if every rank visits the whole data set."""
    fed = profile.training_loader
    if fed.shards_dataset is not False or profile.world_size < 2 or profile.slices_batches:
        return None
    samples = f"all {fed.dataset_size:,} samples" if fed.dataset_size else "the whole data set"
    return at_location(
        fed.created_at,
        f"every rank visits {samples} ({fed.sampler} divides nothing): an epoch on "
        f"{profile.world_size} devices is {profile.world_size} epochs",
    )


def may_visit_whole_data(profile: ScriptProfile) -> Caveat | None:
    """Return a caveat for a sampler without shards, of which nobody knows what its data set holds."""
    error = duplicated_epochs(profile)
    if error is None:
        return None
    return Caveat(kind=WHOLE_DATA, text=f"{error}, unless each rank has a data set of its own")


def reduce_host_contention(profile: ScriptProfile) -> str:
    text = "fewer threads per rank: OMP_NUM_THREADS=1 in the launch command"
    if profile.training_loader.num_workers:
        text += f" and {at_event(profile, 'loader', 'fewer num_workers')}"
    return text


def restore_affinity(profile: ScriptProfile) -> str:
    """Advise on processes that something has bound to too few cores."""
    found = profile.most_frequent("affinity")
    cores = "one core" if profile.shared_cores == 1 else f"{profile.shared_cores} cores"
    who = f" by {found.package_line}" if found is not None and found.package_line else ""
    return at_location(
        profile.most_frequent_line("affinity"),
        f"all ranks and their loader workers are bound to {cores}{who}: restore "
        "os.sched_setaffinity() after that",
    )


def limit_threads(profile: ScriptProfile, count: int) -> str:
    """Return the code or the variable that limits the threads of a rank."""
    where = profile.most_frequent_line("threads")
    if where is None:
        return f"OMP_NUM_THREADS={count} in the launch command"
    return f"{where}: torch.set_num_threads({count})"


def reduce_gradient_bytes(profile: ScriptProfile, *, half_tried: bool = False) -> str:
    """Advise on gradient bytes; ``half_tried``: half of them was measured to be no faster."""
    if profile.uses_fsdp:
        return (
            "shard less (reshard_after_forward=False), or not at all: DistributedDataParallel, if "
            "the model fits a device"
        )
    if profile.parallel != "ddp":
        own = profile.most_frequent("collective")
        by_hand = profile.parallel == "other" and own is not None and own.package_line is None
        text = f"{_use_ddp(profile)}; or " * by_hand
        line = own.line if own is not None else None
        return at_location(line, f"{text}send less: bf16, or less often")
    if profile.sparse_gradient_bytes:
        size = f"{profile.sparse_gradient_bytes / 1e6:,.2f} MB"
        return at_event(
            profile,
            "wrapper",
            "every rank gathers the sparse gradients of all ranks; sparse=False all-reduces "
            f"{size} per step instead",
        )
    setting = halve_gradient_bytes(profile)
    if setting and not half_tried:
        return setting
    why = " (half of the bytes: no gain beyond the noise)" if half_tried else ""
    return at_event(profile, "wrapper", f"{trainer_advice(profile).send_less_often}{why}")


def halve_gradient_bytes(profile: ScriptProfile) -> str:
    """Return the code that halves the gradient bytes, "" without such a setting."""
    code, kind = trainer_advice(profile).half_gradients, profile.compressed_gradient_type
    if not (code and kind):
        return ""
    return at_event(profile, "wrapper", code.format(kind, kind.upper()))


def _use_ddp(profile: ScriptProfile) -> str:
    each = max((one.per_step for one in profile.collectives), default=0.0)
    many = f" ({each:.0f} collectives per step here)" * (each > 1)
    return f"DistributedDataParallel, which all-reduces buckets during backward{many}"


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
    trees = {
        one.folder or one.id: gap_locations(one)
        for one in measurements
        if (one.variant is None or not one.variant.independent)
        and len(one.ranks) == len(design.gap_locations)
    }
    totals: list[dict[HostGapLocation, float]] = [{} for _ in design.gap_locations]
    for found in (design.gap_locations, *trees.values()):
        for total, spots in zip(totals, found, strict=True):
            for spot in spots:
                place = dataclasses.replace(spot, seconds=0.0)
                total[place] = total.get(place, 0.0) + spot.seconds
    summed = (
        tuple(dataclasses.replace(place, seconds=s) for place, s in total.items())
        for total in totals
    )
    return dataclasses.replace(design, gap_locations=tuple(summed))


def gap_locations(measurement: Measurement) -> tuple[tuple[HostGapLocation, ...], ...]:
    return tuple(rank.host_gap_locations for rank in measurement.ranks)


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
    fed, found = profile.training_loader, busiest_gap(ranks, "between passes")
    text = _change_text(profile, found, "do less there, or less often")
    if found is not None:
        if found.rank is not None:
            text += f", or not on rank {found.rank} alone while the others wait"
        text = at_location(found.location.location, found.annotate(text))
    if found is not None and found.location.callee == STARTS_WORKERS:
        return _keep_workers(profile, found)
    if not fed.num_workers:
        return text
    if not fed.persistent_workers:
        stay = loader_setting(profile, "persistent_workers=True")
        return f"{stay}, and {text}" if waits else f"{text}; {stay}"
    if not waits:
        return text
    longer = "a sampler that goes through the data several times"
    if fed.sampler == ITERABLE_SAMPLER:
        longer = "one iterator for several epochs, counted in steps"
    less = "less work per sample, which also shortens the input"
    return at_event(
        profile, "loader", f"{longer} (every epoch waits for its first batch), or {less}"
    )


def _keep_workers(profile: ScriptProfile, found: GapLocation) -> str:
    line, fed = found.location.location, profile.training_loader
    part = f" ({found.fraction:.0%} of it)" if found.fraction < NEARLY_ALL else ""
    if fed.num_workers and not fed.persistent_workers:
        stay = loader_setting(profile, "persistent_workers=True")
        return f"{stay}; {line} starts loader workers in every epoch{part}"
    return at_location(
        line, f"DataLoader(..., persistent_workers=True); this line starts workers every time{part}"
    )


def _change_text(profile: ScriptProfile, found: GapLocation | None, change: str) -> str:
    own = found is not None and not profile.trainer
    return change if own else trainer_advice(profile).evaluate_less_often


def reduce_periodic_work(design: ExperimentDesign, period: float, cost_ms: float) -> str:
    """Advise on work of ``cost_ms`` after every ``period`` steps."""
    found, text = busiest_gap(design.gap_locations, "after some steps"), f"{cost_ms:.0f} ms"
    divide = "divide it"
    if found is not None and found.rank is not None:
        text += f" on rank {found.rank}, while the others wait,"
        divide = "divide it over the ranks"
    change = _change_text(design.facts, found, "do that less often")
    return _at_line(design, found, f"{text} every {period:.0f} steps", f"{change}, or {divide}")


def reduce_host_gap(design: ExperimentDesign, gap_ms: float) -> str:
    """Advise on host work after every step."""
    until, change = "the next batch is requested", "do less there, or less often"
    if not design.can_replay_input:
        until = "the model is called again"
        change += " (if it makes batches: use DataLoader workers)"
    found = busiest_gap(design.gap_locations, "after a step")
    return _at_line(design, found, f"{gap_ms:.1f} ms pass after every step before {until}", change)


def reduce_rank_host_gap(design: ExperimentDesign, rank: int, extra_ms: float) -> str:
    """Advise on host work of one rank after every step."""
    text = f"rank {rank} spends {extra_ms:.1f} ms outside of training between steps"
    found = busiest_gap(design.gap_locations, "after a step", rank)
    return _at_line(design, found, text, "do that less often")


def _at_line(design: ExperimentDesign, found: GapLocation | None, text: str, change: str) -> str:
    if found is not None:
        return at_location(found.location.location, f"{found.annotate(text)}: {change}")
    return at_location(design.facts.most_frequent_line("step"), f"{text}: {change}")


def unknown_epochs(profile: ScriptProfile) -> str | None:
    """Return an error if every rank visits the whole data set, perhaps in passes that never end."""
    if not profile.training_loader.in_generator or duplicated_epochs(profile) is None:
        return None
    return at_event(
        profile,
        "generator",
        "a generator iterates over a DataLoader that gives every rank all samples: whether the "
        "training counts steps or epochs is not known; next: a DistributedSampler, or, if it counts "
        "steps, nfold.batches() around the generator",
    )
