"""What was seen of a script that nobody changed, from outside, while it trained. One per rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nfold.core.measurement import FetchStats

Parallelism = Literal["none", "dp", "ddp", "fsdp", "tensor", "pipeline", "other"]
SHARDED: tuple[Parallelism, ...] = ("fsdp", "tensor", "pipeline")
"""Where no rank has all parameters: of the last two the model itself is divided."""
TrainerKind = Literal["", "transformers", "lightning", "fabric", "accelerate"]
"""What a script lets train: Hugging Face's Trainer, Lightning's, Fabric, Accelerate, or none."""
NO_OPTIMIZER = "Backward"
"""In the place of an optimizer's class, where a script updates its parameters itself."""


@dataclass(frozen=True, kw_only=True)
class SourceLocation:
    """A line of the user's own code, ``train.py:42``, and how often a step comes there.

    ``inside`` is the line of the package that is called there and does it, None where the user's
    own line does.
    """

    line: str
    per_step: float = 0.0
    package_line: str | None = None


@dataclass(frozen=True, kw_only=True)
class CollectiveUse:
    """A kind of collective: how many a step, and the bytes of one rank in a step."""

    name: str
    per_step: float
    bytes_per_step: float


@dataclass(frozen=True, kw_only=True)
class HostToDeviceCopies:
    """Copies from the host to a device in a step, and how many came from pinned memory."""

    per_step: float = 0.0
    bytes_per_step: float = 0.0
    pinned_per_step: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DataLoaderProfile:
    """The DataLoader that feeds the training.

    ``batch`` is what one rank gets at once, ``batches`` and ``samples`` the lengths of its epoch
    and of the whole data set (None: not known). ``sampler`` is a class's name; ``divides`` says
    whether ranks get different parts of the data set, None on one rank or where nobody knows.
    ``counted`` says whether what trains counts an epoch's batches before it begins: then none can
    be cut short. ``stay`` are the places, among the tensors of a batch, of those that the script
    leaves on the host while it takes others to a device. ``around``: a generator of the script's
    goes through it again and again, so that steps are counted. ``place`` is where the user's code
    made it.
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
    """Functions of the script's own that make its batches, one after the other.

    Of a script that a DataLoader feeds there are none. ``place`` is where the first begins;
    ``on_device`` says whether the last moves them to a GPU. Of those that are ``generators``,
    ``train.py:12 batches``: what is to be defined differently where batches are given again.
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
    """What a profiler saw in some steps of one rank.

    ``reordering_ms`` are those of each step in which a copy changes only the order of dimensions in
    memory, on a GPU with what lies between each such kernel and the one before;
    ``in_operators_ms`` are those of them that operators on images make themselves, such as
    convolutions and interpolations. ``transposing_ms`` are those of a step, in the mean, in which
    cuDNN's own kernels do so around its convolutions.
    ``launches`` counts kernels and copies on a device in a step, ``busy_ms`` is how long any runs
    (None: there is no GPU), added up over devices; exchanges between devices are in neither.
    """

    steps: int
    layout_copy_ms: tuple[float, ...]
    operator_layout_copy_ms: tuple[float, ...] = ()
    cudnn_transpose_ms: float = 0.0
    launches_per_step: float = 0.0
    device_busy_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayHints:
    """What a first look at a script tells the runs after it.

    ``generators`` make its batches, as ``Maker`` has them. With ``own_batches`` its data set or its
    sampler decides how large a batch is: a plan tells that size, and it is not imposed. A plan
    imposes on ``loader`` what it says, and as much in proportion on those ``beside`` it. ``slices``
    as ``Seen`` has it.
    """

    generator_functions: tuple[str, ...] = ()
    script_sets_batch_size: bool = False
    loader: DataLoaderProfile | None = None
    companion_loaders: tuple[DataLoaderProfile, ...] = ()
    slices_batches: bool = False

    @property
    def host_tensors(self) -> tuple[int, ...]:
        """The tensors of a batch that are left on the host, as ``Loader`` has them."""
        return () if self.loader is None else self.loader.host_tensors


@dataclass(frozen=True, kw_only=True)
class ScriptProfile:
    """The facts of one rank of a script, from its warm-up.

    ``parallel`` is how it uses several devices: a wrapper of PyTorch's, ``other`` for collectives
    without one. ``dp_devices`` counts the devices under nn.DataParallel, 0 on CPU devices, where
    it does nothing. ``device`` is where the parameters are. ``accumulation`` counts the batches of
    one optimizer step, ``exchanges`` those whose backward exchanges gradients under DDP,
    ``samples_per_step`` their samples on this rank. ``optimizers`` are class names in the order of
    their steps (``Backward`` where there is none: each backward is a step); the steps of
    ``optimizers[boundary]`` are counted, ``in_backward`` says whether some step while a backward
    runs, each as soon as it has its gradients. ``precision`` is ``fp32``,
    ``tf32``, ``bf16`` or ``fp16`` as the forward computes, ``autocast`` the type where it is
    automatic, and ``compiled`` says whether torch.compile compiles any of it. ``input_wait_ms`` is
    how long a step waited for the DataLoader, ``epoch_wait_ms`` how long for the first batch of a
    pass over it, in the middle. ``fetches`` are the batches that its data set gave after the
    warm-up, None where nobody could watch it. ``epochs_ended`` counts passes of the DataLoader,
    ``children`` processes that the script started apart from loaders' workers.

    ``detects_anomalies`` says whether autograd looks for NaN in every backward.

    ``traced`` is what a profiler saw after the other steps, None where nobody asked for it.
    ``alloc_retries`` counts, of a step after the warm-up, how often a GPU had no memory left, so
    that the allocator gave back what it kept and asked again.

    ``beside`` are DataLoaders that give a batch in every step, too, which ``samples_per_step`` does
    not count; of all the longest is ``loader``.

    ``followed`` says whether calls of its model are noticed after the warm-up as well, ``uneven``
    whether its ranks may have unequal numbers of batches: it trains under PyTorch's Join.

    ``through_model`` are the samples of a step that its model gets, as far as that is seen, and
    ``slices`` says whether each rank gets the same whole batches and computes its part of them.
    ``fixed_batch`` is what it fails with where its batches have another size.

    ``unused_parameter_bytes`` are those that DDP found without a gradient in a step, where it is
    told to look for them. ``comm_hook`` is the name of the hook that it sends gradients with, ""
    without one, and ``sparse_gradient_bytes`` are those of parameters whose gradients are sparse.

    ``places`` are lines of the user's code, the most frequent first, by what happens there:
    ``model`` (moved to a device), ``wrapper``, ``step``, ``host_sync``, ``copy``, ``collective``,
    ``threads`` (their number set), ``anomaly`` (its detection switched on), ``trainer`` (made),
    ``order on cuda`` or ``cpu`` (dimensions written in another order there).
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
        """Whether the script updates its parameters itself: ``Backward`` stands for that."""
        return self.optimizers == (NO_OPTIMIZER,)

    @property
    def exchanges_all_gradients(self) -> bool:
        """Whether one DDP exchanges the gradients of all that is trained, in every step."""
        return self.gradient_exchanges >= 1 and sum(self.bucket_bytes) >= self.parameter_bytes > 0

    @property
    def sends_fp32_gradients(self) -> bool:
        """Whether DDP sends dense gradients of 4 bytes as they are: half of them can be sent."""
        dense = self.parallel == "ddp" and not self.sparse_gradient_bytes
        return dense and not self.comm_hook and self.parameter_bytes == 4 * self.parameter_count

    @property
    def replay_hints(self) -> ReplayHints:
        """What later runs need to know of it."""
        return ReplayHints(
            generator_functions=self.batch_function.generator_functions
            if self.batch_function is not None
            else (),
            script_sets_batch_size=not self.accepts_batch_size,
            loader=self.loader,
            companion_loaders=self.companion_loaders,
            slices_batches=self.slices_batches,
        )

    @property
    def accepts_batch_size(self) -> bool:
        """Whether it can be given batches of another size: a DataLoader's, whose size is known."""
        fixed = self.loader is None or self.loader.batch_size is None
        return not (fixed or self.fixed_batch_error)

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one optimizer step over all ranks; None where no DataLoader gave them."""
        if self.loader is None or self.loader.batch_size is None:
            return None
        return (
            self.loader.batch_size
            * self.accumulation
            * (1 if self.slices_batches else self.world_size)
        )

    def most_frequent(self, event: str) -> SourceLocation | None:
        """Where it happens most often, None where that is not known."""
        found = self.source_locations.get(event, ())
        return found[0] if found else None

    def most_frequent_line(self, event: str) -> str | None:
        """The most frequent line of the user's code where it happens, None where none is known."""
        found = self.most_frequent(event)
        return found.line if found else None
