"""Hook of DataLoaders: counts, times and replays their batches, and applies a plan to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from statistics import mode
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

from nfold.core.errors import Unsupported
from nfold.core.plan import DEFAULT_PREFETCH_FACTOR
from nfold.core.script_profile import DataLoaderProfile
from nfold.core.source_location import current_user_line, user_stack
from nfold.engines.base import Task
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.marks import Batch
from nfold.engines.torch.input.dataloader import READ_AHEAD_ATTRIBUTE
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.input.batch_tensors import (
    BatchReplay,
    DeviceTransferTracker,
    SampleLog,
    iter_tensors,
    on_device,
    sample_count,
)
from nfold.instrument.input.epoch_passes import (
    CREATION_LINES_ATTRIBUTE,
    PASS_ATTRIBUTE,
    RENEWAL_ATTRIBUTE,
    EpochPass,
    InstrumentedIterator,
    StepCounter,
    is_first_pass,
    length_or_none,
    record_next_index,
    repeat_epochs,
    repeats_epochs,
    script_sampler,
    step_one_cycle,
    truncate_epochs,
)
from nfold.instrument.input.fetch_times import WeakIdentityDict
from nfold.instrument.input.marked_batches import MarkedBatches, NestedLoaders
from nfold.instrument.input.training_loaders import TrainingLoaders
from nfold.instrument.rank_environment import computes_slice
from nfold.instrument.torch_private import NEXT_INDEX, BaseDataLoaderIter


@dataclass(eq=False)
class DataLoaderHook:
    """Counts, times and replays the batches of all DataLoaders of a process.

    Args:
        prepare: called with a loader before it is iterated.
        new_replay: makes a replay for the current variant.
        listener: gets the begin and end of passes, and batches that do not feed the training.
        wait_for_idle_workers: called before batches are replayed in place of real ones. Otherwise
            workers would still compete for cores in steps that do not need them.
    """

    prepare: Callable[[Any], None]
    new_replay: Callable[[], BatchReplay]
    variant: ActiveVariant
    listener: EpochListener
    _: KW_ONLY
    wait_for_idle_workers: Callable[[], None]

    def __post_init__(self) -> None:
        self._always_real = self.variant.is_baseline("input")
        self.on_batch_request = self.listener.on_batch_request
        self.transfers = DeviceTransferTracker()
        # index of the last replayed batch, None for a real batch
        self.replayed_index: int | None = None
        self._replays: dict[tuple[int, str], BatchReplay] = {}
        self.training = TrainingLoaders()
        self._last_loader: Any = None
        self._workers_active = False
        self._pending: dict[int, StepInput] = {}
        self._sample_logs: WeakIdentityDict[SampleLog] = WeakIdentityDict()
        self._nested = NestedLoaders()
        self.in_warm_up = True
        self.steps = 0
        self.epochs_completed = 0
        self.first_waits_s: list[float] = []
        self.left_at: str | None = None
        self._passes_of_one_step = 0
        self.batches_of_steps = BatchesOfSteps()

    def install(self, patches: Patches, warm_up: Patches) -> None:
        def wrap_iter(original: Any) -> Any:
            return lambda loader: self.iterate(loader, original)

        patches.put(DataLoader, "__iter__", wrap_iter)
        patches.wrap(DataLoader, "__init__", self._construct_loader)
        patches.wrap(OneCycleLR, "step", step_one_cycle)
        warm_up.wrap(BaseDataLoaderIter, NEXT_INDEX, record_next_index)
        warm_up.wrap(DistributedSampler, "set_epoch", record_set_epoch)

    def mark_batches(self, iterable: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches as a loader that feeds the training; a DataLoader is one already."""
        if isinstance(iterable, DataLoader | MarkedBatches | InstrumentedIterator):
            return iterable
        marked = MarkedBatches(iterable, lambda one: self.iterate(one, self._nested.iterate))
        return iter(marked) if isinstance(iterable, Iterator) else marked

    @property
    def sample_log(self) -> SampleLog:
        """The samples of the loader that feeds the training."""
        loader = self.training.loader
        return SampleLog() if loader is None else self._sample_log(loader.dataset)

    def _sample_log(self, dataset: Any) -> SampleLog:
        log = self._sample_logs.get(dataset)
        if log is None:
            log = SampleLog(keeps_contents=self.variant.current.profiler_steps)
            self._sample_logs.put(dataset, log)
        return log

    def end_warm_up(self) -> None:
        self.in_warm_up = False
        self.training.end_warm_up()

    @property
    def replays(self) -> tuple[BatchReplay, ...]:
        return tuple(self._replays.values())

    def iterate(self, loader: Any, original_iter: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        if self._nested.active:
            return original_iter(loader)
        if is_first_pass(loader):
            # A pending input with this id is of a loader that was deleted.
            self._pending.pop(id(loader), None)
            if torch.is_grad_enabled():
                companion = self.training.companions.replace_predecessor(loader)
                if companion is not None:
                    self._move_replays(loader, companion)
                else:
                    self._replace_predecessor(loader, same_dataset_only=True)
        else:
            self._abandon_pass(loader)
        if self._renews_iterators and self.training.feeds_epochs(loader):
            vars(loader)[RENEWAL_ATTRIBUTE] = current_user_line()
            self.on_batch_request()
        elif loader not in self.training.companions:
            self.listener.on_pass_start(feeds_training=self.training.feeds_epochs(loader))
        iterator = InstrumentedIterator(loader, lambda: original_iter(loader), self)
        iterator.epoch_pass.steps_before = self.steps
        self._sample_log(loader.dataset).begin_epoch(self.steps, shuffled_epoch(loader))
        if self._replay_for(loader):
            self.prepare(loader)
        else:
            self._real_iterator(iterator)
        return iterator

    def _abandon_pass(self, loader: Any) -> None:
        last: EpochPass = vars(loader)[PASS_ATTRIBUTE]
        self._count_pass_of_one_step(loader, last)
        if last.batches and (last.is_over or self.steps > last.steps_before):
            self._end_pass(loader, last)
        else:
            self._pending.pop(id(loader), None)

    def _count_pass_of_one_step(self, loader: Any, last: EpochPass) -> None:
        length = length_or_none(loader)
        is_whole = last.is_over or (length is not None and last.batches >= length)
        if self.in_warm_up and self.training.feeds_epochs(loader):
            one = not is_whole and self.steps == last.steps_before + 1
            self._passes_of_one_step = self._passes_of_one_step + 1 if one else 0

    @property
    def _renews_iterators(self) -> bool:
        """Return whether every step makes an iterator: its passes are no epochs."""
        return self._passes_of_one_step >= MIN_PASSES_OF_ONE_STEP

    def _replace_predecessor(self, loader: Any, *, same_dataset_only: bool) -> None:
        old = self.training.predecessor(loader, same_dataset_only=same_dataset_only)
        if old is not None:
            self._abandon_pass(old)
            self.training.replace(old, loader)
            self._move_replays(loader, old)

    def _move_replays(self, loader: Any, predecessor: Any) -> None:
        for kind in [kind for number, kind in self._replays if number == id(predecessor)]:
            self._replays[id(loader), kind] = self._replays.pop((id(predecessor), kind))

    def _replay_for(self, loader: Any) -> BatchReplay | None:
        return self._replays.get((id(loader), self.variant.current.input))

    def nested_source(self, iterator: InstrumentedIterator) -> Iterator[Any] | None:
        """Return the real iterator while a marked iterable makes a batch from it."""
        return self._real_iterator(iterator) if self._nested.active else None

    def _real_iterator(self, iterator: InstrumentedIterator) -> Iterator[Any]:
        if not iterator.is_started:
            loader, iterator.is_started = iterator.loader, True
            if torch.is_grad_enabled() and (
                self.training.loader is None or self.training.feeds_step(loader)
            ):
                self.prepare(loader)
            iterator.source = iterator.make_iterator()
        return iterator.source

    def _endless_batches(self, iterator: InstrumentedIterator) -> Iterator[Any]:
        is_empty = False
        while not is_empty:
            is_empty = True
            for batch in self._real_iterator(iterator):
                is_empty = False
                yield batch
            iterator.is_started = False

    def next_batch(self, iterator: InstrumentedIterator) -> Any:
        loader = iterator.loader
        feeds_training = self.training.feeds_step(loader)
        if feeds_training:
            self.on_batch_request()
        if not feeds_training or self._always_real:
            return next(iterator.source)
        length = length_or_none(loader)
        ends = not repeats_epochs(loader) or self.steps == iterator.epoch_pass.steps_before
        if ends and length is not None and iterator.epoch_pass.batches >= length:
            raise StopIteration
        if self.variant.current.input == "real":
            self._workers_active, self.replayed_index = True, None
            return next(self._real_iterator(iterator))
        replay = self._start_replay(iterator)
        if self._workers_active and self.variant.interleaved:
            self.wait_for_idle_workers()
        self._workers_active = False
        batch = replay.next()
        self.replayed_index = replay.index
        return batch

    def _start_replay(self, iterator: InstrumentedIterator) -> BatchReplay:
        loader = iterator.loader
        replay = self._replay_for(loader)
        if replay is None:
            replay, self._workers_active = self.new_replay(), True
            stored = self._replays.get((id(loader), "replayed"))
            if stored is not None:  # the same batches, so that both variants have the same work
                replay.collect(iter(stored.batches))
            elif self.variant.interleaved:
                replay.collect(self._endless_batches(iterator))
            else:
                first = [] if iterator.first_batch is None else [iterator.first_batch]
                replay.collect(chain(first, iterator.source))
                # Deletes the real iterator and its workers.
                iterator.source = iter(())
            if not len(replay):
                raise StopIteration
            self._replays[id(loader), self.variant.current.input] = replay
        return replay

    def on_batch(self, iterator: InstrumentedIterator, batch: Any, wait_s: float) -> None:
        step_input = self._pending.setdefault(id(iterator.loader), StepInput())
        step_input.wait_s += wait_s
        own = StepInput(
            samples=sample_count(batch) or batch_size_of(iterator.loader) or 0,
            batches=1,
            # An evaluation may read the same loader, and on one rank only.
            training_batches=int(torch.is_grad_enabled()),
        )
        if self.in_warm_up:
            log = self._sample_log(iterator.loader.dataset)
            own.sample_hash = log.record(batch, iterator.take_indices())
            iterator.first_batch = batch if iterator.first_batch is None else iterator.first_batch
            self.transfers.record_batch(batch)
            if isinstance(iterator.loader, MarkedBatches):
                tensors = list(iter_tensors(batch))
                iterator.loader.on_device = bool(tensors) and all(map(on_device, tensors))
            self.training.companions.record_batch(iterator.loader)
        iterator.read_ahead.append(own)
        if len(iterator.read_ahead) > vars(iterator.loader).get(READ_AHEAD_ATTRIBUTE, 0):
            step_input.add(iterator.read_ahead.popleft())
        if self._last_loader is None or torch.is_grad_enabled():
            # An evaluation may lie between a batch and its step.
            self._last_loader = iterator.loader
        if not self.training.feeds_step(iterator.loader):
            self.listener.on_other_batch()
        elif (
            iterator.epoch_pass.batches == 1
            and self.training.feeds_epochs(iterator.loader)
            and not self._renews_iterators
        ):
            self.first_waits_s.append(wait_s)
            if iterator.loader.num_workers and self.variant.current.input == "real":
                self.listener.on_first_batch()

    def on_exhausted(self, iterator: InstrumentedIterator) -> None:
        step_input = self._pending.setdefault(id(iterator.loader), StepInput())
        for own in iterator.read_ahead:
            step_input.add(own)
        iterator.read_ahead.clear()
        self._end_pass(iterator.loader, iterator.epoch_pass)

    def _end_pass(self, loader: Any, epoch_pass: EpochPass) -> None:
        """End a pass once; a loop that counts batches does not request the end."""
        ended, epoch_pass.is_over = not epoch_pass.is_over, True
        if ended and self.training.feeds_epochs(loader) and not self._renews_iterators:
            self.epochs_completed += 1
            self.listener.on_pass_end()

    def on_pass_abandoned(self, loader: Any, line: str | None) -> None:
        if self.training.feeds_epochs(loader):
            self.left_at = line

    def take_step_input(self) -> StepInput:
        self.steps += 1
        if self.in_warm_up and self._last_loader is not None:
            self.training.add(self._last_loader)
        elif self._last_loader is not None and not self._pending.keys() & self.training.ids:
            self._replace_predecessor(self._last_loader, same_dataset_only=False)
        pending, self._pending, self._last_loader = self._pending, {}, None
        total = StepInput()
        for key, step_input in pending.items():
            if key in self.training.ids:
                total.add(step_input)
        if not self.in_warm_up:
            total.sample_hash = 0  # of a batch that was read ahead in the warm-up
        if self.variant.current.input == "real":
            self.batches_of_steps.add(total.training_batches)
        companions = (pending.get(id(companion)) for companion in self.training.companions.all)
        total.wait_s += sum(companion.wait_s for companion in companions if companion)
        return total

    def _construct_loader(self, original: Any, loader: Any, /, *args: Any, **kwargs: Any) -> None:
        original(loader, *args, **kwargs)
        line = current_user_line()
        if line is not None:
            vars(loader)[CREATION_LINES_ATTRIBUTE] = user_stack()
            self.training.record_creation(loader, line)


class BatchesOfSteps:
    """How many batches each step took from the loader."""

    def __init__(self) -> None:
        self._steps: Counter[int] = Counter()

    def add(self, batches: int) -> None:
        self._steps[batches] += 1

    def skipped(self) -> int | None:
        """Return how many batches no step was made with; None if steps take them irregularly.

        A step takes as many as most steps do. One with fewer is fed by a thread that reads ahead, or
        ends an accumulation early.
        """
        if not self._steps:
            return None
        usual = mode(self._steps.elements())
        if min(self._steps) < usual:
            return None
        return sum(steps * (batches - usual) for batches, steps in self._steps.items())


@dataclass
class StepInput:
    """Input of a step: samples of this rank, their hash, batches, and seconds of waiting.

    ``training_batches`` were taken with gradients enabled.
    """

    samples: int = 0
    sample_hash: int = 0
    batches: int = 0
    training_batches: int = 0
    wait_s: float = 0.0

    def add(self, other: StepInput) -> None:
        self.samples += other.samples
        self.sample_hash += other.sample_hash
        self.batches += other.batches
        self.training_batches += other.training_batches
        self.wait_s += other.wait_s


class EpochListener(Protocol):
    """Receiver of the events between steps."""

    def on_pass_start(self, *, feeds_training: bool) -> None: ...

    def on_first_batch(self) -> None: ...

    def on_pass_end(self) -> None: ...

    def on_batch_request(self) -> None: ...

    def on_other_batch(self) -> None: ...


MIN_PASSES_OF_ONE_STEP = 2
EPOCH_SET_ATTRIBUTE = "_nfold_epoch_set"  # attribute of a DistributedSampler
WORKER_ARGUMENTS = ("persistent_workers", "prefetch_factor", "in_order")  # need workers


class LoaderOverrides:
    """Applies the settings of a plan to a DataLoader that feeds the training, before it is
    iterated.

    Settings that the plan leaves open stay as the script has them. In a run that is measured in
    steps, a pass that is longer than the run does not end.
    """

    def __init__(self, task: Task, steps: StepCounter) -> None:
        self._steps = steps
        plan, shares = task.plan, task.variant.data_shares
        parts = (1 if computes_slice(task) else task.world_size) * plan.accumulate
        batch = None if task.replay_hints.script_sets_batch_size else plan.batch
        self._batch = None if batch is None else -(-batch // parts)
        self._workers = plan.workers
        self._arguments = task.variant.loader_arguments()
        self._has_set_arguments = False
        self._hints = task.replay_hints
        self._companions: WeakKeyDictionary[Any, DataLoaderProfile] = WeakKeyDictionary()
        self._shard_rank = shares[task.rank] if shares else None
        self._pass_batches = task.variant.batches_per_epoch
        self._repeat_above = None if plan.steps is None else plan.steps * plan.accumulate

    def require_loader(self) -> None:
        """Raise Unsupported if the variant changes arguments of a DataLoader and none has them."""
        if self._arguments and not self._has_set_arguments:
            workers = "" if self._arguments.keys().isdisjoint(WORKER_ARGUMENTS) else " with workers"
            raise Unsupported(
                f"{', '.join(self._arguments)}: no DataLoader{workers} feeds the training"
            )

    def repeat_passes(self) -> None:
        """Let no later pass end, if its length is known."""
        self._repeat_above = 0

    def __call__(self, loader: Any) -> None:
        companion = self._companion_profile(loader)
        workers, batch = self._target_settings(companion)
        if workers is not None and workers != loader.num_workers:
            set_num_workers(loader, workers)
        self._has_set_arguments |= set_loader_arguments(loader, self._arguments)
        if batch is not None and batch != batch_size_of(loader):
            set_batch_size(loader, batch)
        if self._shard_rank is not None:
            set_shard_rank(loader, self._shard_rank)
        if self._pass_batches is not None and companion is None:
            truncate_epochs(loader, self._pass_batches)
        elif self._repeat_above is not None:
            repeat_epochs(loader, self._repeat_above, self._steps)

    def _companion_profile(self, loader: Any) -> DataLoaderProfile | None:
        size = batch_size_of(loader), length_or_none(loader.dataset)
        if loader not in self._companions and self._hints.loader is not None:
            for companion in self._hints.companion_loaders:
                if size == _profile_size(companion) != _profile_size(self._hints.loader):
                    self._companions[loader] = companion
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
    """Return the batch size on this rank, None if the dataset or a sampler decides."""
    sizes = (sampler.batch_size for sampler in samplers_of(loader) if _has_batch_size(sampler))
    size = next(sizes, loader.batch_size)
    return size if isinstance(size, int) else None


def shuffled_epoch(loader: Any) -> int | None:
    """Return the epoch of the loader's DistributedSampler, None without one that shuffles."""
    sampler = _shuffling_sampler(loader)
    return None if sampler is None else sampler.epoch


def is_epoch_unset(loader: Any) -> bool:
    """Return whether a DistributedSampler shuffles and its ``set_epoch`` was not called."""
    sampler = _shuffling_sampler(loader)
    return sampler is not None and EPOCH_SET_ATTRIBUTE not in vars(sampler)


def _shuffling_sampler(loader: Any) -> DistributedSampler[Any] | None:
    for sampler in (script_sampler(loader.sampler), *samplers_of(loader)):
        if isinstance(sampler, DistributedSampler):
            return sampler if sampler.shuffle else None
    return None


def record_set_epoch(original: Any, sampler: Any, epoch: int) -> None:
    vars(sampler)[EPOCH_SET_ATTRIBUTE] = True
    original(sampler, epoch)


def samplers_of(loader: Any) -> Iterator[Any]:
    """Yield the batch sampler and the samplers that it wraps, the outermost first."""
    sampler = loader.batch_sampler
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def set_num_workers(loader: Any, workers: int) -> None:
    loader.num_workers = workers
    prefetch_factor = loader.prefetch_factor or DEFAULT_PREFETCH_FACTOR
    loader.prefetch_factor = prefetch_factor if workers else None
    loader.timeout = loader.timeout if workers else 0


def set_loader_arguments(loader: Any, arguments: Mapping[str, Any]) -> bool:
    """Set constructor arguments of a DataLoader before it is iterated; return whether all are set.

    Without workers their arguments are not set: PyTorch allows none of them.
    """
    if not isinstance(loader, DataLoader):
        return False
    workers = loader.num_workers > 0
    found = {name: v for name, v in arguments.items() if workers or name not in WORKER_ARGUMENTS}
    vars(loader).update(found)
    return len(found) == len(arguments)


def set_batch_size(loader: Any, batch: int) -> None:
    """Set the batch size of the batch samplers; ``loader.batch_size`` is for information only."""
    sized = [sampler for sampler in samplers_of(loader) if _has_batch_size(sampler)]
    if not sized or any(getattr(sampler, "split_batches", False) for sampler in sized):
        kind = type(loader.batch_sampler).__name__
        raise Unsupported(
            f"batch size {batch} per rank: cannot be set on the batch sampler {kind} of the "
            "DataLoader; allowed is PyTorch's BatchSampler; next: keep the batch size of the script"
        )
    for sampler in sized:
        sampler.batch_size = batch
    vars(loader)["batch_size"] = batch


def set_shard_rank(loader: Any, rank: int) -> None:
    """Let the loader yield the samples of another rank."""
    for sampler in (script_sampler(loader.sampler), *samplers_of(loader)):
        if isinstance(sampler, DistributedSampler):
            sampler.rank = rank
            return
        if hasattr(sampler, "process_index"):
            sampler.process_index = rank
            return
    kind = type(loader.sampler).__name__
    raise Unsupported(
        f"samples of rank {rank} on another rank: not supported by the sampler {kind}; next: use "
        "a DistributedSampler"
    )


def _profile_size(profile: DataLoaderProfile) -> tuple[int | None, int | None]:
    return profile.batch_size, profile.dataset_size


def _has_batch_size(sampler: Any) -> bool:
    return isinstance(getattr(sampler, "batch_size", None), int)
