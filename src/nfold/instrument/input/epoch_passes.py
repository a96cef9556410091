"""Passes over a DataLoader, and their truncation and repetition."""

from __future__ import annotations

import inspect
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from nfold.core.errors import Unsupported
from nfold.core.source_location import current_user_line, find_user_frame, frame_line

# attribute of an iterator: indices of the batches on their way
INDICES_ATTRIBUTE = "_nfold_indices"
# Attributes of a DataLoader: its last pass, the user stack of its constructor, the line of the
# generator that iterates over it, and the line that makes an iterator in every step. Without other
# references to it, the script can free it with its workers.
PASS_ATTRIBUTE = "_nfold_pass"  # noqa: S105
CREATION_LINES_ATTRIBUTE = "_nfold_lines"
GENERATOR_ATTRIBUTE = "_nfold_generator_line"
RENEWAL_ATTRIBUTE = "_nfold_renewal_line"


MAX_COUNT_S = 2.0  # to read the rest of a pass


@dataclass
class EpochPass:
    batches: int = 0
    steps_before: int = 0
    is_over: bool = False
    iterator: weakref.ref[InstrumentedIterator] | None = None


class BatchProvider(Protocol):
    def nested_source(self, iterator: InstrumentedIterator) -> Iterator[Any] | None: ...

    def next_batch(self, iterator: InstrumentedIterator) -> Any: ...

    def on_batch(self, iterator: InstrumentedIterator, batch: Any, wait_s: float) -> None: ...

    def on_exhausted(self, iterator: InstrumentedIterator) -> None:
        """Handle the end of a pass whose batches were all read."""

    def on_pass_abandoned(self, loader: Any, line: str | None) -> None:
        """Handle that the script left a pass at a line before its end."""


class InstrumentedIterator:
    """One pass over a DataLoader; other attributes are those of the real iterator.

    ``read_ahead`` are the batches that no step has had yet, if the loop reads them ahead.
    """

    def __init__(
        self, loader: Any, make_iterator: Callable[[], Iterator[Any]], provider: BatchProvider
    ) -> None:
        self.loader = loader
        self.source: Iterator[Any] = iter(())
        self.make_iterator = make_iterator
        self.is_started = False
        self.first_batch: Any = None
        self.read_ahead: deque[Any] = deque()
        if is_first_pass(loader):
            frame, _ = find_user_frame(sys._getframe(1))
            in_generator = frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR
            vars(loader)[GENERATOR_ATTRIBUTE] = (
                frame_line(frame) if frame and in_generator else None
            )
        self.epoch_pass = vars(loader)[PASS_ATTRIBUTE] = EpochPass(iterator=weakref.ref(self))
        self._provider = provider

    def __iter__(self) -> InstrumentedIterator:
        return self

    def __next__(self) -> Any:
        nested_source = self._provider.nested_source(self)
        if nested_source is not None:
            return next(nested_source)
        start = time.perf_counter()
        try:
            batch = self._provider.next_batch(self)
        except StopIteration:
            self._provider.on_exhausted(self)
            raise
        self.epoch_pass.batches += 1
        self._provider.on_batch(self, batch, time.perf_counter() - start)
        return batch

    def __del__(self) -> None:
        # A for loop deletes its iterator at the break, or at the statement that raises.
        if "epoch_pass" in vars(self) and not self.epoch_pass.is_over:
            self._provider.on_pass_abandoned(self.loader, current_user_line())

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def take_indices(self) -> Any:
        """Return the indices of the last batch, None if the dataset has none."""
        indices = getattr(self.source, INDICES_ATTRIBUTE, None)
        return indices.popleft() if indices else None


def is_first_pass(loader: Any) -> bool:
    return PASS_ATTRIBUTE not in vars(loader)


def count_pass(loader: Any) -> int | None:
    """Return the batches of the last pass over a DataLoader without a length.

    Reads the rest of the pass: call it after the last step. None if that takes long, or fails.
    """
    if not isinstance(loader, DataLoader) or length_or_none(loader) is not None:
        return None
    last: EpochPass | None = vars(loader).get(PASS_ATTRIBUTE)
    iterator = last.iterator() if last is not None and last.iterator is not None else None
    if last is None or last.is_over or iterator is None:
        return None if last is None or not last.is_over else last.batches
    count, deadline = last.batches, time.monotonic() + MAX_COUNT_S
    with suppress(Exception):  # of the script's data set
        for _ in iterator.source:
            count += 1
            if time.monotonic() > deadline:
                return None
        return count
    return None


def generator_line(loader: Any) -> str | None:
    """Return the line of the generator of the script that iterates over the loader, or None."""
    line: str | None = vars(loader).get(GENERATOR_ATTRIBUTE)
    return line


def same_creation_line(loader: Any, other: Any) -> bool:
    """Return whether one line of user code constructed both loaders."""
    lines = vars(loader).get(CREATION_LINES_ATTRIBUTE)
    other_lines = vars(other).get(CREATION_LINES_ATTRIBUTE)
    return bool(lines and other_lines) and lines[0] == other_lines[0]


def same_dataset(loader: Any, other: Any) -> bool:
    """Return whether both loaders share a dataset, or the same calls made equal datasets.

    The line of construction is not enough: a helper function also makes the validation loader.
    """
    if loader.dataset is other.dataset:
        return True
    lines = vars(loader).get(CREATION_LINES_ATTRIBUTE)
    return (
        lines is not None
        and lines == vars(other).get(CREATION_LINES_ATTRIBUTE)
        and type(loader.dataset) is type(other.dataset)
        and length_or_none(loader.dataset) == length_or_none(other.dataset)
        and type(script_sampler(loader.sampler)) is type(script_sampler(other.sampler))
    )


def record_next_index(original: Any, iterator: Any) -> Any:
    """Draw the indices of a batch, and keep them until the batch is returned."""
    indices = original(iterator)
    vars(iterator).setdefault(INDICES_ATTRIBUTE, deque()).append(indices)
    return indices


StepCounter = Callable[[], int]  # training steps so far
# Lightning skips validation if a pass ends early.
LENGTH_READING_MODULES = ("lightning.pytorch.loops", "pytorch_lightning.loops")


class SamplerWrapper:
    """Wraps the sampler of a loader; subclasses end or repeat its passes."""

    def __init__(self, sampler: Any) -> None:
        self.batch_sampler = sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class TruncatedSampler(SamplerWrapper):
    """Ends a pass after ``max_batches``. Workers are idle at its end, as after a whole pass."""

    def __init__(self, sampler: Any, max_batches: int) -> None:
        super().__init__(sampler)
        self._max_batches = max_batches

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self._max_batches)

    def __len__(self) -> int:
        return min(self._max_batches, len(self.batch_sampler))

    @property
    def passes_per_epoch(self) -> float:
        return len(self.batch_sampler) / len(self)


class RepeatingSampler(SamplerWrapper):
    """Restarts at the end of a pass, so that workers continue and no end-of-epoch code runs.

    ``len()`` is that of one pass. A pass without a training step ends: the script may only collect
    the batches in a list, or compute a mean.
    """

    def __init__(self, sampler: Any, steps: StepCounter) -> None:
        super().__init__(sampler)
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        first_step, continues = self.steps(), True
        while continues:
            continues = False
            for indices in self.batch_sampler:
                continues = True
                yield indices
            continues = continues and self.steps() > first_step


def truncate_epochs(loader: Any, batches: int) -> None:
    """End every later pass of the loader after so many batches."""
    if truncated_sampler(loader) is not None:
        return
    if epoch_length_is_read_ahead():
        raise Unsupported(
            "batches_per_epoch: Lightning reads the length of an epoch before it begins; next: "
            "measure whole epochs"
        )
    if length_or_none(_index_source(loader)) is None:
        raise Unsupported(
            "batches_per_epoch: the DataLoader has no length; next: measure whole epochs, or give "
            "its dataset or sampler a __len__"
        )
    _set_index_source(loader, TruncatedSampler(_index_source(loader), batches))


def repeat_epochs(loader: Any, batches: int, steps: StepCounter) -> None:
    """Let the next pass not end, if it is longer than ``batches``."""
    length = length_or_none(_index_source(loader))
    if length is None or length <= batches:
        return
    if not (repeats_epochs(loader) or epoch_length_is_read_ahead()):
        _set_index_source(loader, RepeatingSampler(_index_source(loader), steps))


def epoch_length_is_read_ahead() -> bool:
    """Return whether the calling trainer has read the length of the epoch before it."""
    stack = traceback.walk_stack(sys._getframe())
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in stack)
    return any(name.startswith(LENGTH_READING_MODULES) for name in modules)


def truncated_sampler(loader: Any) -> TruncatedSampler | None:
    source = _index_source(loader) if loader is not None else None
    return source if isinstance(source, TruncatedSampler) else None


def repeats_epochs(loader: Any) -> bool:
    return isinstance(_index_source(loader), RepeatingSampler)


def script_sampler(sampler: Any) -> Any:
    return sampler.batch_sampler if isinstance(sampler, SamplerWrapper) else sampler


def step_one_cycle(original: Any, schedule: OneCycleLR, *args: Any, **kwargs: Any) -> None:
    """Ignore steps of OneCycleLR after its last step, which would raise an error."""
    if args or kwargs or schedule.last_epoch < schedule.total_steps:
        original(schedule, *args, **kwargs)


def length_or_none(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def full_epoch_length(loader: Any) -> float:
    """Return the batches of a whole pass, infinity if not known."""
    truncated = truncated_sampler(loader)
    length = length_or_none(loader if truncated is None else truncated.batch_sampler)
    return float("inf") if length is None else length


def _index_source(loader: Any) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _set_index_source(loader: Any, replacement: SamplerWrapper) -> None:
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(loader)[name] = replacement
