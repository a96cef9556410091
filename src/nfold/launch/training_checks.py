"""Check from the samples of all ranks whether they train one model, each on samples of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean

from nfold.core.format import join_words
from nfold.core.measurement import (
    NO_GRADIENT_EXCHANGE,
    Caveat,
    ParameterState,
    RankSamples,
)

SAME_SAMPLES = "same_samples"
AUGMENTED_COPIES = "augmented_copies"
REPEATED_SAMPLES = "repeated_samples"
SAME_ORDER = "same_order"
PARAMETERS_DIFFER = "parameters_differ"
OUT_OF_STEP = "out_of_step"
UNEQUAL_EPOCHS = "unequal_epochs"
SAME_RANDOM_NUMBERS = "same_random_numbers"
SKIP_TOGETHER = "next: let all ranks skip together (all_reduce what they decide by)"
PART_NOT_EXCHANGED = "are not exchanged:"  # in the text about gradients of a part of the model
WHOLE_DATA = "whole_data"
ERROR_KINDS = (OUT_OF_STEP, PARAMETERS_DIFFER, SAME_SAMPLES, REPEATED_SAMPLES, SAME_ORDER)
"""Caveats that make a training wrong, the most serious first."""
TRAINING_KINDS = (*ERROR_KINDS, AUGMENTED_COPIES, UNEQUAL_EPOCHS, WHOLE_DATA)
"""The same, and caveats of which only the author knows whether they are faults."""
ROUNDING_TOLERANCE = 1e-5  # relative, of parameters: about a hundred roundings in fp32
MIN_BATCHES = 6  # of a rank, to recognise that batches repeat
REPEATED_FRACTION = 0.8  # of the batches of a rank
MIN_SHARED_SAMPLES = 3  # of two ranks, to recognise that their data sets differ
SAME_LABEL_FRACTION = 0.8  # of shared samples: fewer equal labels are chance


def training_caveats(ranks: Sequence[RankSamples]) -> list[Caveat]:
    """Return what is wrong, or may be wrong, with the training of these ranks."""
    checks: tuple[Callable[[Sequence[RankSamples]], Caveat | None], ...] = (
        check_epoch_lengths,
        check_same_samples,
        check_augmented_copies,
        check_repeated_batches,
        check_random_numbers,
        check_same_order,
        check_parameters,
    )
    return [caveat for check in checks if (caveat := check(ranks)) is not None]


def check_epoch_lengths(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Return a caveat if ranks make unequal numbers of steps in an epoch.

    A loop over epochs then hangs at the end of the first; one that counts steps does not.
    """
    lengths = {rank.rank: rank.batches_per_epoch for rank in ranks}
    if None in lengths.values() or len(ranks) < 2:
        return None
    if len(set(lengths.values())) > 1:
        named = join_words([f"{batches:,} on rank {rank}" for rank, batches in lengths.items()])
        text = (
            f"ranks have unequal numbers of batches in an epoch ({named}): a loop over epochs hangs at "
            "the end of the first; next: drop_last=True and a DistributedSampler, or Join"
        )
        return Caveat(kind=UNEQUAL_EPOCHS, text=text)
    for starts in zip(*(rank.epoch_starts for rank in ranks), strict=False):
        if len(set(starts)) > 1:
            named = join_words(
                [f"{s} on rank {r.rank}" for s, r in zip(starts, ranks, strict=True)]
            )
            text = (
                f"ranks are out of step: an epoch begins with step {named}, so one of them skips a "
                "step or makes one more; the others wait for it for ever when it has ended"
            )
            return Caveat(kind=OUT_OF_STEP, text=text)
    return _check_skipped_batches(ranks)


def _check_skipped_batches(ranks: Sequence[RankSamples]) -> Caveat | None:
    skipped = describe_skipped_batches(ranks)
    if not skipped:
        return None
    counts = [rank.skipped_batches or 0 for rank in ranks]
    text = (
        f"ranks are out of step: {skipped}; a rank that skips more ends its epoch "
        f"{max(counts) - min(counts)} steps early, and the others wait for it for ever; {SKIP_TOGETHER}"
    )
    return Caveat(kind=OUT_OF_STEP, text=text)


def describe_skipped_batches(ranks: Sequence[RankSamples]) -> str:
    """``batches were taken without a step, 0 on rank 0 and 2 on rank 1``; empty if as many on all."""
    skipped = {rank.rank: rank.skipped_batches for rank in ranks}
    if None in skipped.values() or len(set(skipped.values())) < 2:
        return ""
    named = join_words([f"{number} on rank {rank}" for rank, number in skipped.items()])
    return f"batches were taken without a step, {named}"


def check_same_samples(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Return a caveat if two ranks had the same samples: the work was not divided."""
    if _make_equal_batches(ranks):
        text = "all ranks make the same random batches; next: seed them by rank"
        return Caveat(kind=SAME_SAMPLES, text=text)
    if not _have_equal_samples(ranks) or _contents_differ(ranks):
        return None
    text = "ranks were fed the same samples: the work was not divided, images/s counts copies"
    return Caveat(kind=SAME_SAMPLES, text=text)


def check_augmented_copies(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Return a caveat if ranks had the same samples with different contents.

    Nobody but the author knows whether that is intended, as for several views of a sample.
    """
    if not _have_equal_samples(ranks) or not _contents_differ(ranks):
        return None
    text = (
        "all ranks train on the same samples, each with its own augmentation; next: a "
        "DistributedSampler, unless that is intended"
    )
    return Caveat(kind=AUGMENTED_COPIES, text=text)


def _have_equal_samples(ranks: Sequence[RankSamples]) -> bool:
    hashes = Counter(entry for rank in ranks for entry in rank.sample_hashes[:1] if entry[0])
    return any(times > 1 for times in hashes.values())


def _make_equal_batches(ranks: Sequence[RankSamples]) -> bool:
    """Return whether ranks without a DataLoader make equal batches, one after the other.

    A single batch that is used in every step is synthetic data.
    """
    batches = {rank.input_hashes for rank in ranks}
    several = len(ranks) > 1 and all(len(set(own)) >= MIN_BATCHES for own in batches)
    return several and len(batches) == 1 and not any(rank.sample_hashes for rank in ranks)


def _contents_differ(ranks: Sequence[RankSamples]) -> bool:
    """Return whether the model never got the same on two ranks: samples were augmented.

    The loop may augment what the DataLoader returns.
    """
    contents = [set(rank.input_hashes or rank.batch_hashes) for rank in ranks]
    return all(contents) and not set.intersection(*contents)


def data_sets_differ(ranks: Sequence[RankSamples]) -> bool | None:
    """Return whether ranks have data sets of their own; None if they share too few indices."""
    first, *others = [dict(rank.indexed_samples) for rank in ranks]
    for other in others:
        shared = first.keys() & other.keys()
        if len(shared) < MIN_SHARED_SAMPLES:
            return None
        if fmean(first[index] == other[index] for index in shared) >= SAME_LABEL_FRACTION:
            return False
    return True


def check_repeated_batches(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Return a caveat if a rank got most of its batches several times within an epoch."""
    for rank in ranks:
        counts = Counter(rank.batch_hashes or rank.input_hashes)
        total = counts.total()
        again = [times for times in counts.values() if times > 1]
        # A single batch that is used in every step is synthetic data.
        if total < MIN_BATCHES or len(again) < 2 or sum(again) < REPEATED_FRACTION * total:
            continue
        text = (
            f"rank {rank.rank} gets the same samples {round(total / len(counts))} times in an epoch"
        )
        return Caveat(kind=REPEATED_SAMPLES, text=text)
    return None


def check_random_numbers(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Return a caveat if the loops or data sets of all ranks draw the same random numbers.

    Nobody but the author knows whether noise must differ between ranks.
    """
    states = {rank.generator_states for rank in ranks}
    if len(ranks) < 2 or len(states) > 1 or _make_equal_batches(ranks):
        return None
    (common,) = states
    # At the start of an epoch, samplers draw too.
    if len(common) < 2 or len(set(common)) < len(common):
        return None
    text = (
        "all ranks draw the same random numbers (noise, augmentation) in every step, because they are "
        "seeded alike; next: torch.manual_seed(seed + rank) after the model is constructed, unless "
        "that is intended"
    )
    return Caveat(kind=SAME_RANDOM_NUMBERS, text=text)


def check_same_order(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Return a caveat if a sampler shuffles all epochs alike."""
    for rank in ranks:
        if any(before == after for before, after in pairwise(rank.sampler_epochs)):
            text = "every epoch has the same order: sampler.set_epoch(epoch) is not called"
            return Caveat(kind=SAME_ORDER, text=text)
    return None


def check_parameters(ranks: Sequence[RankSamples]) -> Caveat | None:
    """Return a caveat if the ranks end with different parameters.

    Either gradients were not exchanged, all or those of a part, or the initial parameters differ, or
    each rank changes its parameters in another way, or the ranks differ by rounding only.
    """
    sums = {rank.parameter_checksum for rank in ranks if rank.parameter_checksum}
    if len(sums) < 2:
        return None
    difference = _parameter_difference([rank.parameter_sample for rank in ranks])
    is_rounding = difference is not None and difference <= ROUNDING_TOLERANCE
    known = None if is_rounding else _describe_parts(ranks)
    if known is not None:
        return Caveat(kind=PARAMETERS_DIFFER, text=known)
    if difference is None:
        text = f"parameters differ between ranks at the end: {NO_GRADIENT_EXCHANGE}"
        return Caveat(kind=PARAMETERS_DIFFER, text=text)
    if is_rounding:
        text = (
            f"parameters of ranks differ by rounding ({difference:.0e} of them), though gradients are "
            "exchanged: each rank adds something of its own and takes it away again, or adds in "
            "another order; next: broadcast them now and then in long training"
        )
        return Caveat(kind="rounded_apart", text=text)
    text = (
        f"parameters differ between ranks at the end by {difference:.0e} of them, though gradients are "
        "exchanged: each rank changes them in its own way (noise, another learning rate)"
    )
    return Caveat(kind=PARAMETERS_DIFFER, text=text)


def _describe_parts(ranks: Sequence[RankSamples]) -> str | None:
    """Return which part of the model differs and why, None if that is not known.

    Parts that did not change since the first step are equal on all ranks for that reason.
    """
    states = [rank.parameter_states for rank in ranks if rank.parameter_states]
    if len(states) < len(ranks) or any(len(own) < 2 for own in states):
        return None
    begins, ends = [own[0] for own in states], [own[-1] for own in states]
    before, after = _differing_parts(begins), _differing_parts(ends)
    exchanged = all(rank.parameter_sample for rank in ranks)
    if before and exchanged:
        return (
            f"initial weights of {join_words(sorted(before))} differ between ranks and are never "
            "broadcast, though gradients are exchanged; next: broadcast them before the first "
            "step, or seed all ranks alike before the model is constructed"
        )
    initial = {part.name: part.sample for part in begins[0].parts}
    changed = {p.name for p in ends[0].parts if p.sample != initial.get(p.name)}
    equal = _shortest_names(changed - after, after)
    if before or not equal or not after:
        return None
    begin = min(part.trained_from for part in ends[0].parts if part.name in after)
    when = f"from step {begin} on" if begin else f"after step {ends[0].step}"
    return (
        f"gradients of {join_words(_shortest_names(after, changed - after))} {PART_NOT_EXCHANGED} their "
        f"parameters differ between ranks {when}, those of {join_words(equal)} do not"
    )


def _differing_parts(states: Sequence[ParameterState]) -> set[str]:
    checksums: dict[str, set[str]] = {}
    for state in states:
        for part in state.parts:
            checksums.setdefault(part.name, set()).add(part.checksum)
    return {name for name, found in checksums.items() if len(found) > 1}


def _shortest_names(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the shortest paths that contain all of ``names`` and none of ``others``."""
    taken = {path for name in others for path in _prefixes(name)}
    shortest = (next((p for p in _prefixes(name) if p not in taken), name) for name in names)
    return sorted(dict.fromkeys(shortest))


def _prefixes(path: str) -> list[str]:
    words = path.split(".")
    return [".".join(words[: n + 1]) for n in range(len(words))]


def _parameter_difference(samples: Sequence[Sequence[float]]) -> float | None:
    if not all(samples) or len({len(one) for one in samples}) > 1:
        return None
    size = math.sqrt(fmean(number**2 for one in samples for number in one))
    widest = max(max(numbers) - min(numbers) for numbers in zip(*samples, strict=True))
    return widest / size if size > 0 and math.isfinite(widest / size) else None
