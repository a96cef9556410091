"""What a user says about a loader, and what a DataLoader says where the user does not."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from nfold.errors import UnknownValue, UsageError
from nfold.frameworks.torch.user.batches import BatchDivision
from nfold.frameworks.torch.user.job import Job
from nfold.frameworks.torch.user.recipe import LoaderConfig
from nfold.frameworks.torch.user.source import is_map_style
from nfold.plan import Plan

WORKER_OPTIONS = ("prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")
"""What DataLoader is told about its workers: taken over where there are any."""
LOADER_OPTIONS = (*WORKER_OPTIONS, "pin_memory", "persistent_workers", "in_order")
"""What ``run.loader`` hands on to DataLoader."""
BATCH_ADVICE = (
    "next: run.loader(dataset, batch_size=..., shuffle=True), which divides the batch itself"
)


def resolve_settings(
    data: Any, arguments: dict[str, Any], options: dict[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The data and what is said about them; a DataLoader gives what nobody said.

    Raises UsageError for a sampler of the user's own, whose draws may differ between ranks, for
    a batch that is not a whole number from 1, and for options that DataLoader has not.
    """
    options = options or {}
    for name in options:
        if name not in LOADER_OPTIONS:
            raise UnknownValue("option of run.loader", name, (*arguments, *LOADER_OPTIONS))
    if isinstance(data, DataLoader):
        taken = _dataloader_settings(data)
        arguments = {
            name: taken[name] if value is None else value for name, value in arguments.items()
        }
        options = {**(taken["options"] if arguments["workers"] else {}), **options}
        data = data.dataset
    if arguments["shuffle"] and not is_map_style(data):
        raise UsageError(
            f"shuffle=True of a {type(data).__name__}: it can only be read in its own order; next: "
            "leave shuffle out, or give arrays or a data set with __getitem__ and __len__"
        )
    batch = arguments["batch_size"]
    if not isinstance(batch, Integral) or isinstance(batch, bool) or batch < 1:
        raise UsageError(
            f"batch_size {batch}: allowed are whole numbers from 1, the samples of one step over "
            f"all devices; {BATCH_ADVICE}"
        )
    return data, {**arguments, "batch_size": int(batch), "options": options}


def _dataloader_settings(data: DataLoader[Any]) -> dict[str, Any]:
    sampler = None if isinstance(data.dataset, IterableDataset) else data.sampler
    if sampler is not None and not _is_default_sampler(sampler, data.dataset):
        raise UsageError(
            f"a DataLoader with a {type(sampler).__name__} of its own: allowed are shuffle=True "
            f"and False, every sample once an epoch; {BATCH_ADVICE}"
        )
    return {
        "batch_size": data.batch_size,
        "shuffle": isinstance(sampler, RandomSampler),
        "drop_last": data.drop_last,
        "workers": data.num_workers,
        "collate": data.collate_fn,
        "options": {name: getattr(data, name) for name in WORKER_OPTIONS}
        if data.num_workers
        else {},
    }


def _is_default_sampler(sampler: Any, data: Any) -> bool:
    """Whether a sampler is one that DataLoader makes by itself: every sample once an epoch."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(data)
    return type(sampler) is SequentialSampler


def build_loader_config(
    settings: dict[str, Any], plan: Plan, job: Job, *, train: bool
) -> LoaderConfig:
    """How a loader of these settings works under the plan on this rank."""
    shuffle, workers = settings["shuffle"], settings["workers"]
    division = BatchDivision(
        batch=settings["batch_size"],
        rank=job.rank,
        ranks=job.world_size,
        micro_batches=plan.accumulate if train else 1,
        drop_last=bool(settings["drop_last"]),
    )
    return LoaderConfig(
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
