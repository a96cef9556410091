"""``run.loader``: a user's data as batches of this rank, on its device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
)

from nfold.errors import UsageError
from nfold.frameworks.torch.share import Ledger
from nfold.frameworks.torch.user.moving import landed
from nfold.frameworks.torch.user.placing import Arrays, ShardedArrays, placed
from nfold.frameworks.torch.user.recipe import Fetched, Recipe
from nfold.frameworks.torch.user.source import (
    arrays_of,
    is_map_style,
    stream_of,
)
from nfold.lifeline import PARENT, die_with_parent


@dataclass(kw_only=True)
class Position:
    """Where a loader is: the epoch that it is in or will begin, and the steps done in it."""

    epoch: int = 0
    step: int = 0


class Loader:
    """Iterate it once an epoch. Each batch is this rank's part of a global batch.

    ``position`` says where it is; ``go_to`` has the next epoch begin elsewhere. An epoch whose
    loop was left is not gone on with: the next one begins, after a resume as well. ``before`` is
    called when an epoch begins, ``beat`` with every batch.
    """

    def __init__(
        self,
        data: Any,
        recipe: Recipe,
        ledger: Ledger,
        before: Callable[[], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._recipe = recipe
        self._ledger = ledger
        self._before = before
        self._beat = beat
        self._source = _source(data, recipe)
        self.position = Position()
        self._entered = False

    def go_to(self, position: Position) -> None:
        """Begin the next iteration at ``position``, with the samples it would have had."""
        self.position = Position(epoch=position.epoch, step=position.step)
        self._entered = False

    def __len__(self) -> int:
        """Batches that one epoch gives; TypeError where the data do not say how many they are."""
        samples = self._source.samples
        if samples is None:
            raise TypeError("an iterable data set has no length")
        division = self._recipe.division
        if self._recipe.train:
            return division.steps(samples) * division.parts
        return sum(not part.padded for part in division.epoch(samples))

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of the current epoch, which ends with its last batch."""
        if self._entered:
            self.position = Position(epoch=self.position.epoch + 1)
        self._entered = True
        held, self._ledger.pads = self._ledger.pads, False
        self._before()
        position = self.position
        try:
            yield from self._batches(position)
        except GeneratorExit:
            self._finish(position, held)
            raise
        self._finish(position, held)

    def _batches(self, position: Position) -> Iterator[Any]:
        """The batches from ``position`` on, which moves with them."""
        epoch, skip, parts = position.epoch, position.step, self._recipe.division.parts
        read = self._source.epoch(epoch, skip)
        if not self._source.on_device:
            read = landed(read, self._recipe.device)
        for number, (part, ready, ids) in enumerate(read):
            self._beat()
            if part.padded and not self._recipe.train:
                continue
            if self._recipe.train:
                self._ledger.begin(part.share)
                position.step = skip + number // parts + (number % parts == parts - 1)
            self._ledger.pads = part.padded
            augment = self._recipe.augment
            yield ready if augment is None else augment(ready, ids, epoch)

    def _finish(self, position: Position, held: bool) -> None:
        """The epoch that ``position`` is in is over, unless another iteration has begun since.

        ``held``: whether the batch pads that the script had in hand before, of another loader.
        """
        if position is self.position:
            self._ledger.pads = held
            self.position, self._entered = Position(epoch=position.epoch + 1), False


class Samples:
    """A map-style data set, read by DataLoader's workers."""

    on_device = False

    def __init__(self, data: Dataset[Any], recipe: Recipe) -> None:
        self.samples: int | None = len(data)  # type: ignore[arg-type]  # checked: it has one
        self._recipe = recipe
        self._keys = _Keys()
        options = _options(recipe)
        self._loader = DataLoader(
            data, batch_sampler=self._keys, collate_fn=recipe.collate, **options
        )

    def epoch(self, epoch: int, skip: int) -> Iterable[Fetched]:
        """The batches of an epoch from step ``skip`` on; skipped samples are not read."""
        recipe, samples = self._recipe, self.samples or 0
        ids = recipe.order(samples, epoch)
        parts = list(recipe.division.epoch(samples, skip))
        own = [ids[part.first : part.last] for part in parts]
        self._keys.batches = [each.tolist() for each in own]
        yield from zip(parts, self._loader, own, strict=True)


class _Keys(Sampler[list[int]]):
    """The sample numbers of each batch of the epoch that is next."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Stream:
    """Samples that can only be iterated: every rank reads all and collates its own.

    With workers, one of them does both: a stream has one order.
    """

    on_device = False

    def __init__(self, start: Callable[[], Iterator[Any]], recipe: Recipe) -> None:
        self.samples: int | None = None
        self._start = start
        self._recipe = recipe

    def epoch(self, epoch: int, skip: int) -> Iterable[Fetched]:
        """The batches of one pass from step ``skip`` on; the data decide what an epoch is."""
        del epoch
        passed = _Pass(self._start, self._recipe, skip)
        if not self._recipe.workers:
            yield from passed
            return
        options = {**_options(self._recipe), "num_workers": 1}
        yield from DataLoader(passed, batch_size=None, collate_fn=_as_it_is, **options)


class _Pass(IterableDataset[Fetched]):
    """One pass over a stream, cut into this rank's batches."""

    def __init__(self, start: Callable[[], Iterator[Any]], recipe: Recipe, skip: int) -> None:
        self._start, self._recipe, self._skip = start, recipe, skip

    def __iter__(self) -> Iterator[Fetched]:
        division = self._recipe.division
        before = self._skip * division.batch
        samples = islice(self._start(), before, None)
        while whole := list(islice(samples, division.batch)):
            if len(whole) < division.batch and division.drop_last:
                return
            for part in division.of(0, len(whole)):
                ids = torch.arange(before + part.first, before + part.last)
                yield part, self._recipe.collate(whole[part.first : part.last]), ids
            before += len(whole)


def _source(data: Any, recipe: Recipe) -> Arrays | ShardedArrays | Samples | Stream:
    arrays = arrays_of(data)
    collates = recipe.collate is not default_collate
    if arrays is not None and not collates:
        return placed(arrays, recipe)
    if collates and type(data) in (tuple, dict):
        raise UsageError(
            f"collate of a {type(data).__name__} of arrays, which have no samples to put together; "
            "next: a TensorDataset of them, or augment=, which gets each batch"
        )
    if recipe.input == "resident":
        raise UsageError(
            f"input 'resident' needs arrays, a {type(data).__name__} gives samples one by one; "
            "next: run.loader((images, labels), ...), or input loader"
        )
    if is_map_style(data):
        return Samples(data, recipe)
    return Stream(stream_of(data), recipe)


def _options(recipe: Recipe) -> dict[str, Any]:
    """How DataLoader's workers and page-locked memory are used; what the user says wins."""
    own = recipe.options.get("worker_init_fn")
    usual = {
        "num_workers": recipe.workers,
        "persistent_workers": recipe.workers > 0,
        "pin_memory": recipe.device.type == "cuda",
    }
    return {**usual, **recipe.options, "worker_init_fn": partial(_start_worker, own)}


def _start_worker(own: Callable[[int], Any] | None, worker: int) -> None:
    """A loader worker ends with its rank, and leaves the other cores alone."""
    os.environ.pop(PARENT, None)  # names the rank's own parent where nfold did not start the rank
    die_with_parent()
    torch.set_num_threads(1)
    if own is not None:
        own(worker)


def _as_it_is(batch: Any) -> Any:
    return batch
