"""What DataLoaders give to a training loop: counted, timed, and where asked for, replayed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as module

from nfold.frameworks.torch.script.batches import count_of, hash_of
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.replay import Replay

INDICES = "_nfold_indices"
"""Where an iterator of a DataLoader keeps the indices that it has drawn and not yet given."""


@dataclass
class Taken:
    """What fed one step: samples of this rank, their hash, batches, and seconds of waiting."""

    samples: int = 0
    sample_hash: int = 0
    batches: int = 0
    wait_s: float = 0.0


class Stream:
    """One pass over a DataLoader. What it has not itself is its real iterator's."""

    def __init__(self, loader: Any, source: Iterator[Any], feed: Feed) -> None:
        self.loader = loader
        self.source = source
        self.first: Any = None
        self.given = 0
        self._feed = feed

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = self._feed.next_of(self)
        except StopIteration:
            self._feed.ended(self)
            raise
        self.given += 1
        self._feed.gave(self, batch, time.perf_counter() - began)
        return batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def indices(self) -> Any:
        """Those of the batch that was given last, None where the data set has none."""
        drawn = getattr(self.source, INDICES, None)
        return drawn.popleft() if drawn else None


class Feed:
    """All streams of a process, and which of them feed the training.

    A DataLoader feeds the training if a step followed on one of its batches while the script
    warmed up. ``prepare`` gets each before it is iterated; ``replay`` makes what gives the first
    batches again, None: none does. ``began`` and ``aside`` are told of a new pass and of
    batches that feed no training.
    """

    def __init__(
        self,
        *,
        prepare: Callable[[Any], None],
        replay: Callable[[], Replay] | None,
        began: Callable[[], None],
        aside: Callable[[], None],
    ) -> None:
        self._prepare = prepare
        self._replay = replay
        self._began = began
        self._aside = aside
        self._replays: dict[int, Replay] = {}
        self._training: dict[int, Any] = {}
        self._last: Any = None
        self._pending: dict[int, Taken] = {}
        self.warming = True
        self.epochs_ended = 0

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Stand between every DataLoader and its loop."""
        feed = self

        def iterate(usual: Any) -> Any:
            return lambda loader: feed.iterate(loader, usual)

        patches.put(DataLoader, "__iter__", iterate)
        warm_up.put(module._BaseDataLoaderIter, "_next_index", _keeping)

    @property
    def loader(self) -> Any:
        """The DataLoader that feeds the training, None where there is none."""
        return next(reversed(self._training.values()), None)

    @property
    def replays(self) -> tuple[Replay, ...]:
        """What gives first batches again."""
        return tuple(self._replays.values())

    def iterate(self, loader: Any, usual: Callable[[Any], Iterator[Any]]) -> Stream:
        """A new pass over the loader."""
        self._began()
        if id(loader) in self._replays:
            return Stream(loader, iter(()), self)
        if torch.is_grad_enabled() and (not self._training or id(loader) in self._training):
            self._prepare(loader)
        return Stream(loader, usual(loader), self)

    def next_of(self, stream: Stream) -> Any:
        """The next batch of a pass: the real one, or a first one again."""
        key = id(stream.loader)
        if self._replay is None or key not in self._training:
            return next(stream.source)
        length = length_of(stream.loader)
        if key not in self._replays:
            made = self._replay()
            made.collect(stream.first, stream.source, length)
            self._replays[key] = made
            # The real iterator goes, and its workers with it.
            stream.source = iter(())
        if length is not None and stream.given >= length:
            raise StopIteration
        return self._replays[key].next()

    def gave(self, stream: Stream, batch: Any, wait_s: float) -> None:
        """Note one batch."""
        taken = self._pending.setdefault(id(stream.loader), Taken())
        taken.samples += count_of(batch)
        taken.batches += 1
        taken.wait_s += wait_s
        if self.warming:
            taken.sample_hash += hash_of(batch, stream.indices())
            self._last = stream.loader
            stream.first = batch if stream.first is None else stream.first
        elif id(stream.loader) not in self._training:
            self._aside()

    def ended(self, stream: Stream) -> None:
        """Note the end of a pass."""
        self.epochs_ended += id(stream.loader) in self._training

    def taken(self) -> Taken:
        """What fed the step that has just been made."""
        if self.warming and self._last is not None:
            self._training[id(self._last)] = self._last
        fed = [taken for key, taken in self._pending.items() if key in self._training]
        self._pending, self._last = {}, None
        return Taken(
            samples=sum(taken.samples for taken in fed),
            sample_hash=sum(taken.sample_hash for taken in fed),
            batches=sum(taken.batches for taken in fed),
            wait_s=sum(taken.wait_s for taken in fed),
        )


def length_of(loader: Any) -> int | None:
    """Batches of a pass, None where the data set does not know its length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _keeping(usual: Any) -> Any:
    """Drawing the indices of a batch, which are kept until it is given."""

    def next_index(iterator: Any) -> Any:
        drawn = usual(iterator)
        vars(iterator).setdefault(INDICES, deque()).append(drawn)
        return drawn

    return next_index
