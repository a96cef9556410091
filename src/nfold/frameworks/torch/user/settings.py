"""What a user says about a loader, and what a DataLoader says where the user does not."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from nfold.errors import UsageError
from nfold.frameworks.torch.user.batches import Division
from nfold.frameworks.torch.user.job import Job
from nfold.frameworks.torch.user.loader import Recipe
from nfold.plan import Plan


def settings_of(data: Any, said: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The data and what is said about them; a DataLoader gives what nobody said.

    Raises UsageError for a sampler of the user's own, whose draws may differ between ranks, and
    for a batch that is not a whole number from 1.
    """
    if isinstance(data, DataLoader):
        taken = _of_loader(data)
        said = {name: taken[name] if value is None else value for name, value in said.items()}
        data = data.dataset
    batch = said["batch_size"]
    if type(batch) is not int or batch < 1:
        raise UsageError(
            f"batch_size {batch}: allowed are whole numbers from 1, the samples of one step over "
            "all devices"
        )
    return data, said


def _of_loader(data: DataLoader[Any]) -> dict[str, Any]:
    sampler = None if isinstance(data.dataset, IterableDataset) else data.sampler
    if sampler is not None and type(sampler) not in (RandomSampler, SequentialSampler):
        raise UsageError(
            f"a DataLoader with a {type(sampler).__name__}: allowed are its own orders; next: "
            "run.loader(dataset, batch_size=..., shuffle=True), which divides the batch itself"
        )
    return {
        "batch_size": data.batch_size,
        "shuffle": isinstance(sampler, RandomSampler),
        "drop_last": data.drop_last,
        "workers": data.num_workers,
        "collate": data.collate_fn,
    }


def recipe_of(settings: dict[str, Any], plan: Plan, job: Job, *, train: bool) -> Recipe:
    """How a loader of these settings works under the plan on this rank."""
    shuffle, workers = settings["shuffle"], settings["workers"]
    division = Division(
        batch=settings["batch_size"],
        rank=job.rank,
        ranks=job.world_size,
        parts=plan.accumulate if train else 1,
        drop_last=bool(settings["drop_last"]),
    )
    return Recipe(
        division=division,
        device=job.device,
        seed=plan.seed,
        shuffle=train if shuffle is None else shuffle,
        train=train,
        input=plan.input,
        workers=(plan.workers or 0) if workers is None else workers,
        augment=settings["augment"],
        collate=settings["collate"] or default_collate,
        options=settings["options"],
    )
