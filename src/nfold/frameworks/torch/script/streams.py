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

from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.torch.script.batches import count_of, hash_of
from nfold.frameworks.torch.script.beside import Beside
from nfold.frameworks.torch.script.ends import endless, length_of, outlasting, whole_length
from nfold.frameworks.torch.script.given import Listener, Taken, together
from nfold.frameworks.torch.script.known import Known
from nfold.frameworks.torch.script.moves import Moves
from nfold.frameworks.torch.script.overrides import batch_of
from nfold.frameworks.torch.script.passes import (
    LATEST,
    MADE_AT,
    Pass,
    Stream,
    first_time,
    keeping,
    same_data,
    same_place,
)
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.replay import Replay
from nfold.place import lines_here, place_here


class Feed:
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
        replay: Callable[[], Replay],
        left_out: LeftOut,
        listener: Listener,
        *,
        calm: Callable[[], None],
    ) -> None:
        self._prepare = prepare
        self._left_out = left_out
        self._always_real = left_out.never("input")
        self.new_replay = replay
        self._listener = listener
        self.asked = listener.asked
        self._calm = calm
        self._places: Known[str] = Known()
        self.moves = Moves()
        self.again: int | None = None
        """Which of the first batches was given last, None for a real one."""
        self._replays: dict[tuple[int, str], Replay] = {}
        self._training: dict[int, Any] = {}
        self._beside = Beside()
        self._last: Any = None
        self._working = False
        self._pending: dict[int, Taken] = {}
        self.warming = True
        self.steps = 0
        self.epochs_ended = 0
        self.first_waits_s: list[float] = []

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Stand between every DataLoader and its loop."""
        feed = self

        def iterate(usual: Any) -> Any:
            return lambda loader: feed.iterate(loader, usual)

        patches.put(DataLoader, "__iter__", iterate)
        patches.put(DataLoader, "__init__", self._constructing)
        patches.put(OneCycleLR, "step", outlasting)
        warm_up.put(module._BaseDataLoaderIter, "_next_index", keeping)

    @property
    def loader(self) -> Any:
        """The DataLoader that feeds the training, None where there is none."""
        return next(reversed(self._training.values()), None)

    def place_of(self, loader: Any) -> str | None:
        """Where the user's code made the loader, or the first one over the same data set."""
        return self._places.get(loader.dataset)

    @property
    def beside(self) -> tuple[Any, ...]:
        """Others that give a batch in every step, too."""
        return self._beside.all

    def feeds(self, loader: Any) -> bool:
        """Whether steps followed on the loader's batches, and its passes are epochs."""
        return id(loader) in self._training

    def _gives(self, loader: Any) -> bool:
        """Whether it gives batches to train on."""
        return self.feeds(loader) or loader in self._beside

    def settle(self) -> None:
        """The warm-up is over. Of several the longest has epochs: a shorter one begins again."""
        self.warming = False
        self._beside.settle()
        if self.loader is None:
            return
        longest = max((self.loader, *self.beside), key=whole_length)
        if longest in self._beside:
            self._beside.swap(longest, self.loader)
            del self._training[id(self.loader)]
            self._training[id(longest)] = longest

    @property
    def replays(self) -> tuple[Replay, ...]:
        """What gives first batches again."""
        return tuple(self._replays.values())

    def iterate(self, loader: Any, usual: Callable[[Any], Iterator[Any]]) -> Stream:
        """A new pass over the loader."""
        if first_time(loader):
            # What is pending under its number is of a loader that is no more.
            self._pending.pop(id(loader), None)
            if torch.is_grad_enabled() and not self._take_over_beside(loader):
                self._take_over(loader, of_same_data=True)
        else:
            self._leave(loader)
        if loader not in self._beside:
            self._listener.pass_begins(feeds=self.feeds(loader))
        stream = Stream(loader, lambda: usual(loader), self)
        stream.made.steps_before = self.steps
        if self._replaying(loader):
            self._prepare(loader)
        else:
            self._source(stream)
        return stream

    def _leave(self, loader: Any) -> None:
        """A pass that was begun is not gone on with; one without a step was looked into only."""
        before: Pass = vars(loader)[LATEST]
        if before.given and (before.over or self.steps > before.steps_before):
            self.ended(loader, before)
        else:
            self._pending.pop(id(loader), None)

    def _take_over(self, loader: Any, *, of_same_data: bool) -> None:
        """Stand in the place of a training's loader that the same line has made, if any has."""
        made_there = (old for old in self._training.values() if same_place(old, loader))
        alike = (old for old in made_there if same_data(old, loader))
        old = next(alike if of_same_data else made_there, None)
        if old is None:
            return
        self._leave(old)
        del self._training[id(old)]
        self._training[id(loader)] = loader
        self._have_replays(loader, old)

    def _take_over_beside(self, loader: Any) -> bool:
        old = self._beside.take_over(loader)
        if old is not None:
            self._have_replays(loader, old)
        return old is not None

    def _have_replays(self, loader: Any, old: Any) -> None:
        for kind in [kind for number, kind in self._replays if number == id(old)]:
            self._replays[id(loader), kind] = self._replays.pop((id(old), kind))

    def _replaying(self, loader: Any) -> Replay | None:
        return self._replays.get((id(loader), self._left_out.now.input))

    def _source(self, stream: Stream) -> Iterator[Any]:
        """The real iterator, made when it is wanted first."""
        if not stream.begun:
            loader, stream.begun = stream.loader, True
            if torch.is_grad_enabled() and (not self._training or self._gives(loader)):
                self._prepare(loader)
            stream.source = stream.begin()
        return stream.source

    def _onwards(self, stream: Stream) -> Iterator[Any]:
        """Real batches from here on, over the ends of passes; nothing from an empty loader."""
        more = True
        while more:
            more = False
            for batch in self._source(stream):
                more = True
                yield batch
            stream.begun = False

    def next_of(self, stream: Stream) -> Any:
        """The next batch of a pass: the real one, or a first one again."""
        loader = stream.loader
        gives = self._gives(loader)
        if gives:
            self.asked()
        if not gives or self._always_real:
            return next(stream.source)
        length = length_of(loader)
        ends = not endless(loader) or self.steps == stream.made.steps_before
        if ends and length is not None and stream.made.given >= length:
            raise StopIteration
        if self._left_out.now.input == "real":
            self._working, self.again = True, None
            return next(self._source(stream))
        found = self._replay_of(stream, length)
        if self._working and self._left_out.turns:
            self._calm()
        self._working = False
        given = found.next()
        self.again = found.place
        return given

    def _replay_of(self, stream: Stream, length: int | None) -> Replay:
        """What gives the first batches again; without turns no real one is wanted any more."""
        loader = stream.loader
        found = self._replaying(loader)
        if found is None:
            found, self._working = self.new_replay(), True
            if self._left_out.turns:
                found.collect(self._onwards(stream), length)
            else:
                given = [] if stream.first is None else [stream.first]
                found.collect(chain(given, stream.source), length)
                # The real iterator goes, and its workers with it.
                stream.source = iter(())
            self._replays[id(loader), self._left_out.now.input] = found
        return found

    def gave(self, stream: Stream, batch: Any, wait_s: float) -> None:
        """Note one batch."""
        taken = self._pending.setdefault(id(stream.loader), Taken())
        taken.samples += count_of(batch) or batch_of(stream.loader) or 0
        taken.batches += 1
        taken.wait_s += wait_s
        if self.warming:
            taken.sample_hash += hash_of(batch, stream.indices())
            stream.first = batch if stream.first is None else stream.first
            self.moves.given(batch)
            self._beside.gave(stream.loader)
        if self._last is None or torch.is_grad_enabled():
            # An evaluation may come between a batch and the step on it.
            self._last = stream.loader
        if not self._gives(stream.loader):
            self._listener.aside()
        elif stream.made.given == 1 and self.feeds(stream.loader):
            self.first_waits_s.append(wait_s)
            if stream.loader.num_workers and self._left_out.now.input == "real":
                self._listener.pass_began()

    def ended(self, loader: Any, made: Pass) -> None:
        """Note the end of a pass, once; a loop that counts its batches asks for no more of them."""
        ended, made.over = not made.over, True
        if ended and self.feeds(loader):
            self.epochs_ended += 1
            self._listener.pass_ended()

    def taken(self) -> Taken:
        """What fed the step that has just been made."""
        self.steps += 1
        if self.warming and self._last is not None:
            self._training[id(self._last)] = self._last
            self._beside.stepped(self._training)
        elif self._last is not None and not self._pending.keys() & self._training.keys():
            self._take_over(self._last, of_same_data=False)
        fed = [taken for key, taken in self._pending.items() if key in self._training]
        beside = [self._pending[id(one)] for one in self.beside if id(one) in self._pending]
        self._pending, self._last = {}, None
        return together(fed, beside)

    def _constructing(self, usual: Any) -> Any:
        """Trainers make a loader of their own over the data set of the user's."""

        @functools.wraps(usual)
        def construct(loader: Any, /, *args: Any, **kwargs: Any) -> None:
            usual(loader, *args, **kwargs)
            found = place_here()
            if found is not None:
                vars(loader)[MADE_AT] = lines_here()
                if self._places.get(loader.dataset) is None:
                    self._places.put(loader.dataset, found)

        return construct
