"""Profile of a script: installs the hooks of the warm-up, and collects the facts."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from nfold.core.errors import Unsupported
from nfold.core.import_hooks import call_after_import
from nfold.core.script_profile import (
    NO_LIBRARIES,
    SHARDED,
    BatchFunction,
    CollectiveUse,
    DataLoaderProfile,
    HostToDeviceCopies,
    RowGradient,
    ScriptProfile,
)
from nfold.engines.base import Task
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.torch.devices import Devices
from nfold.engines.torch.nested_tensors import yields_rows
from nfold.engines.torch.torch_settings import TorchSettings
from nfold.instrument import torch_private
from nfold.instrument.hooks.distributed_hooks import (
    CollectiveHooks,
    DataParallelHooks,
    calling_line,
)
from nfold.instrument.hooks.gathered_tensors import GatheredTensors, is_parameter_of
from nfold.instrument.hooks.model_hooks import (
    HALF_PRECISIONS,
    ChannelsLastWeights,
    ForwardObserver,
    ModelCompiler,
    RecompilationCheck,
    compiled_graphs,
)
from nfold.instrument.hooks.optimizer_hooks import is_chosen
from nfold.instrument.hooks.patches import Patches, TrainerDetector
from nfold.instrument.hooks.runtime_hooks import (
    COPIES,
    HOST_SYNC,
    PINNED,
    WAITING,
    AnomalyDetectionHook,
    EventCounter,
    HostReads,
    ThreadCountHook,
    install_tensor_hooks,
    is_sparse,
)
from nfold.instrument.hooks.script_remedies import ScriptRemedies
from nfold.instrument.input.batch_functions import BatchFunctionHooks
from nfold.instrument.input.dataloader_hook import (
    DataLoaderHook,
    StepInput,
    batch_size_of,
    is_epoch_unset,
    samplers_of,
)
from nfold.instrument.input.epoch_passes import (
    RENEWAL_ATTRIBUTE,
    epoch_length_is_read_ahead,
    generator_line,
    length_or_none,
    script_sampler,
)
from nfold.instrument.input.fetch_times import NO_FETCHES, FetchTimer, FetchTotal, fetch_difference
from nfold.instrument.input.marked_batches import CALL_NAME, MarkedBatches
from nfold.instrument.input.repeated_access import repeated_access_saving
from nfold.instrument.loaded_libraries import loaded_libraries
from nfold.instrument.model_inputs import ModelInputLog
from nfold.instrument.optimizer_steps import OptimizerStepHooks, StepOptimizer
from nfold.instrument.rank_environment import AffinityHook, computes_slice
from nfold.instrument.trained_model import TrainedModel

RUN_MODULE = "nfold.engines.torch.run.user_run"


class ScriptProfiler:
    """Installs the hooks of one rank, and builds its profile at the end of the warm-up."""

    def __init__(
        self,
        task: Task,
        variant: ActiveVariant,
        dataloaders: DataLoaderHook,
        step_optimizer: StepOptimizer,
        step_hooks: OptimizerStepHooks,
        trainers: TrainerDetector,
        affinity: AffinityHook,
    ) -> None:
        self._task = task
        self._variant = variant
        self._dataloaders = dataloaders
        self._step_optimizer = step_optimizer
        self._step_hooks = step_hooks
        self._trainers = trainers
        self._affinity = affinity
        self._events = EventCounter()
        self.batch_functions = BatchFunctionHooks(
            variant, dataloaders.new_replay, dataloaders.on_batch_request
        )
        self._forwards = ForwardObserver(
            self._on_model_input, step_hooks.on_compute, self._on_outermost_call
        )
        self._wrappers = DataParallelHooks(variant, lambda: self._events.record_location("wrapper"))
        self.trained_model = TrainedModel(
            step_optimizer, self._wrappers, self._forwards, self._events
        )
        self._gathered = GatheredTensors(
            self._events, lambda tensor: is_parameter_of(self._wrappers.ddp, tensor)
        )
        observed = self._gathered.on_gather if task.variant.profiler_steps else None
        self.collectives = CollectiveHooks(variant, self._events, observed)
        self._anomalies = AnomalyDetectionHook(variant, self._events)
        self._threads = ThreadCountHook(variant, self._events)
        self._settings = TorchSettings(variant.all_variants)
        self._host_reads = HostReads(variant, lambda: dataloaders.replayed_index)
        self._host_read_patches = Patches()
        self._compiler = ModelCompiler(variant.current.compiled)
        self._remedies = ScriptRemedies(variant.current, self._events)
        self.fetch_timer = FetchTimer(sample_lines=task.variant.profiler_steps)
        self._warm_up_fetches = NO_FETCHES
        self._warm_up_retries = 0
        probes = task.variant.profiler_steps
        self.model_inputs = ModelInputLog(None) if probes else ModelInputLog()
        self.recompilation = RecompilationCheck()
        self._batches: list[int] = []
        self._counts: list[int] = []
        self._model_counts: list[int] = []
        self._slices = task.world_size if computes_slice(task) else 1
        self._wait_s = 0.0
        self._profile = ScriptProfile(rank=task.rank)
        self.uses_join = False
        self.child_processes = 0

    def install(self, patches: Patches, warm_up: Patches) -> None:
        self._wrappers.install(patches, warm_up)
        if self._variant.current.channels_last:
            ChannelsLastWeights().install(patches)
        self.collectives.install(patches, warm_up)
        self._anomalies.install(patches, warm_up)
        self.fetch_timer.install(patches, on_worker_start=lambda: self.uninstall(warm_up))
        for name in ("to", "cuda"):
            warm_up.wrap(nn.Module, name, self._move_module)
        # Before the hooks of the warm-up, which are removed first.
        self._remedies.install(patches, warm_up)
        if not self._variant.is_baseline("host_syncs"):
            self._host_reads.install(self._host_read_patches)
        install_tensor_hooks(warm_up, self._events, self._dataloaders.transfers.record_transfer)
        self._settings.apply(self._variant.current)
        self._threads.install(patches, warm_up)  # the script cannot change a number that is set
        patches.wrap(BaseProcess, "start", self._start_process)
        call_after_import(
            {RUN_MODULE: lambda module: warm_up.wrap(module.UserRun, "__init__", self._create_run)}
        )
        self._forwards.start()
        self._compiler.start()

    def _create_run(self, original: Any, run: Any, *args: Any, **kwargs: Any) -> None:
        self._events.record_location("run")
        original(run, *args, **kwargs)

    def switch_variant(self) -> None:
        self._wrappers.switch_variant()
        self._anomalies.switch_variant()
        self._settings.apply(self._variant.current)

    def _start_process(self, original: Any, process: Any) -> None:
        module = getattr(getattr(process, "_target", None), "__module__", "")
        self.child_processes += not str(module).startswith("torch.utils.data")
        original(process)

    def _on_model_input(self, inputs: Any) -> None:
        self.batch_functions.on_model_input(inputs)
        self.model_inputs.record(inputs)

    def _on_outermost_call(self, module: nn.Module) -> None:
        model = self._wrappers.wrapped_model(module)
        if model is not None:
            self._events.record_line("past_wrapper", calling_line(model))

    def _move_module(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if next(module.parameters(), None) is not None:  # a loss function may have none
            self._events.record_location("model")
        return original(module, *args, **kwargs)

    @property
    def step_line(self) -> str | None:
        """The line of the script that ends most steps."""
        return self._profile.most_frequent_line("step")

    @property
    def may_compile(self) -> bool:
        """Return whether the second step may compile too: a batch of another shape does."""
        return bool(self._variant.current.compiled) or compiled_graphs() > 0

    def on_first_step(self) -> None:
        if self.trained_model.parallelism() in SHARDED and not self._variant.is_baseline(
            "exchange"
        ):
            raise Unsupported(
                "exchange: the parameters are sharded, and cannot be computed without "
                "communication; allowed are variants of the input, and the baseline on one device"
            )
        self._require_wrapper()
        self._remedies.on_first_step()
        # The script may have changed settings in the code before its first step.
        self._settings.record_usual(self._variant.current)
        self._settings.apply(self._variant.current)
        self._events.enabled = True
        self.collectives.on_first_step()
        if self._dataloaders.training.loader is None:
            self.batch_functions.start()

    def _require_wrapper(self) -> None:
        arguments = self._variant.current.ddp_arguments()
        if arguments and not self._wrappers.ddp:
            raise Unsupported(
                f"{', '.join(arguments)}: the script makes no DistributedDataParallel"
            )

    def on_step(self, step_input: StepInput) -> int:
        """Record a step and return its samples.

        If no samples are observed, a step counts as one sample, so that there is a throughput.
        """
        self._wait_s += step_input.wait_s
        self._wrappers.on_step()
        fed = step_input.batches or self._dataloaders.training.loader is not None
        if not self._dataloaders.in_warm_up:
            counted = step_input.samples if fed else self._samples_per_step
            return counted // self._slices if any(self._counts) else 1
        self._model_counts.append(self._forwards.take_sample_count())
        self.recompilation.on_step()
        self._gathered.on_step()
        self._batches.append(step_input.batches)
        self._counts.append(step_input.samples if fed else self._model_counts[-1])
        self.batch_functions.on_step()
        if self._events.enabled:
            self._events.record_location("step")
        return self._counts[-1]

    @property
    def _samples_per_step(self) -> int:
        return round(median(self._counts)) if self._counts else 0

    def end_warm_up(self, steps: int, devices: Devices) -> None:
        """Remove the hooks of the warm-up, one step before its end, and build the profile."""
        if self.uses_join and self._dataloaders.training.loader is None:
            raise Unsupported(
                "Join: ranks may make unequal numbers of steps, which nfold can equalize for a "
                "DataLoader only; next: load the batches of each rank with a DataLoader"
            )
        self.stop()
        self._remedies.end_warm_up()
        self._forwards.keep_outermost_hooks()
        self._host_reads.end_warm_up()
        self._settings.record_usual(self._variant.current)
        self._wait_s = 0.0
        self._profile = self._build_profile(steps - 1)
        self.batch_functions.install_replacements()
        self._compiler.require_compiled(compiled=self._profile.compiled)
        self._warm_up_fetches = self.fetch_total
        self._warm_up_retries = devices.allocator_retries()

    def uninstall(self, warm_up: Patches) -> None:
        """Remove all hooks in reverse order; in a loader worker immediately."""
        self.stop()
        warm_up.undo()
        self._host_read_patches.undo()

    def restore_settings(self) -> None:
        self._settings.restore()
        self._remedies.restore()

    def stop(self) -> None:
        self._events.enabled = False
        self._gathered.stop()
        self.batch_functions.stop()
        self._forwards.stop()
        self._compiler.stop()
        self._remedies.stop()

    def final_profile(self, timed_steps: int, devices: Devices) -> ScriptProfile:
        retries = devices.allocator_retries() - self._warm_up_retries
        waits_s = self._dataloaders.first_waits_s
        waits_s = waits_s[1:] or waits_s
        return dataclasses.replace(
            self._profile,
            steps=timed_steps,
            input_wait_ms=1e3 * self._wait_s / max(1, timed_steps),
            epoch_wait_ms=1e3 * median(waits_s) if waits_s else 0.0,
            fetches=fetch_difference(self._warm_up_fetches, self.fetch_total),
            fetch_lines=self.fetch_timer.lines(),
            recompilation=self.recompilation.found(),
            cached_input_fraction=self._cached_input_fraction,
            skipped_steps=self._step_hooks.skipped_steps,
            peak_memory_bytes=devices.peak_memory_bytes(),
            alloc_retries=retries / max(1, timed_steps),
            epochs_completed=self._dataloaders.epochs_completed,
            child_processes=self.child_processes,
        )

    @functools.cached_property
    def _cached_input_fraction(self) -> float:
        # Once: the first call fills the cache.
        loader = self._dataloaders.training.loader
        probed = self._task.variant.profiler_steps and isinstance(loader, DataLoader)
        return repeated_access_saving(loader.dataset) if probed and not loader.num_workers else 0.0

    @property
    def fetch_total(self) -> FetchTotal:
        return self.fetch_timer.total(
            self._dataloaders.training.loader, self._dataloaders.training.companions.all
        )

    def _build_profile(self, steps: int) -> ScriptProfile:
        wrappers, forwards, dataloaders = self._wrappers, self._forwards, self._dataloaders
        device = next((str(p.device) for p in self.trained_model.parameters), "cpu")
        self._events.record_line("trainer", self._trainers.creation_line)
        self._events.record_line("affinity", *self._affinity.line)
        for call in self._step_hooks.optimizer_calls:
            self._events.record_line("optimizer", *call)
        loader, batch_function = None, self.batch_functions.batch_function
        if isinstance(dataloaders.training.loader, MarkedBatches):
            batch_function = marked_function(dataloaders.training.loader)
        elif dataloaders.training.loader is not None:
            self._events.record_line("generator", generator_line(dataloaders.training.loader))
            line = dataloaders.training.creation_line(dataloaders.training.loader)
            loader = loader_facts(
                dataloaders.training.loader, line, dataloaders.transfers.host_tensors
            )
        batches = round(median(self._batches)) if self._batches else 0
        accumulation = max(1, batches or self.batch_functions.batches_per_step)
        wrappers.accumulation = accumulation
        return ScriptProfile(
            rank=self._task.rank,
            gradient_exchanges=wrappers.exchanges_per_step(len(self._counts)),
            parallel=self.trained_model.parallelism(),
            trainer=self._trainers.used,
            device=device,
            loader=loader,
            companion_loaders=tuple(
                loader_facts(companion, dataloaders.training.creation_line(companion))
                for companion in dataloaders.training.companions.all
                if not isinstance(companion, MarkedBatches)
            ),
            batch_function=batch_function if loader is None else None,
            samples_per_step=float(self._samples_per_step),
            model_samples_per_step=float(median(self._model_counts or [0])),
            accumulation=accumulation,
            optimizers=tuple(type(opt).__name__ for opt in self._step_optimizer.optimizers),
            step_optimizer=self._step_optimizer.index,
            chosen_optimizers=tuple(
                type(opt).__name__ for opt in self._step_optimizer.optimizers if is_chosen(opt)
            ),
            steps_in_backward=self._step_hooks.steps_in_backward,
            precision=precision_of(self.trained_model.parameters, forwards.autocast),
            autocast=forwards.autocast,
            channels_last=forwards.channels_last,
            draws_random_numbers=forwards.draws_random_numbers,
            model_calls_hooked=forwards.keeps_hooks,
            compiled=compiled_graphs() > 0,
            detects_anomalies=self._anomalies.enabled,
            threads=torch.get_num_threads(),
            core_ids=tuple(sorted(getattr(os, "sched_getaffinity", lambda _: ())(0))),
            uses_join=self.uses_join,
            loaded_libraries=loaded_libraries()
            if self._task.variant.profiler_steps
            else NO_LIBRARIES,
            **group_facts(device.partition(":")[0]),
            **wrappers.facts(),
            **model_facts(forwards.model, self.trained_model.parameters),
            **count_facts(self._events, steps),
        )


def has_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if has_process_group() else 1


def group_facts(device: str) -> dict[str, Any]:
    if not has_process_group():
        return {"process_group": False, "backend": None, "world_size": 1}
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    backends = (backend for kind, _, backend in pairs if kind == device)
    backend = next(backends, None) or dist.get_backend()
    return {"process_group": True, "backend": backend, "world_size": world_size()}


def model_facts(model: Any, parameters: Sequence[Tensor]) -> dict[str, Any]:
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    return {
        "parameter_count": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
        "row_gradients": row_gradients(model, parameters),
        "sparse_gradient_bytes": sum(p.nbytes for p in parameters if is_sparse(p.grad)),
        "convolutions": sum(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in modules),
        "batch_norms": sum(isinstance(module, torch_private.BatchNorm) for module in modules),
        "synchronised_batch_norms": sum(isinstance(m, nn.SyncBatchNorm) for m in modules),
    }


MIN_ROW_GRADIENT_BYTES, MAX_CHANGED_FRACTION = 1_000_000, 0.1


def row_gradients(model: Any, parameters: Sequence[Tensor]) -> tuple[RowGradient, ...]:
    """Return the large dense gradients of which the last step changed few rows."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    names, found = {id(parameter): name for name, parameter in named}, []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None or type(grad) is not Tensor or grad.layout is not torch.strided:
            continue
        if grad.ndim == 2 and grad.nbytes >= MIN_ROW_GRADIENT_BYTES:
            changed = (grad != 0).any(dim=1).float().mean().item()
            name = names.get(id(parameter), "a table").removeprefix("module.")
            found.append(RowGradient(name=name, bytes=grad.nbytes, changed_fraction=changed))
    few = [one for one in found if one.changed_fraction < MAX_CHANGED_FRACTION]
    return tuple(sorted(few, key=lambda one: -one.bytes))


def count_facts(events: EventCounter, steps: int) -> dict[str, Any]:
    steps = max(1, steps)
    counts, sizes = events.counts, events.bytes
    names = sorted(set(counts) - {*COPIES, HOST_SYNC})
    return {
        "copies": HostToDeviceCopies(
            per_step=sum(counts[name] for name in COPIES) / steps,
            bytes_per_step=sum(sizes[name] for name in COPIES) / steps,
            pinned_per_step=(counts[PINNED] + counts[WAITING]) / steps,
            waiting_per_step=counts[WAITING] / steps,
        ),
        "host_syncs": counts[HOST_SYNC] / steps,
        "collectives": tuple(
            CollectiveUse(name=n, per_step=counts[n] / steps, bytes_per_step=sizes[n] / steps)
            for n in names
        ),
        "source_locations": dict(events.source_locations(steps)),
    }


def loader_facts(
    loader: Any, created_at: str | None, host_tensors: tuple[int, ...] = ()
) -> DataLoaderProfile:
    batch, batches = batch_size_of(loader), length_or_none(loader)
    return DataLoaderProfile(
        batch_size=batch,
        batches_per_epoch=batches,
        dataset_size=length_or_none(loader.dataset),
        sampler=_sampler_name(loader),
        shards_dataset=_shards_dataset(loader, batch, batches),
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        pin_memory=bool(loader.pin_memory),
        persistent_workers=bool(loader.persistent_workers),
        length_read_ahead=epoch_length_is_read_ahead(),
        host_tensors=host_tensors,
        in_generator=generator_line(loader) is not None,
        created_at=created_at,
        renewed_at=vars(loader).get(RENEWAL_ATTRIBUTE),
        epoch_unset=is_epoch_unset(loader),
        stacks_tensors=yields_rows(loader.dataset) and loader.collate_fn is default_collate,
    )


def marked_function(marked: MarkedBatches) -> BatchFunction:
    return BatchFunction(
        names=(CALL_NAME,), defined_at=marked.marked_at, on_device=marked.on_device
    )


def precision_of(parameters: Sequence[Tensor], autocast: str | None) -> str:
    """Return the precision of the forward, with the name that a plan has for it."""
    if autocast is not None:
        return autocast
    half = next((HALF_PRECISIONS[p.dtype] for p in parameters if p.dtype in HALF_PRECISIONS), None)
    on_gpu = any(parameter.is_cuda for parameter in parameters)
    return half or ("tf32" if on_gpu and _tf32() else "fp32")


def _tf32() -> bool:
    # PyTorch raises RuntimeError if a script sets TF32 by both of its interfaces.
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision() != "highest"
    return True


def _sampler_name(loader: Any) -> str:
    outer = script_sampler(loader.batch_sampler)
    if outer is None or type(outer).__name__ != "BatchSampler":
        return type(script_sampler(loader.sampler) if outer is None else outer).__name__
    return type(outer.sampler).__name__


def _shards_dataset(loader: Any, batch: int | None, batches: int | None) -> bool | None:
    world = world_size()
    if world == 1:
        return None
    for sampler in (script_sampler(loader.sampler), *samplers_of(loader)):
        replicas = getattr(sampler, "num_replicas", None) or getattr(sampler, "num_processes", 0)
        if replicas or isinstance(sampler, DistributedSampler):
            return bool(replicas and replicas > 1)
    dataset = loader.dataset
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # a Subset
        dataset = dataset.dataset
    if batch is None or batches is None or not hasattr(dataset, "__len__"):
        return None
    return bool(batches * batch <= len(dataset) / world + batch)
