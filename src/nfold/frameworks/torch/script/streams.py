"""What DataLoaders give to a training loop: counted, timed, and where asked for, replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as module

from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.torch.script.batches import sample_count, sample_hash
from nfold.frameworks.torch.script.beside import CompanionLoaders
from nfold.frameworks.torch.script.ends import (
    full_epoch_length,
    length_or_none,
    repeats_epochs,
    wrap_one_cycle_step,
)
from nfold.frameworks.torch.script.given import EpochListener, StepInput, merge_inputs
from nfold.frameworks.torch.script.known import WeakIdentityDict
from nfold.frameworks.torch.script.moves import DeviceTransferTracker
from nfold.frameworks.torch.script.overrides import batch_size_of
from nfold.frameworks.torch.script.passes import (
    CREATION_LINES_ATTRIBUTE,
    PASS_ATTRIBUTE,
    EpochPass,
    InstrumentedIterator,
    is_first_pass,
    same_creation_line,
    same_dataset,
    wrap_next_index,
)
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.replay import BatchReplay
from nfold.place import current_user_line, user_stack


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
        """Whether it gives batches to train on."""
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
        """A pass that was begun is not gone on with; one without a step was looked into only."""
        before: EpochPass = vars(loader)[PASS_ATTRIBUTE]
        if before.batches and (before.is_over or self.steps > before.steps_before):
            self.on_pass_end(loader, before)
        else:
            self._pending.pop(id(loader), None)

    def _replace_predecessor(self, loader: Any, *, same_dataset_only: bool) -> None:
        """Stand in the place of a training's loader that the same line has made, if any has."""
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
        """The real iterator, made when it is wanted first."""
        if not iterator.is_started:
            loader, iterator.is_started = iterator.loader, True
            if torch.is_grad_enabled() and (not self._training or self._feeds_training(loader)):
                self._prepare(loader)
            iterator.source = iterator.make_iterator()
        return iterator.source

    def _endless_batches(self, iterator: InstrumentedIterator) -> Iterator[Any]:
        """Real batches from here on, over the ends of passes; nothing from an empty loader."""
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
        """What gives the first batches again; without turns no real one is wanted any more."""
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
        """Trainers make a loader of their own over the data set of the user's."""

        @functools.wraps(usual)
        def construct(loader: Any, /, *args: Any, **kwargs: Any) -> None:
            usual(loader, *args, **kwargs)
            found = current_user_line()
            if found is not None:
                vars(loader)[CREATION_LINES_ATTRIBUTE] = user_stack()
                if self._creation_lines.get(loader.dataset) is None:
                    self._creation_lines.put(loader.dataset, found)

        return construct
