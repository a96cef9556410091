"""What a plan imposes on a script's DataLoader: batch, workers, another rank's share, its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DistributedSampler

from nfold.errors import Unsupported
from nfold.frameworks.base import Task
from nfold.frameworks.torch.script import ends
from nfold.frameworks.torch.script.environment import computes_slice
from nfold.seen import DataLoaderProfile

DEFAULT_PREFETCH_FACTOR = 2
"""Batches that a worker prepares ahead; PyTorch's own default."""


class LoaderOverrides:
    """Changes a DataLoader that feeds the training, right before it is iterated.

    What the plan does not say, or what the script does by itself, is left alone. In a run in steps
    a pass does not end that is longer than what an experiment times. ``steps`` counts those of the
    training.
    """

    def __init__(self, task: Task, steps: ends.StepCounter) -> None:
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
        """Raises Unsupported where the loader cannot be changed so."""
        beside = self._companion_profile(loader)
        workers, batch = self._target_settings(beside)
        if workers is not None and workers != loader.num_workers:
            set_num_workers(loader, workers)
        if batch is not None and batch != batch_size_of(loader):
            set_batch_size(loader, batch)
        if self._shard_rank is not None:
            set_shard_rank(loader, self._shard_rank)
        if self._pass_batches is not None and beside is None:
            ends.truncate_epochs(loader, self._pass_batches)
        elif self._repeat_above is not None:
            ends.repeat_epochs(loader, self._repeat_above, self._steps)

    def _companion_profile(self, loader: Any) -> DataLoaderProfile | None:
        """What a first look saw of it, if it is beside the one that has epochs, and not like it."""
        learnt, size = self._hints, (batch_size_of(loader), ends.length_or_none(loader.dataset))
        if loader not in self._companions and learnt.loader is not None:
            for one in learnt.companion_loaders:
                if size == _profile_size(one) != _profile_size(learnt.loader):
                    self._companions[loader] = one
        return self._companions.get(loader)

    def _target_settings(
        self, companion: DataLoaderProfile | None
    ) -> tuple[int | None, int | None]:
        """Workers and batch; ``beside`` another loader others where that has others."""
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
    for sampler in (ends.script_sampler(loader.sampler), *samplers_of(loader)):
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
