"""``memory="fit"``: a user's step in as many micro-batches as fit into memory.

A step that runs out of memory on one rank is given up on all ranks and made again from the same
samples in twice as many micro-batches. Nothing has changed by then: the optimizer steps after the
gradients of all ranks are computed, which every rank confirms on the host. Buffers, such as the
statistics of batch norm, and the random state are restored.

Among the numbers that fit, the one with the most samples per second is kept: the next real steps are
timed in each of them.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import cycle, islice
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nfold.core.errors import OutOfMemory, UsageError
from nfold.core.format import pluralize
from nfold.core.plan import Plan
from nfold.engines.sampling import BatchShare, split_batch
from nfold.engines.torch.checkpoint import get_random_state, set_random_state
from nfold.engines.torch.communication.gradient_exchange import GradientExchange
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.error_translation import translate_chained_error
from nfold.engines.torch.run.batch_rows import RowSelector, merge_results
from nfold.engines.torch.run.captured_step import CapturedStep
from nfold.engines.torch.run.state import RunBookkeeping
from nfold.instrument.torch_private import BatchNorm, foreach_copy

TIMED_STEPS = 3  # per number of micro-batches, after one that warms up; the fastest counts
MIN_GAIN = 0.02  # of more micro-batches than necessary
FACTORS = (1, 2, 4)  # of the smallest number of micro-batches that fits
NEEDS_STEP = (
    'memory "fit" repeats a step that runs out of memory, and needs it as a function; next: '
    "@run.step on the function from the batch to optimizer.step(), or nfold.Run(accumulate=2)"
)
NEEDS_LOADER = (
    'out of memory; memory "fit" divides batches of run.loader only; next: '
    "run.loader(data, batch_size=...)"
)
OUT_OF_MEMORY_ADVICE = (
    'next: nfold.Run(accumulate=2) halves the samples in memory; nfold.Run(memory="fit") with '
    "@run.step finds how many fit"
)


class StepAbandoned(Exception):
    """A rank ran out of memory: all ranks give up the step."""


class FitGuard:
    """Agrees over all ranks, on the host, whether the gradients of a step were computed.

    Every step is confirmed once: at the end of its first exchanged backward, or before a CUDA graph
    or an update. With several models the order of their buckets is known only at the end of
    backward: none is sent before.
    """

    def __init__(
        self,
        bookkeeping: RunBookkeeping,
        build_exchange: Callable[[list[nn.Parameter]], GradientExchange],
        world_size: int,
    ) -> None:
        self._bookkeeping, self._exchanges = bookkeeping, bookkeeping.exchanges
        self._build_exchange = build_exchange
        self._backwards_at_update: int | None = None
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None
        self.is_open = self._is_abandoned = False

    @property
    def holds_exchange(self) -> bool:
        return self.is_open and len(self._exchanges) > 1

    def begin(self, micro_batches: int) -> None:
        """Begin a step; a single rank exchanges gradients only of several micro-batches."""
        self.is_open, self._is_abandoned = True, False
        self._backwards_at_update = None
        if self._group is None and micro_batches > 1:
            if not self._exchanges and self._bookkeeping.parameters:
                self._exchanges.append(self._build_exchange(self._bookkeeping.parameters))
        elif self._group is None:
            for exchange in self._exchanges:
                exchange.remove()
            self._exchanges.clear()

    @property
    def has_backward_after_update(self) -> bool:
        before = self._backwards_at_update
        return before is not None and self._completed_backwards() > before

    def confirm_update(self, *_called_with: Any) -> None:
        """Confirm a step before an optimizer updates."""
        if self._bookkeeping.current_share.share.is_last and self._backwards_at_update is None:
            self._backwards_at_update = self._completed_backwards()
        self._bookkeeping.confirm_step()

    def _completed_backwards(self) -> int:
        return sum(exchange.completed_backwards for exchange in self._exchanges)

    def confirm(self) -> None:
        """Raise StepAbandoned if another rank ran out of memory in this step.

        Raises it again if a script catches it and goes on.
        """
        if self.is_open:
            self._is_abandoned = self._any_failed(failed=False)
        if self._is_abandoned:
            raise StepAbandoned

    def fail(self) -> NoReturn:
        """Let all ranks give up this step. Raises StepAbandoned."""
        self._any_failed(failed=True)
        raise StepAbandoned

    def _any_failed(self, *, failed: bool) -> bool:
        self.is_open = False
        sent = any(exchange.has_sent for exchange in self._exchanges)
        any_failed, any_sent = self.largest([failed, sent])
        if any_failed:
            for exchange in self._exchanges:
                exchange.abandon(send_rest=bool(any_sent))
        return bool(any_failed)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks."""
        if self._group is None:
            return list(values)
        largest = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return list(largest.tolist())


class MicroBatchSearch:
    """The number of micro-batches of the next step, and which was the fastest.

    All ranks take the same decisions: from the same steps, and from times agreed over the ranks.

    Args:
        first: The smallest number.
        agree: Returns the largest of each value over all ranks.
        factors: Multiples of the smallest number that fits, which are timed.
    """

    def __init__(
        self,
        first: int,
        agree: Callable[[Sequence[float]], list[float]],
        factors: Sequence[int] = FACTORS,
    ) -> None:
        self.micro_batches = first
        self._agree = agree
        self._factors = factors
        self._seconds: dict[int, list[float]] = {}
        self._next: Iterator[int] | None = None
        self.samples_per_s: dict[int, float] = {}
        self.is_done = False

    def on_out_of_memory(self, limit: int) -> None:
        """Double the number, up to ``limit``, the samples of a rank. Raises OutOfMemory there."""
        if self.micro_batches >= limit:
            raise OutOfMemory(
                "out of memory with one sample per device in a micro-batch; next: "
                'optimizer_state="sharded", precision="bf16" or activation checkpointing'
            )
        self.micro_batches = min(2 * self.micro_batches, limit)
        self._next = None
        self._seconds.clear()

    def on_step(self, seconds: float, samples: int, limit: int) -> None:
        """Note the time of a step of ``samples`` over all ranks; choose after the last."""
        if self._next is None:
            allowed = max(limit, self.micro_batches)
            numbers = [n for f in self._factors if (n := f * self.micro_batches) <= allowed]
            self._seconds = {n: [] for n in numbers}
            rounds = TIMED_STEPS + 1 if len(numbers) > 1 else 1
            self._next = islice(cycle(numbers), 1, rounds * len(numbers))
        self._seconds[self.micro_batches].append(seconds / samples)
        number = next(self._next, None)
        if number is None:
            self._choose()
        else:
            self.micro_batches = number

    def _choose(self) -> None:
        own = [min(times[1:] or times) for times in self._seconds.values()]
        times = dict(zip(self._seconds, self._agree(own), strict=True))
        self.samples_per_s = {number: 1 / seconds for number, seconds in times.items()}
        enough = (1 + MIN_GAIN) * min(times.values())
        self.micro_batches = next(number for number in times if times[number] <= enough)
        self.is_done = True


class FittedStep:
    """A user's function that makes one step, called once per micro-batch.

    ``function`` may be a CapturedStep: it confirms a step before its last graph.
    """

    def __init__(
        self, function: Callable[..., Any], bookkeeping: RunBookkeeping, plan: Plan
    ) -> None:
        assert isinstance(bookkeeping.guard, FitGuard)
        self._function, self._guard = function, bookkeeping.guard
        self._name = getattr(function, "__name__", type(function).__name__)
        self._select_rows = RowSelector(self._name)
        self._bookkeeping, self._plan = bookkeeping, plan
        self._devices = Devices((bookkeeping.device,))
        self._world_size = plan.devices or 1
        self._search: MicroBatchSearch | None = None
        self.is_running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        share = self._bookkeeping.current_share.share
        limit = -(-share.global_count // self._world_size)
        search = self._search = self._search or self._begin_search()
        while True:
            before = search.micro_batches
            started = self._now()
            try:
                with self._running(share):
                    result = self._attempt((args, kwargs), share)
            except StepAbandoned:
                pass
            else:
                if not search.is_done:
                    search.on_step(self._now() - started, share.global_count, limit)
                    if search.is_done:
                        self._report(f"memory 'fit': {self._describe(search, share)}")
                return result
            self._free_memory()
            if not self._bookkeeping.prepared.loaders:
                raise OutOfMemory(NEEDS_LOADER)
            search.on_out_of_memory(limit)
            if search.is_done:
                self._report(
                    f"memory 'fit': out of memory with {pluralize(before, 'micro-batch')}; "
                    f"continues with {search.micro_batches}"
                )

    def _begin_search(self) -> MicroBatchSearch:
        models = self._bookkeeping.prepared.models
        modules = (module for model in models for module in model.modules())
        # Another shape is compiled or recorded again, and gives batch norm other statistics.
        keeps = (
            isinstance(self._function, CapturedStep)
            or "compiled" in self._bookkeeping.model_steps()
            or any(isinstance(module, BatchNorm) for module in modules)
        )
        factors = FACTORS[:1] if keeps else FACTORS
        return MicroBatchSearch(self._plan.accumulate, self._guard.largest, factors)

    def _now(self) -> float:
        if self._search is not None and not self._search.is_done:
            self._devices.synchronize()
        return time.perf_counter()

    @contextmanager
    def _running(self, share: BatchShare) -> Iterator[None]:
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False
            self._bookkeeping.current_share.set(share)

    def _attempt(self, arguments: Any, share: BatchShare) -> Any:
        assert self._search is not None
        restore = self._save_state()
        try:
            try:
                self._guard.begin(self._search.micro_batches)
                result = self._call_parts(arguments, share)
                self._guard.confirm()  # a function without a backward
                self._check_order()
                return result
            except (RuntimeError, MemoryError) as error:
                translated = translate_chained_error(error, self._devices.peak_memory_bytes)
                if not isinstance(translated, OutOfMemory):
                    raise
                if not self._guard.is_open:
                    raise _too_late(translated, self._name) from error
            self._free_memory()  # collectives may allocate outside of PyTorch's allocator
            self._guard.fail()
        except StepAbandoned:
            restore()
            raise

    def _call_parts(self, arguments: Any, share: BatchShare) -> Any:
        assert self._search is not None
        rows, number = max(1, share.count), self._search.micro_batches
        parts = split_batch(rows, 0, 1, min(number, rows))
        results = []
        for part in parts:
            self._bookkeeping.current_share.set(
                BatchShare(
                    count=min(len(part), share.count),
                    global_count=share.global_count,
                    micro_batches=number,
                    is_last=part is parts[-1],
                )
            )
            args, kwargs = arguments
            if len(parts) > 1:
                args, kwargs = self._select_rows(args, kwargs, rows, part)
            results.append(self._function(*args, **kwargs))
        return merge_results(results, [len(part) for part in parts])

    def _check_order(self) -> None:
        assert self._search is not None
        if self._search.micro_batches > 1 and self._guard.has_backward_after_update:
            raise UsageError(
                f"{self._name} has a backward after an update, which would be that of the last of "
                f"{self._search.micro_batches} micro-batches only; next: one function of @run.step "
                "for each optimizer"
            )

    def _save_state(self) -> Callable[[], None]:
        prepared = self._bookkeeping.prepared
        buffers = [b for model in prepared.models for b in model.buffers() if b.numel()]
        random = get_random_state()
        with torch.no_grad():
            saved = _copies(buffers)

        def restore() -> None:
            self._devices.synchronize()  # kernels on a capture stream that was left by an error
            set_random_state(random)
            for optimizer in prepared.optimizers:
                optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                if buffers:
                    foreach_copy(buffers, saved)

        return restore

    def _free_memory(self) -> None:
        if isinstance(self._function, CapturedStep):
            self._function.close()
        if "compiled" in self._bookkeeping.model_steps():
            torch.compiler.reset()  # the next size would be compiled for all sizes, which is slower
        gc.collect()
        if self._devices.is_cuda:
            torch.cuda.empty_cache()

    def _describe(self, search: MicroBatchSearch, share: BatchShare) -> str:
        each = -(-share.global_count // self._world_size)

        def name(number: int) -> str:
            return f"{number} × {-(-each // number)} samples per device"

        rates = dict(search.samples_per_s)
        chosen = name(search.micro_batches)
        if len(rates) > 1:
            own = rates.pop(search.micro_batches)
            others = ", ".join(f"{name(number)}: {rate:,.0f}" for number, rate in rates.items())
            chosen += f", {own:,.0f} samples/s ({others})"
        return f"{chosen}; the same without a search: nfold.Run(accumulate={search.micro_batches})"

    def _report(self, line: str) -> None:
        if self._world_size == 1 or dist.get_rank() == 0:
            sys.stdout.write(line + "\n")


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    if copies:
        foreach_copy(copies, list(tensors))
    return copies


def _too_late(error: OutOfMemory, name: str) -> OutOfMemory:
    return OutOfMemory(
        f"{error}, in {name} after its gradients were complete: the step cannot be repeated; "
        f'next: nfold.Run(accumulate=...), or optimizer_state="sharded"',
        peak_memory_bytes=error.peak_memory_bytes,
    )


def require_step(steps: Sequence[FittedStep]) -> None:
    """Raise UsageError if no function of a step is known."""
    if not steps:
        raise UsageError(NEEDS_STEP)


@cache
def advise_on_out_of_memory() -> None:
    """Add the next step to the traceback of a script that runs out of memory."""
    before = sys.excepthook

    def add_advice(kind: type[BaseException], error: BaseException, trace: Any) -> Any:
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note(OUT_OF_MEMORY_ADVICE)
        return before(kind, error, trace)

    sys.excepthook = add_advice
