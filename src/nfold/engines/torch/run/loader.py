"""``run.loader``: settings of a loader, and the batches of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from numbers import Integral
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from nfold.core.errors import UnknownValue, UsageError
from nfold.core.plan import Plan
from nfold.engines.sampling import BatchDivision, BatchShare
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.input.dataloader import (
    identity,
    loader_options,
    mark_read_ahead,
    prefetch_to_device,
)
from nfold.engines.torch.run.datasets import (
    ArrayReader,
    FetchedBatch,
    LoaderConfig,
    as_arrays,
    is_map_style,
    iterator_factory,
    place_arrays,
)
from nfold.engines.torch.run.job import Job

# options of a DataLoader about its workers, taken over if it has any
WORKER_OPTIONS = ("prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")
# options that ``run.loader`` passes to DataLoader
LOADER_OPTIONS = (*WORKER_OPTIONS, "pin_memory", "persistent_workers", "in_order")
BATCH_ADVICE = (
    "next: run.loader(dataset, batch_size=..., shuffle=True), which divides the batch itself"
)


def resolve_settings(
    data: Any, arguments: dict[str, Any], options: dict[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return the data set and the settings; a DataLoader supplies those that are None.

    Raises UsageError for a custom sampler, whose draws may differ between ranks, for a batch that is
    no whole number from 1, and for unknown options.
    """
    options = options or {}
    for name in options:
        if name not in LOADER_OPTIONS:
            raise UnknownValue("option of run.loader", name, (*arguments, *LOADER_OPTIONS))
    if isinstance(data, DataLoader):
        defaults = _dataloader_settings(data)
        arguments = {
            name: defaults[name] if value is None else value for name, value in arguments.items()
        }
        options = {**(defaults["options"] if arguments["workers"] else {}), **options}
        data = data.dataset
    if arguments["shuffle"] and not is_map_style(data):
        raise UsageError(
            f"shuffle=True of a {type(data).__name__}, which has one order; next: omit shuffle, or "
            "pass arrays or a data set with __getitem__ and __len__"
        )
    batch = arguments["batch_size"]
    if not isinstance(batch, Integral) or isinstance(batch, bool) or batch < 1:
        raise UsageError(
            f"batch_size {batch}: allowed are whole numbers from 1, the samples of one step over "
            f"all devices; {BATCH_ADVICE}"
        )
    return data, {**arguments, "batch_size": int(batch), "options": options}


def _dataloader_settings(data: DataLoader[Any]) -> dict[str, Any]:
    dataset: Any = data.dataset
    sampler: Any = None if isinstance(dataset, IterableDataset) else data.sampler
    shuffled = type(sampler) is RandomSampler
    if shuffled:
        is_default = not sampler.replacement and sampler.num_samples == len(dataset)
    else:
        is_default = sampler is None or type(sampler) is SequentialSampler
    if not is_default:
        raise UsageError(
            f"a DataLoader with a custom {type(sampler).__name__}; allowed are shuffle=True and "
            f"False, every sample once per epoch; {BATCH_ADVICE}"
        )
    return {
        "batch_size": data.batch_size,
        "shuffle": shuffled,
        "drop_last": data.drop_last,
        "workers": data.num_workers,
        "collate": data.collate_fn,
        "options": {name: getattr(data, name) for name in WORKER_OPTIONS if data.num_workers},
    }


def build_loader_config(
    settings: dict[str, Any], plan: Plan, job: Job, *, train: bool
) -> LoaderConfig:
    shuffle, workers = settings["shuffle"], settings["workers"]
    division = BatchDivision(
        batch=settings["batch_size"],
        rank=job.rank,
        ranks=job.world_size,
        micro_batches=plan.accumulate if train and plan.memory == "fixed" else 1,
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


@dataclass(kw_only=True)
class LoaderPosition:
    """The epoch that a loader is in or will begin, and the steps done in it."""

    epoch: int = 0
    step: int = 0


@dataclass(eq=False)
class RunLoader:
    """Yields this rank's part of each global batch; iterate over it once per epoch.

    ``position`` is the current position; ``seek`` sets that of the next iteration. An epoch that the
    loop left early is not continued: the next iteration begins the next epoch, also after a resume.
    ``on_epoch_start`` is called when an epoch begins, ``on_batch`` with every batch and its share.
    ``epochs`` is how many the training has, as far as is known.
    """

    data: Any
    config: LoaderConfig
    current_share: CurrentShare
    on_epoch_start: Callable[[], None]
    on_batch: Callable[[Any, BatchShare], None] = lambda *_: None
    epochs: int = 1

    def __post_init__(self) -> None:
        self._source = _build_reader(self.data, self.config)
        self.position = LoaderPosition()
        self._in_epoch = False

    @property
    def dataset(self) -> Any:
        """The data set, as of a DataLoader."""
        return self.data

    @property
    def steps_left(self) -> int:
        """Optimizer steps that are left of the epochs; 0 if their length is unknown."""
        if self._source.samples is None:
            return 0
        epochs = max(1, self.epochs - self.position.epoch)
        return epochs * len(self) // self.config.division.micro_batches - self.position.step

    def seek(self, position: LoaderPosition) -> None:
        """Begin the next iteration at ``position``, with the samples that it would have."""
        self.position = LoaderPosition(epoch=position.epoch, step=position.step)
        self._in_epoch = False

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.position)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seek(LoaderPosition(**state_dict))

    def __len__(self) -> int:
        samples = self._source.samples
        if samples is None:
            raise TypeError("an iterable data set has no length")
        division = self.config.division
        if self.config.train:
            return division.steps_per_epoch(samples) * division.micro_batches
        return sum(not part.is_padding for part in division.epoch_slices(samples))

    def __iter__(self) -> Iterator[Any]:
        if self._in_epoch:
            self.position = LoaderPosition(epoch=self.position.epoch + 1)
        self._in_epoch = True
        # The script may hold a batch of another loader, such as a training loader.
        was_padding, self.current_share.is_padding = self.current_share.is_padding, False
        self.on_epoch_start()
        position = self.position
        try:
            yield from self._batches(position)
        except GeneratorExit:
            self._finish(position, was_padding=was_padding)
            raise
        self._finish(position, was_padding=was_padding)

    def _batches(self, position: LoaderPosition) -> Iterator[Any]:
        epoch, skip, parts = position.epoch, position.step, self.config.division.micro_batches
        read = self._source.read_epoch(epoch, skip)
        if not self._source.on_device:
            read = prefetch_to_device(read, self.config.device)
        for number, (part, batch, ids) in enumerate(read):
            self.on_batch(batch, part.share)
            if part.is_padding and not self.config.train:
                continue
            if self.config.train:
                self.current_share.set(part.share)
                position.step = skip + number // parts + (number % parts == parts - 1)
            self.current_share.is_padding = part.is_padding
            augment = self.config.augment
            yield batch if augment is None else augment(batch, ids, epoch)

    def _finish(self, position: LoaderPosition, *, was_padding: bool) -> None:
        """Nothing is done if another iteration of this loader has begun since."""
        if position is self.position:
            self.current_share.is_padding = was_padding
            self.position, self._in_epoch = LoaderPosition(epoch=position.epoch + 1), False


class MapStyleReader:
    """Reads a map-style data set with DataLoader's workers."""

    on_device = False

    def __init__(self, data: Dataset[Any], config: LoaderConfig) -> None:
        self.samples: int | None = len(data)  # type: ignore[arg-type]  # it has a length
        self._config = config
        self._sampler = _BatchListSampler()
        options = loader_options(config.workers, config.device.type, config.options)
        loader = DataLoader(data, batch_sampler=self._sampler, collate_fn=config.collate, **options)
        self._loader = mark_read_ahead(loader, config.device)

    def read_epoch(self, epoch: int, skip: int) -> Iterable[FetchedBatch]:
        order = self._config.epoch_order(self.samples or 0, epoch)
        parts = list(self._config.division.epoch_slices(self.samples or 0, skip))
        ids = [order[part.positions] for part in parts]
        self._sampler.batches = [each.tolist() for each in ids]
        self._loader.generator = _worker_seeds(epoch)
        # A measured run may end or repeat the pass over the lists of the sampler.
        known = cycle(zip(parts, map(torch.from_numpy, ids), strict=True))
        for (part, own), batch in zip(known, self._loader, strict=False):
            yield part, batch, own


def _worker_seeds(epoch: int) -> torch.Generator:
    """Return a generator for the workers' seeds.

    From the default one, a resumed epoch would draw them a second time before its dropout.
    """
    return torch.Generator().manual_seed((torch.initial_seed() + epoch) % 2**63)


class _BatchListSampler(Sampler[list[int]]):
    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class IterableReader:
    """Reads samples that can only be iterated: every rank reads all and collates its own.

    With workers, one worker does both, because a stream has one order.
    """

    on_device = False

    def __init__(self, start: Callable[[], Iterator[Any]], config: LoaderConfig) -> None:
        self.samples: int | None = None
        self._start = start
        self._config = config

    def read_epoch(self, epoch: int, skip: int) -> Iterable[FetchedBatch]:
        batches = _IterableEpoch(self._start, self._config, skip)
        if not self._config.workers:
            yield from batches
            return
        options = loader_options(1, self._config.device.type, self._config.options)
        options["generator"] = _worker_seeds(epoch)
        loader = DataLoader(batches, batch_size=None, collate_fn=identity, **options)
        yield from mark_read_ahead(loader, self._config.device)


class _IterableEpoch(IterableDataset[FetchedBatch]):
    def __init__(self, start: Callable[[], Iterator[Any]], config: LoaderConfig, skip: int) -> None:
        self._start, self._config, self._skip = start, config, skip

    def __iter__(self) -> Iterator[FetchedBatch]:
        division = self._config.division
        start = self._skip * division.batch
        samples = islice(self._start(), start, None)
        while batch := list(islice(samples, division.batch)):
            if len(batch) < division.batch and division.drop_last:
                return
            for part in division.split(range(len(batch))):
                own = [batch[position] for position in part.positions]
                yield part, self._config.collate(own), torch.from_numpy(start + part.positions)
            start += len(batch)


def _build_reader(data: Any, config: LoaderConfig) -> ArrayReader | MapStyleReader | IterableReader:
    arrays = as_arrays(data)
    collates = config.collate is not default_collate
    if arrays is not None and not collates:
        return place_arrays(arrays, config)
    if collates and type(data) in (tuple, dict):
        raise UsageError(
            f"collate of a {type(data).__name__} of arrays, which are indexed whole; next: a "
            "TensorDataset of them, or augment=, a function of each batch"
        )
    if config.input == "resident":
        raise UsageError(
            f"input 'resident' needs arrays, a {type(data).__name__} yields single samples; "
            "next: run.loader((images, labels), ...), or input loader"
        )
    if is_map_style(data):
        return MapStyleReader(data, config)
    return IterableReader(iterator_factory(data), config)
