"""The profile of an unmodified script: facts that the probe run observes, one per rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nfold.core.measurement import FetchStats

Parallelism = Literal["none", "dp", "ddp", "fsdp", "tensor", "pipeline", "other"]
SHARDED: tuple[Parallelism, ...] = ("fsdp", "tensor", "pipeline")
"""No rank has all parameters; for the last two, the model itself is divided."""
TrainerKind = Literal["", "transformers", "lightning", "fabric", "accelerate"]
NO_OPTIMIZER = "Backward"  # in place of an optimizer's class if a script updates parameters itself


@dataclass(frozen=True, kw_only=True)
class SourceLocation:
    """A line of user code, ``train.py:42``, and how often per step it is executed.

    ``package_line`` is the line of the package that it calls, None if the line itself acts.
    """

    line: str
    per_step: float = 0.0
    package_line: str | None = None


@dataclass(frozen=True, kw_only=True)
class CollectiveUse:
    """A kind of collective: calls per step, and bytes of one rank per step."""

    name: str
    per_step: float
    bytes_per_step: float


@dataclass(frozen=True, kw_only=True)
class HostToDeviceCopies:
    """Copies from the host to a device per step, and how many came from pinned memory."""

    per_step: float = 0.0
    bytes_per_step: float = 0.0
    pinned_per_step: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DataLoaderProfile:
    """The DataLoader that feeds the training.

    Attributes:
        batch_size: of one rank.
        batches_per_epoch: of one rank; None: unknown.
        dataset_size: of the whole data set; None: unknown.
        sampler: class name.
        shards_dataset: ranks get different samples; None on one rank or if it is unknown.
        length_read_ahead: the trainer reads the number of batches before an epoch, which therefore
            cannot be cut short.
        host_tensors: indices of the tensors of a batch that stay on the host while others move to a
            device.
        cycled: a generator of the script iterates again and again, so that epochs cannot be seen.
        created_at: line of user code that created it.
    """

    batch_size: int | None = None
    batches_per_epoch: int | None = None
    dataset_size: int | None = None
    sampler: str = ""
    shards_dataset: bool | None = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    length_read_ahead: bool = False
    host_tensors: tuple[int, ...] = ()
    cycled: bool = False
    created_at: str | None = None


ANONYMOUS_FUNCTIONS = {"<genexpr>": "a generator expression", "<lambda>": "a lambda"}


@dataclass(frozen=True, kw_only=True)
class BatchFunction:
    """Functions of a script without a DataLoader that make its batches, one after the other.

    Attributes:
        defined_at: where the first begins.
        on_device: the last moves batches to a GPU.
        generator_functions: ``train.py:12 batches`` for generators, which are defined differently
            when batches are replayed.
    """

    names: tuple[str, ...]
    defined_at: str
    on_device: bool = False
    generator_functions: tuple[str, ...] = ()

    @property
    def call_text(self) -> str:
        """``get_batch() and augment()``."""
        return " and ".join(ANONYMOUS_FUNCTIONS.get(name, f"{name}()") for name in self.names)


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """What a profiler observed in some steps of one rank.

    Attributes:
        layout_copy_ms: per step, copies that only change the order of dimensions in memory; on a
            GPU with the time since the kernel before each.
        operator_layout_copy_ms: the part inside operators such as convolutions.
        cudnn_transpose_ms: mean per step of cuDNN's own transpositions around its convolutions.
        launches_per_step: kernels and copies on a device, without communication.
        device_busy_ms: per step, without communication, summed over devices; None without a GPU.
    """

    steps: int
    layout_copy_ms: tuple[float, ...]
    operator_layout_copy_ms: tuple[float, ...] = ()
    cudnn_transpose_ms: float = 0.0
    launches_per_step: float = 0.0
    device_busy_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayHints:
    """Facts of the probe run that later runs of a script need.

    Attributes:
        generator_functions: of the ``BatchFunction``.
        script_sets_batch_size: the data set or the sampler decides the batch size: the plan's is
            not imposed.
        loader: the plan is imposed on it, and in proportion on ``companion_loaders``.
        slices_batches: as in ``ScriptProfile``.
    """

    generator_functions: tuple[str, ...] = ()
    script_sets_batch_size: bool = False
    loader: DataLoaderProfile | None = None
    companion_loaders: tuple[DataLoaderProfile, ...] = ()
    slices_batches: bool = False

    @property
    def host_tensors(self) -> tuple[int, ...]:
        return () if self.loader is None else self.loader.host_tensors


@dataclass(frozen=True, kw_only=True)
class ScriptProfile:
    """Facts about one rank of a script, observed in its warm-up.

    Attributes:
        parallel: how the script uses several devices; ``other``: collectives without a wrapper.
        device: of the parameters.
        dp_devices: devices under nn.DataParallel, 0 on the CPU, where it does nothing.
        loader, companion_loaders: the longest DataLoader, and others that give a batch in every
            step, which ``samples_per_step`` does not count.
        samples_per_step: of this rank.
        model_samples_per_step: samples that reach the model, if observed.
        accumulation: batches per optimizer step.
        gradient_exchanges: those whose backward exchanges gradients under DDP.
        optimizers: class names in the order of their steps, or ``NO_OPTIMIZER``; the steps of
            ``optimizers[step_optimizer]`` are counted.
        steps_in_backward: some optimizers step during a backward.
        unused_parameter_bytes: without a gradient in a step, if DDP looks for them.
        comm_hook: name of DDP's communication hook.
        sparse_gradient_bytes: bytes of parameters whose gradients are sparse.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``; ``autocast`` if it is automatic.
        compiled: torch.compile compiles a part of the script.
        detects_anomalies: autograd looks for NaN in every backward.
        input_wait_ms: wait for the DataLoader per step.
        epoch_wait_ms: median wait for the first batch of an epoch.
        fetches: batches of the data set after the warm-up, None if they could not be observed.
        model_calls_hooked: calls of the model are observed after the warm-up as well.
        alloc_retries: per step after the warm-up, how often a GPU was out of memory and the
            allocator freed its cache and tried again.
        trace: of a profiler after the other steps, None if it was not requested.
        child_processes: without workers of loaders.
        uses_join: trains under PyTorch's Join: ranks may have unequal numbers of batches.
        slices_batches: each rank gets the same batches and computes its part of them.
        fixed_batch_error: error of the script with batches of another size.
        source_locations: lines of user code, the most frequent first, by event: ``model`` (moved to
            a device), ``wrapper``, ``step``, ``host_sync``, ``copy``, ``collective``, ``threads``
            (number set), ``anomaly`` (detection enabled), ``trainer`` (created), ``order on cuda``
            or ``order on cpu`` (dimensions reordered in memory).
    """

    rank: int = 0
    world_size: int = 1
    steps: int = 0
    parallel: Parallelism = "none"
    trainer: TrainerKind = ""
    process_group: bool = False
    backend: str | None = None
    device: str = "cpu"
    dp_devices: int = 0
    loader: DataLoaderProfile | None = None
    companion_loaders: tuple[DataLoaderProfile, ...] = ()
    batch_function: BatchFunction | None = None
    samples_per_step: float = 0.0
    model_samples_per_step: float = 0.0
    accumulation: int = 1
    optimizers: tuple[str, ...] = ()
    step_optimizer: int = 0
    steps_in_backward: bool = False
    skipped_steps: int = 0
    parameter_count: int = 0
    parameter_bytes: int = 0
    convolutions: int = 0
    batch_norms: int = 0
    synchronised_batch_norms: int = 0
    find_unused_parameters: bool = False
    unused_parameter_bytes: int = 0
    broadcast_buffers: bool = False
    buffers: int = 0
    buffer_bytes: int = 0
    bucket_bytes: tuple[int, ...] = ()
    comm_hook: str = ""
    sparse_gradient_bytes: int = 0
    gradient_exchanges: float = 0.0
    collectives: tuple[CollectiveUse, ...] = ()
    copies: HostToDeviceCopies = field(default_factory=HostToDeviceCopies)
    host_syncs: float = 0.0
    detects_anomalies: bool = False
    input_wait_ms: float = 0.0
    fetches: FetchStats | None = None
    precision: str = "fp32"
    autocast: str | None = None
    compiled: bool = False
    epoch_wait_ms: float = 0.0
    channels_last: bool = False
    model_calls_hooked: bool = False
    threads: int = 1
    peak_memory_bytes: int | None = None
    alloc_retries: float = 0.0
    trace: TraceSummary | None = None
    epochs_completed: int = 0
    child_processes: int = 0
    uses_join: bool = False
    slices_batches: bool = False
    fixed_batch_error: str = ""
    source_locations: dict[str, tuple[SourceLocation, ...]] = field(default_factory=dict)

    @property
    def has_no_optimizer(self) -> bool:
        return self.optimizers == (NO_OPTIMIZER,)

    @property
    def exchanges_all_gradients(self) -> bool:
        """Whether DDP exchanges the gradients of all parameters in every step."""
        return self.gradient_exchanges >= 1 and sum(self.bucket_bytes) >= self.parameter_bytes > 0

    @property
    def sends_fp32_gradients(self) -> bool:
        """Whether DDP sends dense fp32 gradients unchanged, so that half precision is possible."""
        dense = self.parallel == "ddp" and not self.sparse_gradient_bytes
        return dense and not self.comm_hook and self.parameter_bytes == 4 * self.parameter_count

    @property
    def replay_hints(self) -> ReplayHints:
        function = self.batch_function
        return ReplayHints(
            generator_functions=() if function is None else function.generator_functions,
            script_sets_batch_size=not self.accepts_batch_size,
            loader=self.loader,
            companion_loaders=self.companion_loaders,
            slices_batches=self.slices_batches,
        )

    @property
    def accepts_batch_size(self) -> bool:
        """Whether batches of another size are possible: a DataLoader with a known batch size."""
        known = self.loader is not None and self.loader.batch_size is not None
        return known and not self.fixed_batch_error

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one optimizer step over all ranks; None without a DataLoader."""
        if self.loader is None or self.loader.batch_size is None:
            return None
        shares = 1 if self.slices_batches else self.world_size
        return self.loader.batch_size * self.accumulation * shares

    def most_frequent(self, event: str) -> SourceLocation | None:
        """Return the location where an event happens most often, None if it is unknown."""
        return next(iter(self.source_locations.get(event, ())), None)

    def most_frequent_line(self, event: str) -> str | None:
        """Return the line of user code where an event happens most often, None if unknown."""
        found = self.most_frequent(event)
        return found.line if found else None
