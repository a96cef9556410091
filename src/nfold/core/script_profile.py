"""The profile of an unmodified script: facts that the probe run observes, one per rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nfold.core.measurement import FetchStats

Parallelism = Literal["none", "dp", "ddp", "fsdp", "tensor", "pipeline", "other"]
SHARDED: tuple[Parallelism, ...] = ("fsdp", "tensor", "pipeline")
"""No rank has all parameters; for the last two, the model itself is divided."""
TrainerKind = Literal["", "transformers", "lightning", "fabric", "accelerate"]
# in place of an optimizer's class if a script updates parameters itself and marks its steps
NO_OPTIMIZER = "HandWrittenUpdate"


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
class RowGradient:
    """A dense gradient of which a step changes few rows, as of an embedding."""

    name: str
    bytes: int
    changed_fraction: float


@dataclass(frozen=True, kw_only=True)
class Recompilation:
    """A function that torch.compile compiles again in every step, and the guard that failed.

    ``step_ms`` is the compilation per step: median, first and third quartile.
    """

    function: str
    location: str
    guard: str
    step_ms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class HostToDeviceCopies:
    """Copies from the host to a device per step, and how many came from pinned memory.

    ``waiting_per_step`` are those from pinned memory that do not pass ``non_blocking``.
    """

    per_step: float = 0.0
    bytes_per_step: float = 0.0
    pinned_per_step: float = 0.0
    waiting_per_step: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DataLoaderProfile:
    """The DataLoader that feeds the training; sizes of batches and epochs are of one rank.

    With ``length_read_ahead`` the trainer reads the number of batches before an epoch, which
    therefore cannot be cut short. ``in_generator``: a generator of the script iterates over it,
    perhaps without end. ``host_tensors`` are indices of the tensors of a batch that stay
    on the host while others move to a device. ``renewed_at`` is the line that makes an iterator in
    every step, None if a loop goes through an epoch. ``epoch_unset``: it shuffles by a
    DistributedSampler whose ``set_epoch`` was not called in the warm-up. ``stacks_tensors``: a batch
    is rows of tensors in memory, as of a TensorDataset.
    """

    batch_size: int | None = None
    batches_per_epoch: int | None = None
    dataset_size: int | None = None
    sampler: str = ""  # class name
    shards_dataset: bool | None = None  # None on one rank or if it is unknown
    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    length_read_ahead: bool = False
    host_tensors: tuple[int, ...] = ()
    in_generator: bool = False
    created_at: str | None = None
    renewed_at: str | None = None
    epoch_unset: bool = False
    stacks_tensors: bool = False

    def steps_per_epoch(self, batch: int | None) -> int | None:
        """Return the steps at a global batch size; None if the length of an epoch is unknown."""
        return None if self.dataset_size is None else -(-self.dataset_size // (batch or 1))


@dataclass(frozen=True, kw_only=True)
class FetchLine:
    """A line of the data set, or of a package that it calls, and its part of the time of batches."""

    location: str
    code: str
    fraction: float


@dataclass(frozen=True, kw_only=True)
class BatchFunction:
    """Functions of a script without a DataLoader that make its batches, one after the other.

    ``on_device``: the last moves batches to a GPU. ``function_keys`` (``train.py:12 batches``): the
    functions that are defined decorated when batches are replayed.
    """

    names: tuple[str, ...]
    defined_at: str
    on_device: bool = False
    function_keys: tuple[str, ...] = ()

    @property
    def call_text(self) -> str:
        """``get_batch() and augment()``."""
        return " and ".join(f"{name}()" for name in self.names)


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """The events of some steps of one rank, without communication.

    Layout copies only change the order of dimensions in memory; on a GPU the time since the kernel
    before each is included. ``operator_layout_copy_ms`` is the part inside operators such as
    convolutions, ``cudnn_transpose_ms`` the mean of cuDNN's own transpositions.
    """

    steps: int
    layout_copy_ms: tuple[float, ...]  # per step
    operator_layout_copy_ms: tuple[float, ...] = ()
    cudnn_transpose_ms: float = 0.0
    launches_per_step: float = 0.0
    device_busy_ms: float | None = None  # per step, over all devices; None without a GPU


@dataclass(frozen=True, kw_only=True)
class ReplayHints:
    """Facts of the probe run that later runs of a script need.

    ``script_sets_batch_size``: the plan's is not imposed. The plan is imposed on ``loader``, and in
    proportion on ``companion_loaders``.
    """

    function_keys: tuple[str, ...] = ()
    script_sets_batch_size: bool = False
    loader: DataLoaderProfile | None = None
    companion_loaders: tuple[DataLoaderProfile, ...] = ()
    slices_batches: bool = False

    @property
    def host_tensors(self) -> tuple[int, ...]:
        return () if self.loader is None else self.loader.host_tensors


@dataclass(frozen=True, kw_only=True)
class LoadedLibraries:
    """Modules that a process had imported from packages, in this order.

    ``variables`` configure libraries, and had these values other than at the start of the process:
    an import had set them, or the script.
    """

    modules: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


NO_LIBRARIES = LoadedLibraries()


@dataclass(frozen=True, kw_only=True)
class ScriptProfile:
    """Facts about one rank of a script, observed in its warm-up; samples are of this rank.

    Attributes:
        loader, companion_loaders: the longest DataLoader, and others that give a batch in every
            step, which ``samples_per_step`` does not count.
        accumulation: batches per optimizer step.
        gradient_exchanges: those whose backward exchanges gradients under DDP.
        optimizers: class names in the order of their steps, or ``NO_OPTIMIZER``; the steps of
            ``optimizers[step_optimizer]`` are counted.
        chosen_optimizers: class names of those that the script constructs with ``fused``,
            ``foreach``, ``capturable`` or ``differentiable``.
        row_gradients: large dense gradients of which a step changes few rows, the largest first.
        unused_parameter_bytes: without a gradient in a step, if DDP looks for them.
        epoch_wait_ms: median wait for the first batch of an epoch.
        fetches: batches of the data set after the warm-up, None if they could not be observed;
            ``fetch_lines`` are the lines that took most of their time, in a probe run.
        cached_input_fraction: of the time of a sample, what a data set saves at a second access
            because it keeps the sample; 0 if it does not.
        draws_random_numbers: whether the model draws some in its forward pass, as for dropout.
        alloc_retries: per step after the warm-up, how often the allocator of a GPU was out of memory
            and freed its cache.
        child_processes: without workers of loaders.
        core_ids: that the process is bound to; ``shared_cores`` is the number of those of all ranks
            together, if they are fewer than ranks, else 0.
        uses_join: trains under PyTorch's Join: ranks may have unequal numbers of batches.
        slices_batches: each rank gets the same batches and computes its part of them.
        pass_batches: batches of a pass on every rank, if its DataLoader has no length and the probe
            run could count them.
        fixed_batch_error: error of the script with batches of another size.
        loaded_libraries: what a probe run had imported from packages.
        source_locations: lines of user code, the most frequent first, by event: ``model`` (moved to
            a device), ``wrapper``, ``step``, ``host_sync``, ``copy``, ``collective``, ``threads``
            (number set), ``anomaly`` (detection enabled), ``trainer`` (created), ``generator`` (that
            iterates over the loader), ``past_wrapper`` (calls the model in a DDP directly), ``affinity``
            (binds the process to cores), ``gathered_work`` (product of tensors that are gathered
            from all ranks), ``gathered_pairs`` (of such a tensor and samples of the rank),
            ``order on cuda`` or ``order on cpu`` (dimensions reordered in memory), ``optimizer``
            (constructed), ``zeroed_gradients`` (filled with zeros, not deleted),
            ``checkpoint`` (activations are computed again in the backward), ``run`` (``nfold.Run``
            created).
    """

    rank: int = 0
    world_size: int = 1
    steps: int = 0
    parallel: Parallelism = "none"  # ``other``: collectives without a wrapper
    trainer: TrainerKind = ""
    process_group: bool = False
    backend: str | None = None
    device: str = "cpu"
    dp_devices: int = 0  # under nn.DataParallel, which does nothing on the CPU
    loader: DataLoaderProfile | None = None
    companion_loaders: tuple[DataLoaderProfile, ...] = ()
    batch_function: BatchFunction | None = None
    samples_per_step: float = 0.0
    model_samples_per_step: float = 0.0
    accumulation: int = 1
    optimizers: tuple[str, ...] = ()
    step_optimizer: int = 0
    chosen_optimizers: tuple[str, ...] = ()
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
    row_gradients: tuple[RowGradient, ...] = ()
    gradient_exchanges: float = 0.0
    collectives: tuple[CollectiveUse, ...] = ()
    copies: HostToDeviceCopies = field(default_factory=HostToDeviceCopies)
    host_syncs: float = 0.0
    detects_anomalies: bool = False
    input_wait_ms: float = 0.0
    fetches: FetchStats | None = None
    fetch_lines: tuple[FetchLine, ...] = ()
    cached_input_fraction: float = 0.0
    precision: str = "fp32"
    autocast: str | None = None
    compiled: bool = False
    recompilation: Recompilation | None = None
    epoch_wait_ms: float = 0.0
    channels_last: bool = False
    draws_random_numbers: bool = False
    model_calls_hooked: bool = False
    threads: int = 1
    core_ids: tuple[int, ...] = ()
    shared_cores: int = 0
    peak_memory_bytes: int | None = None
    alloc_retries: float = 0.0
    trace: TraceSummary | None = None
    epochs_completed: int = 0
    child_processes: int = 0
    uses_join: bool = False
    slices_batches: bool = False
    pass_batches: tuple[int, ...] = ()
    fixed_batch_error: str = ""
    loaded_libraries: LoadedLibraries = NO_LIBRARIES
    source_locations: dict[str, tuple[SourceLocation, ...]] = field(default_factory=dict)

    @property
    def has_no_optimizer(self) -> bool:
        return self.optimizers == (NO_OPTIMIZER,)

    @property
    def training_loader(self) -> DataLoaderProfile:
        """The DataLoader that feeds the training, or an empty profile."""
        return self.loader or DataLoaderProfile()

    @property
    def uses_fsdp(self) -> bool:
        """Return whether FSDP shards the parameters over ranks."""
        return self.parallel == "fsdp"

    @property
    def exchanges_all_gradients(self) -> bool:
        """Return whether DDP or all-reduces exchange the gradients of all parameters in every step."""
        if self.parallel == "ddp":
            in_ddp = self.gradient_exchanges >= 1
            return in_ddp and sum(self.bucket_bytes) >= self.parameter_bytes > 0
        reduced = sum(c.bytes_per_step for c in self.collectives if c.name == "all_reduce")
        return reduced >= self.parameter_bytes > 0

    @property
    def compressed_gradient_type(self) -> str:
        """The 16-bit type in which DDP could send gradients; "" if it sends no dense fp32 unchanged.

        The bf16 hook of DistributedDataParallel needs NCCL; others use fp16.
        """
        dense = self.parallel == "ddp" and not self.sparse_gradient_bytes
        is_fp32 = self.parameter_bytes == 4 * self.parameter_count
        if not (dense and is_fp32) or self.comm_hook:
            return ""
        return "bf16" if self.backend == "nccl" else "fp16"

    @property
    def replay_hints(self) -> ReplayHints:
        function = self.batch_function
        return ReplayHints(
            function_keys=() if function is None else function.function_keys,
            script_sets_batch_size=not self.accepts_batch_size,
            loader=self.loader,
            companion_loaders=self.companion_loaders,
            slices_batches=self.slices_batches,
        )

    @property
    def accepts_batch_size(self) -> bool:
        """Return whether batches of another size are possible: a DataLoader with a known batch size."""
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
        found = self.most_frequent(event)
        return found.line if found else None
