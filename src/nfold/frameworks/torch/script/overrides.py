"""What a plan imposes on a script's DataLoader: batch, workers, another rank's share, its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DistributedSampler

from nfold.errors import Unsupported
from nfold.frameworks.base import Task
from nfold.frameworks.torch.script import ends
from nfold.frameworks.torch.script.environment import slices
from nfold.seen import Loader

PREFETCH = 2
"""Batches that a worker prepares ahead; PyTorch's own default."""


class Overrides:
    """Changes a DataLoader that feeds the training, right before it is iterated.

    What the plan does not say, or what the script does by itself, is left alone. In a run in steps
    a pass does not end that is longer than what an experiment times. ``steps`` counts those of the
    training.
    """

    def __init__(self, task: Task, steps: ends.Steps) -> None:
        self._steps = steps
        plan, shares = task.plan, task.left_out.shares
        parts = (1 if slices(task) else task.world_size) * plan.accumulate
        asked = None if task.learnt.own_batches else plan.batch
        self._batch = None if asked is None else -(-asked // parts)
        self._workers = plan.workers
        self._learnt = task.learnt
        self._beside: WeakKeyDictionary[Any, Loader] = WeakKeyDictionary()
        self._share = shares[task.rank] if shares else None
        self._pass_batches = task.left_out.pass_batches
        self._long = None if plan.steps is None else plan.steps * plan.accumulate

    def never_end(self) -> None:
        """No pass that begins from now on ends, where its length is known."""
        self._long = 0

    def __call__(self, loader: Any) -> None:
        """Raises Unsupported where the loader cannot be changed so."""
        beside = self._beside_as(loader)
        workers, batch = self._asked(beside)
        if workers is not None and workers != loader.num_workers:
            set_workers(loader, workers)
        if batch is not None and batch != batch_of(loader):
            set_batch(loader, batch)
        if self._share is not None:
            set_share(loader, self._share)
        if self._pass_batches is not None and beside is None:
            ends.shorten(loader, self._pass_batches)
        elif self._long is not None:
            ends.prolong(loader, self._long, self._steps)

    def _beside_as(self, loader: Any) -> Loader | None:
        """What a first look saw of it, if it is beside the one that has epochs, and not like it."""
        learnt, size = self._learnt, (batch_of(loader), ends.length_of(loader.dataset))
        if loader not in self._beside and learnt.loader is not None:
            for one in learnt.beside:
                if size == _size(one) != _size(learnt.loader):
                    self._beside[loader] = one
        return self._beside.get(loader)

    def _asked(self, beside: Loader | None) -> tuple[int | None, int | None]:
        """Workers and batch; ``beside`` another loader others where that has others."""
        own = self._learnt.loader
        if beside is None or own is None:
            return self._workers, self._batch
        workers = None if self._workers == own.workers else self._workers
        if self._batch is None or beside.batch is None or own.batch is None:
            return workers, None
        return workers, max(1, round(beside.batch * self._batch / own.batch))


def batch_of(loader: Any) -> int | None:
    """Samples of a batch on this rank, None where the data set or a sampler decides."""
    found = next((s.batch_size for s in samplers_of(loader) if _sized(s)), loader.batch_size)
    return found if isinstance(found, int) else None


def samplers_of(loader: Any) -> Iterator[Any]:
    """Its batch sampler, and what that wraps, the outermost first."""
    sampler = loader.batch_sampler
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def set_workers(loader: Any, workers: int) -> None:
    """From its next pass on."""
    loader.num_workers = workers
    loader.prefetch_factor = (loader.prefetch_factor or PREFETCH) if workers else None
    loader.timeout = loader.timeout if workers else 0


def set_batch(loader: Any, batch: int) -> None:
    """Through its batch sampler, which Accelerate's wraps; its own attribute only tells."""
    sized = [sampler for sampler in samplers_of(loader) if _sized(sampler)]
    if not sized or any(getattr(sampler, "split_batches", False) for sampler in sized):
        kind = type(loader.batch_sampler).__name__
        raise Unsupported(
            f"a batch of {batch} a rank: the script's DataLoader gets its batches from {kind}; "
            "allowed is another batch_size where PyTorch's own BatchSampler makes the batches"
        )
    for sampler in sized:
        sampler.batch_size = batch
    vars(loader)["batch_size"] = batch


def set_share(loader: Any, rank: int) -> None:
    """Have it give another rank's samples."""
    for sampler in (ends.own(loader.sampler), *samplers_of(loader)):
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


def _size(seen: Loader) -> tuple[int | None, int | None]:
    return seen.batch, seen.samples


def _sized(sampler: Any) -> bool:
    return isinstance(getattr(sampler, "batch_size", None), int)
