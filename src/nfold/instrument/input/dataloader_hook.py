"""What DataLoaders give to a training loop: counted, timed, and where asked for, replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data import dataloader as module

from nfold.core.errors import Unsupported
from nfold.core.script_profile import DataLoaderProfile
from nfold.core.source_location import current_user_line, user_stack
from nfold.engines.base import Task
from nfold.engines.interleaver import ActiveVariant
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.input import epoch_passes
from nfold.instrument.input.batch_tensors import (
    BatchReplay,
    DeviceTransferTracker,
    sample_count,
    sample_hash,
)
from nfold.instrument.input.epoch_passes import (
    CREATION_LINES_ATTRIBUTE,
    PASS_ATTRIBUTE,
    CompanionLoaders,
    EpochPass,
    InstrumentedIterator,
    full_epoch_length,
    is_first_pass,
    length_or_none,
    repeats_epochs,
    same_creation_line,
    same_dataset,
    wrap_next_index,
    wrap_one_cycle_step,
)
from nfold.instrument.input.fetch_times import WeakIdentityDict
from nfold.instrument.rank_environment import computes_slice


class DataLoaderHook:
    """All streams of a process, and which of them feed the training.

    A DataLoader feeds the training if a step followed on one of its batches while the script
    warmed up, or if it stands in the place of such a one: some scripts make theirs anew for every
    epoch. ``prepare`` gets each before it is iterated; ``replay`` makes what gives the first
    batches again, in the way that is left out now. ``listener`` is told of passes, and of batches
    that feed no training. ``calm`` waits until workers are idle, before batches are given again in
    the place of real ones: those steps would have the cores' contention, and nobody its cost.
    """

    def __init__(
        self,
        prepare: Callable[[Any], None],
        new_replay: Callable[[], BatchReplay],
        variant: ActiveVariant,
        listener: EpochListener,
        *,
        wait_for_idle_workers: Callable[[], None],
    ) -> None:
        self._prepare = prepare
        self._variant = variant
        self._always_real = variant.is_baseline("input")
        self.new_replay = new_replay
        self._listener = listener
        self.on_batch_request = listener.on_batch_request
        self._wait_for_idle_workers = wait_for_idle_workers
        self._creation_lines: WeakIdentityDict[str] = WeakIdentityDict()
        self.transfers = DeviceTransferTracker()
        self.replayed_index: int | None = None
        """Which of the first batches was given last, None for a real one."""
        self._replays: dict[tuple[int, str], BatchReplay] = {}
        self._training: dict[int, Any] = {}
        self._companions = CompanionLoaders()
        self._last_loader: Any = None
        self._workers_active = False
        self._pending: dict[int, StepInput] = {}
        self.in_warm_up = True
        self.steps = 0
        self.epochs_completed = 0
        self.first_waits_s: list[float] = []

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Stand between every DataLoader and its loop."""
        feed = self

        def iterate(usual: Any) -> Any:
            return lambda loader: feed.iterate(loader, usual)

        patches.put(DataLoader, "__iter__", iterate)
        patches.put(DataLoader, "__init__", self._wrap_loader_init)
        patches.put(OneCycleLR, "step", wrap_one_cycle_step)
        warm_up.put(module._BaseDataLoaderIter, "_next_index", wrap_next_index)

    @property
    def loader(self) -> Any:
        """The DataLoader that feeds the training, None where there is none."""
        return next(reversed(self._training.values()), None)

    def creation_line(self, loader: Any) -> str | None:
        """Where the user's code made the loader, or the first one over the same data set."""
        return self._creation_lines.get(loader.dataset)

    @property
    def companion_loaders(self) -> tuple[Any, ...]:
        """Others that give a batch in every step, too."""
        return self._companions.all

    def feeds_epochs(self, loader: Any) -> bool:
        """Whether steps followed on the loader's batches, and its passes are epochs."""
        return id(loader) in self._training

    def _feeds_training(self, loader: Any) -> bool:
        return self.feeds_epochs(loader) or loader in self._companions

    def end_warm_up(self) -> None:
        """The warm-up is over. Of several the longest has epochs: a shorter one begins again."""
        self.in_warm_up = False
        self._companions.end_warm_up()
        if self.loader is None:
            return
        longest = max((self.loader, *self.companion_loaders), key=full_epoch_length)
        if longest in self._companions:
            self._companions.replace(longest, self.loader)
            del self._training[id(self.loader)]
            self._training[id(longest)] = longest

    @property
    def replays(self) -> tuple[BatchReplay, ...]:
        """What gives first batches again."""
        return tuple(self._replays.values())

    def iterate(
        self, loader: Any, original_iter: Callable[[Any], Iterator[Any]]
    ) -> InstrumentedIterator:
        """A new pass over the loader."""
        if is_first_pass(loader):
            # What is pending under its number is of a loader that is no more.
            self._pending.pop(id(loader), None)
            if torch.is_grad_enabled() and not self._replace_companion(loader):
                self._replace_predecessor(loader, same_dataset_only=True)
        else:
            self._abandon_pass(loader)
        if loader not in self._companions:
            self._listener.on_pass_start(feeds_training=self.feeds_epochs(loader))
        stream = InstrumentedIterator(loader, lambda: original_iter(loader), self)
        stream.epoch_pass.steps_before = self.steps
        if self._replay_for(loader):
            self._prepare(loader)
        else:
            self._real_iterator(stream)
        return stream

    def _abandon_pass(self, loader: Any) -> None:
        before: EpochPass = vars(loader)[PASS_ATTRIBUTE]
        if before.batches and (before.is_over or self.steps > before.steps_before):
            self.on_pass_end(loader, before)
        else:
            self._pending.pop(id(loader), None)

    def _replace_predecessor(self, loader: Any, *, same_dataset_only: bool) -> None:
        made_there = (old for old in self._training.values() if same_creation_line(old, loader))
        alike = (old for old in made_there if same_dataset(old, loader))
        old = next(alike if same_dataset_only else made_there, None)
        if old is None:
            return
        self._abandon_pass(old)
        del self._training[id(old)]
        self._training[id(loader)] = loader
        self._move_replays(loader, old)

    def _replace_companion(self, loader: Any) -> bool:
        old = self._companions.replace_predecessor(loader)
        if old is not None:
            self._move_replays(loader, old)
        return old is not None

    def _move_replays(self, loader: Any, predecessor: Any) -> None:
        for kind in [kind for number, kind in self._replays if number == id(predecessor)]:
            self._replays[id(loader), kind] = self._replays.pop((id(predecessor), kind))

    def _replay_for(self, loader: Any) -> BatchReplay | None:
        return self._replays.get((id(loader), self._variant.current.input))

    def _real_iterator(self, iterator: InstrumentedIterator) -> Iterator[Any]:
        if not iterator.is_started:
            loader, iterator.is_started = iterator.loader, True
            if torch.is_grad_enabled() and (not self._training or self._feeds_training(loader)):
                self._prepare(loader)
            iterator.source = iterator.make_iterator()
        return iterator.source

    def _endless_batches(self, iterator: InstrumentedIterator) -> Iterator[Any]:
        more = True
        while more:
            more = False
            for batch in self._real_iterator(iterator):
                more = True
                yield batch
            iterator.is_started = False

    def next_batch(self, iterator: InstrumentedIterator) -> Any:
        """The next batch of a pass: the real one, or a first one again."""
        loader = iterator.loader
        gives = self._feeds_training(loader)
        if gives:
            self.on_batch_request()
        if not gives or self._always_real:
            return next(iterator.source)
        length = length_or_none(loader)
        ends = not repeats_epochs(loader) or self.steps == iterator.epoch_pass.steps_before
        if ends and length is not None and iterator.epoch_pass.batches >= length:
            raise StopIteration
        if self._variant.current.input == "real":
            self._workers_active, self.replayed_index = True, None
            return next(self._real_iterator(iterator))
        found = self._start_replay(iterator, length)
        if self._workers_active and self._variant.interleaved:
            self._wait_for_idle_workers()
        self._workers_active = False
        given = found.next()
        self.replayed_index = found.index
        return given

    def _start_replay(self, iterator: InstrumentedIterator, length: int | None) -> BatchReplay:
        loader = iterator.loader
        found = self._replay_for(loader)
        if found is None:
            found, self._workers_active = self.new_replay(), True
            if self._variant.interleaved:
                found.collect(self._endless_batches(iterator), length)
            else:
                given = [] if iterator.first_batch is None else [iterator.first_batch]
                found.collect(chain(given, iterator.source), length)
                # The real iterator goes, and its workers with it.
                iterator.source = iter(())
            self._replays[id(loader), self._variant.current.input] = found
        return found

    def on_batch(self, iterator: InstrumentedIterator, batch: Any, wait_s: float) -> None:
        """Note one batch."""
        taken = self._pending.setdefault(id(iterator.loader), StepInput())
        taken.samples += sample_count(batch) or batch_size_of(iterator.loader) or 0
        taken.batches += 1
        taken.wait_s += wait_s
        if self.in_warm_up:
            taken.sample_hash += sample_hash(batch, iterator.take_indices())
            iterator.first_batch = batch if iterator.first_batch is None else iterator.first_batch
            self.transfers.record_batch(batch)
            self._companions.record_batch(iterator.loader)
        if self._last_loader is None or torch.is_grad_enabled():
            # An evaluation may come between a batch and the step on it.
            self._last_loader = iterator.loader
        if not self._feeds_training(iterator.loader):
            self._listener.on_other_batch()
        elif iterator.epoch_pass.batches == 1 and self.feeds_epochs(iterator.loader):
            self.first_waits_s.append(wait_s)
            if iterator.loader.num_workers and self._variant.current.input == "real":
                self._listener.on_first_batch()

    def on_pass_end(self, loader: Any, epoch_pass: EpochPass) -> None:
        """Note the end of a pass, once; a loop that counts its batches asks for no more of them."""
        ended, epoch_pass.is_over = not epoch_pass.is_over, True
        if ended and self.feeds_epochs(loader):
            self.epochs_completed += 1
            self._listener.on_pass_end()

    def take_step_input(self) -> StepInput:
        """What fed the step that has just been made."""
        self.steps += 1
        if self.in_warm_up and self._last_loader is not None:
            self._training[id(self._last_loader)] = self._last_loader
            self._companions.on_step(self._training)
        elif self._last_loader is not None and not self._pending.keys() & self._training.keys():
            self._replace_predecessor(self._last_loader, same_dataset_only=False)
        fed = [taken for key, taken in self._pending.items() if key in self._training]
        beside = [
            self._pending[id(one)] for one in self.companion_loaders if id(one) in self._pending
        ]
        self._pending, self._last_loader = {}, None
        return merge_inputs(fed, beside)

    def _wrap_loader_init(self, usual: Any) -> Any:
        @functools.wraps(usual)
        def construct(loader: Any, /, *args: Any, **kwargs: Any) -> None:
            usual(loader, *args, **kwargs)
            found = current_user_line()
            if found is not None:
                vars(loader)[CREATION_LINES_ATTRIBUTE] = user_stack()
                if self._creation_lines.get(loader.dataset) is None:
                    self._creation_lines.put(loader.dataset, found)

        return construct


@dataclass
class StepInput:
    """What fed one step: samples of this rank, their hash, batches, and seconds of waiting."""

    samples: int = 0
    sample_hash: int = 0
    batches: int = 0
    wait_s: float = 0.0


def merge_inputs(
    epoch_inputs: Iterable[StepInput], companion_inputs: Iterable[StepInput]
) -> StepInput:
    """What fed one step: its samples are those that were ``fed``, its waiting is that of all."""
    whole = StepInput()
    for one in epoch_inputs:
        whole.samples += one.samples
        whole.sample_hash += one.sample_hash
        whole.batches += one.batches
        whole.wait_s += one.wait_s
    whole.wait_s += sum(one.wait_s for one in companion_inputs)
    return whole


@dataclass(frozen=True)
class StepCount:
    """A step's samples and their hash, as a recorder notes them."""

    count: int
    sample_hash: int


class EpochListener(Protocol):
    """Who is told what happens between steps."""

    def on_pass_start(self, *, feeds_training: bool) -> None:
        """A pass over a loader begins; ``feeds``: one that is known to feed the training."""

    def on_first_batch(self) -> None:
        """Its workers have started, the first batch is there."""

    def on_pass_end(self) -> None:
        """It has no more batches."""

    def on_batch_request(self) -> None:
        """A batch that feeds the training is asked for."""

    def on_other_batch(self) -> None:
        """A batch was given that feeds no training, or not yet."""


DEFAULT_PREFETCH_FACTOR = 2
"""Batches that a worker prepares ahead; PyTorch's own default."""


class LoaderOverrides:
    """Changes a DataLoader that feeds the training, right before it is iterated.

    What the plan does not say, or what the script does by itself, is left alone. In a run in steps
    a pass does not end that is longer than what an experiment times. ``steps`` counts those of the
    training.
    """

    def __init__(self, task: Task, steps: epoch_passes.StepCounter) -> None:
        self._steps = steps
        plan, shares = task.plan, task.variant.data_shares
        parts = (1 if computes_slice(task) else task.world_size) * plan.accumulate
        asked = None if task.replay_hints.script_sets_batch_size else plan.batch
        self._batch = None if asked is None else -(-asked // parts)
        self._workers = plan.workers
        self._hints = task.replay_hints
        self._companions: WeakKeyDictionary[Any, DataLoaderProfile] = WeakKeyDictionary()
        self._shard_rank = shares[task.rank] if shares else None
        self._pass_batches = task.variant.batches_per_epoch
        self._repeat_above = None if plan.steps is None else plan.steps * plan.accumulate

    def repeat_passes(self) -> None:
        """No pass that begins from now on ends, where its length is known."""
        self._repeat_above = 0

    def __call__(self, loader: Any) -> None:
        beside = self._companion_profile(loader)
        workers, batch = self._target_settings(beside)
        if workers is not None and workers != loader.num_workers:
            set_num_workers(loader, workers)
        if batch is not None and batch != batch_size_of(loader):
            set_batch_size(loader, batch)
        if self._shard_rank is not None:
            set_shard_rank(loader, self._shard_rank)
        if self._pass_batches is not None and beside is None:
            epoch_passes.truncate_epochs(loader, self._pass_batches)
        elif self._repeat_above is not None:
            epoch_passes.repeat_epochs(loader, self._repeat_above, self._steps)

    def _companion_profile(self, loader: Any) -> DataLoaderProfile | None:
        learnt, size = (
            self._hints,
            (batch_size_of(loader), epoch_passes.length_or_none(loader.dataset)),
        )
        if loader not in self._companions and learnt.loader is not None:
            for one in learnt.companion_loaders:
                if size == _profile_size(one) != _profile_size(learnt.loader):
                    self._companions[loader] = one
        return self._companions.get(loader)

    def _target_settings(
        self, companion: DataLoaderProfile | None
    ) -> tuple[int | None, int | None]:
        own = self._hints.loader
        if companion is None or own is None:
            return self._workers, self._batch
        workers = None if self._workers == own.num_workers else self._workers
        if self._batch is None or companion.batch_size is None or own.batch_size is None:
            return workers, None
        return workers, max(1, round(companion.batch_size * self._batch / own.batch_size))


def batch_size_of(loader: Any) -> int | None:
    """Samples of a batch on this rank, None where the data set or a sampler decides."""
    found = next(
        (s.batch_size for s in samplers_of(loader) if _has_batch_size(s)), loader.batch_size
    )
    return found if isinstance(found, int) else None


def samplers_of(loader: Any) -> Iterator[Any]:
    """Its batch sampler, and what that wraps, the outermost first."""
    sampler = loader.batch_sampler
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def set_num_workers(loader: Any, workers: int) -> None:
    """From its next pass on."""
    loader.num_workers = workers
    loader.prefetch_factor = (
        (loader.prefetch_factor or DEFAULT_PREFETCH_FACTOR) if workers else None
    )
    loader.timeout = loader.timeout if workers else 0


def set_batch_size(loader: Any, batch: int) -> None:
    """Through its batch sampler, which Accelerate's wraps; its own attribute only tells."""
    sized = [sampler for sampler in samplers_of(loader) if _has_batch_size(sampler)]
    if not sized or any(getattr(sampler, "split_batches", False) for sampler in sized):
        kind = type(loader.batch_sampler).__name__
        raise Unsupported(
            f"a batch of {batch} a rank: the script's DataLoader gets its batches from {kind}; "
            "allowed is another batch_size where PyTorch's own BatchSampler makes the batches"
        )
    for sampler in sized:
        sampler.batch_size = batch
    vars(loader)["batch_size"] = batch


def set_shard_rank(loader: Any, rank: int) -> None:
    """Have it give another rank's samples."""
    for sampler in (epoch_passes.script_sampler(loader.sampler), *samplers_of(loader)):
        if isinstance(sampler, DistributedSampler):
            sampler.rank = rank
            return
        if hasattr(sampler, "process_index"):
            sampler.process_index = rank
            return
    kind = type(loader.sampler).__name__
    raise Unsupported(
        f"the samples of rank {rank} on another rank: the script divides them by {kind}; allowed "
        "is a DistributedSampler"
    )


def _profile_size(profile: DataLoaderProfile) -> tuple[int | None, int | None]:
    return profile.batch_size, profile.dataset_size


def _has_batch_size(sampler: Any) -> bool:
    return isinstance(getattr(sampler, "batch_size", None), int)
