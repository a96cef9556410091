"""All that looks at a script's warm-up or changes its parts, behind one seam; then the facts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from nfold.errors import Unsupported
from nfold.frameworks.base import Task
from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.script import facts, order, tensors
from nfold.frameworks.torch.script.anomalies import AnomalyDetectionHook
from nfold.frameworks.torch.script.boundary import StepOptimizer
from nfold.frameworks.torch.script.collectives import CollectiveHooks
from nfold.frameworks.torch.script.compiling import ModelCompiler
from nfold.frameworks.torch.script.environment import computes_slice
from nfold.frameworks.torch.script.fetching import (
    NO_FETCHES,
    FetchTimer,
    FetchTotal,
    fetch_difference,
)
from nfold.frameworks.torch.script.forward import ForwardObserver
from nfold.frameworks.torch.script.given import StepInput
from nfold.frameworks.torch.script.making import BatchFunctionHooks
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.stepping import OptimizerStepHooks
from nfold.frameworks.torch.script.streams import DataLoaderHook
from nfold.frameworks.torch.script.tally import EventCounter
from nfold.frameworks.torch.script.threads import ThreadCountHook
from nfold.frameworks.torch.script.trainers import TrainerDetector
from nfold.frameworks.torch.script.unwaited import HostReads
from nfold.frameworks.torch.script.wrappers import DataParallelHooks
from nfold.seen import SHARDED, Parallelism, ScriptProfile


class ScriptProfiler:
    """What is seen of one rank: ``install``, ``begin`` after its first step, ``settle``."""

    def __init__(
        self,
        task: Task,
        variant: ActiveVariant,
        dataloaders: DataLoaderHook,
        step_optimizer: StepOptimizer,
        step_hooks: OptimizerStepHooks,
        trainers: TrainerDetector,
    ) -> None:
        self._task = task
        self._variant = variant
        self._dataloaders = dataloaders
        self._step_optimizer = step_optimizer
        self._step_hooks = step_hooks
        self._trainers = trainers
        self._events = EventCounter()
        self.batch_functions = BatchFunctionHooks(
            variant, dataloaders.new_replay, dataloaders.on_batch_request
        )
        self._forwards = ForwardObserver(self.batch_functions.on_model_input, step_hooks.on_compute)
        self._wrappers = DataParallelHooks(variant, lambda: self._events.record_location("wrapper"))
        self.collectives = CollectiveHooks(variant, self._events)
        self._anomalies = AnomalyDetectionHook(variant, self._events)
        self._threads = ThreadCountHook(variant, self._events)
        self._host_reads, self._host_read_patches = (
            HostReads(variant, lambda: dataloaders.replayed_index),
            Patches(),
        )
        self._compiler = ModelCompiler(variant.current.compiled)
        self.fetch_timer = FetchTimer()
        self._warm_up_fetches = NO_FETCHES
        self._warm_up_retries = 0
        self._batches: list[int] = []
        self._counts: list[int] = []
        self._model_counts: list[int] = []
        self._slices = task.world_size if computes_slice(task) else 1
        self._wait_s = 0.0
        self._profile = ScriptProfile(rank=task.rank)
        self.uses_join = False
        self.child_processes = 0

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Put everything in its place."""
        self._wrappers.install(patches, warm_up)
        if self._variant.current.channels_last:
            order.install_channels_last(patches)
        self.collectives.install(patches, warm_up)
        self._anomalies.install(patches, warm_up)
        self.fetch_timer.install(patches, on_worker_start=lambda: self.uninstall(warm_up))
        for name in ("to", "cuda"):
            warm_up.put(nn.Module, name, self._wrap_module_move)
        # What stays goes in before what the end of the warm-up takes out again.
        if not self._variant.is_baseline("host_syncs"):
            self._host_reads.install(self._host_read_patches)
        tensors.install_tensor_hooks(
            warm_up, self._events, self._dataloaders.transfers.record_transfer
        )
        self._threads.install(patches, warm_up)
        patches.put(BaseProcess, "start", self._wrap_process_start)
        self._forwards.start()
        self._compiler.start()

    def switch_variant(self) -> None:
        """What is left out has changed."""
        self._wrappers.switch_variant()
        self._anomalies.switch_variant()
        self._threads.switch_variant(self._profile.threads)

    def _wrap_process_start(self, usual: Any) -> Any:
        """A process of the script's own is counted, a loader's worker is not."""

        @functools.wraps(usual)
        def start(process: Any) -> None:
            module = getattr(getattr(process, "_target", None), "__module__", "")
            self.child_processes += not str(module).startswith("torch.utils.data")
            usual(process)

        return start

    def _wrap_module_move(self, usual: Any) -> Any:
        """A module on its way to a device: noted with its line."""

        @functools.wraps(usual)
        def move(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._events.record_location("model")
            return usual(module, *args, **kwargs)

        return move

    @property
    def parameters(self) -> Sequence[Tensor]:
        """What the optimizers train, in the order of their first steps."""
        return self._step_optimizer.parameters

    @property
    def parameter_count(self) -> int:
        """Numbers that are trained on this rank."""
        return sum(parameter.numel() for parameter in self.parameters)

    def devices(self) -> Devices:
        """Those that the parameters are used on."""
        several = [wrapped.device_ids or () for wrapped in self._wrappers.dp]
        indices = next((ids for ids in several if len(ids)), ())
        if indices:
            return Devices(tuple(torch.device("cuda", index) for index in indices))
        first = next((parameter.device for parameter in self.parameters), torch.device("cpu"))
        return Devices((first,))

    @property
    def may_compile(self) -> bool:
        """Whether the second step may take a compiler's time: a batch of another shape does."""
        return bool(self._variant.current.compiled) or facts.has_compiled_code()

    def on_first_step(self) -> None:
        """The first step is made."""
        if self._parallelism() in SHARDED and not self._variant.is_baseline("exchange"):
            raise Unsupported(
                "exchange: the parameters are sharded (FSDP), without an exchange no rank has "
                "them; allowed are real and replayed input, and one device alone"
            )
        self._events.enabled = True
        self.collectives.on_first_step()
        if self._dataloaders.loader is None:
            self.batch_functions.start()

    def _parallelism(self) -> Parallelism:
        """How the script uses several devices, as far as that is known."""
        called = self._forwards.outermost
        return facts.detect_parallelism(self._wrappers, self.parameters, self._events, called)

    @property
    def replicated_parameters(self) -> Sequence[Tensor]:
        """The parameters that all ranks must have."""
        return facts.replicated_parameters(
            self._parallelism(), self._wrappers, self.parameters, self._events
        )

    def on_step(self, step_input: StepInput) -> int:
        """Note a step: what it was fed, and in the warm-up, its line. Returns its samples.

        Where nobody could see any, a step counts as one, so that there is a rate.
        """
        self._wait_s += step_input.wait_s
        self._wrappers.on_step()
        self.collectives.on_step(lambda: self.parameters)
        fed = step_input.batches or self._dataloaders.loader is not None
        if not self._dataloaders.in_warm_up:
            counted = step_input.samples if fed else self._samples_per_step
            return counted // self._slices if any(self._counts) else 1
        self._model_counts.append(self._forwards.take_sample_count())
        self._batches.append(step_input.batches)
        self._counts.append(step_input.samples if fed else self._model_counts[-1])
        self.batch_functions.on_step()
        if self._events.enabled:
            self._events.record_location("step")
        return self._counts[-1]

    @property
    def _samples_per_step(self) -> int:
        """Samples of a step of the warm-up."""
        return round(median(self._counts)) if self._counts else 0

    def end_warm_up(self, steps: int, devices: Devices) -> None:
        """The warm-up is over but for one step: nothing looks any more, the facts are known."""
        counted = steps - 1
        if self.uses_join and self._dataloaders.loader is None:
            raise Unsupported(
                "Join: ranks may make unequal numbers of steps, and only the passes of a "
                "DataLoader can be kept from ending; next: give each rank its batches through one"
            )
        self.stop()
        self._forwards.keep_outermost_hooks()
        self._host_reads.end_warm_up()
        self._wait_s = 0.0
        self._profile = self._build_profile(counted)
        self.batch_functions.install_replacements()
        self._compiler.require_compiled(compiled=self._profile.compiled)
        self._warm_up_fetches = self.fetch_total
        self._warm_up_retries = devices.allocator_retries()

    def uninstall(self, warm_up: Patches) -> None:
        """Look at nothing any more and let everything be read: here at the end, in a worker at
        once. What was put in place last is undone first.
        """
        self.stop()
        warm_up.undo()
        self._host_read_patches.undo()

    def stop(self) -> None:
        """Look at nothing any more."""
        self._events.enabled = False
        self.batch_functions.stop()
        self._forwards.stop()
        self._compiler.stop()

    def final_profile(self, timed_steps: int, devices: Devices) -> ScriptProfile:
        """The facts, with what only the timed steps tell."""
        retries = devices.allocator_retries() - self._warm_up_retries
        first = self._dataloaders.first_waits_s
        later = first[1:] or first
        return dataclasses.replace(
            self._profile,
            steps=timed_steps,
            input_wait_ms=1e3 * self._wait_s / max(1, timed_steps),
            epoch_wait_ms=1e3 * median(later) if later else 0.0,
            fetches=fetch_difference(self._warm_up_fetches, self.fetch_total),
            skipped_steps=self._step_hooks.skipped_steps,
            peak_memory_bytes=devices.peak_memory_bytes(),
            alloc_retries=retries / max(1, timed_steps),
            epochs_completed=self._dataloaders.epochs_completed,
            child_processes=self.child_processes,
        )

    @property
    def fetch_total(self) -> FetchTotal:
        """What its data sets gave so far."""
        return self.fetch_timer.total(self._dataloaders.loader, self._dataloaders.companion_loaders)

    def _build_profile(self, steps: int) -> ScriptProfile:
        wrappers, forward = self._wrappers, self._forwards
        device = next((str(p.device) for p in self.parameters), "cpu")
        self._events.record_line("trainer", self._trainers.creation_line)
        found = {
            **facts.group_facts(device.partition(":")[0]),
            **facts.wrapper_facts(wrappers),
            **facts.model_facts(forward.model, self.parameters),
            **facts.count_facts(self._events, steps),
        }
        feed, own, stay = (
            self._dataloaders,
            self._dataloaders.loader,
            self._dataloaders.transfers.host_tensors,
        )
        loader = None if own is None else facts.loader_facts(own, feed.creation_line(own), stay)
        batches = round(median(self._batches)) if self._batches else 0
        accumulation = max(1, batches or self.batch_functions.batches_per_step)
        wrappers.accumulation = accumulation
        return ScriptProfile(
            rank=self._task.rank,
            gradient_exchanges=wrappers.exchanges_per_step(len(self._counts)),
            parallel=self._parallelism(),
            trainer=self._trainers.used,
            device=device,
            loader=loader,
            companion_loaders=tuple(
                facts.loader_facts(one, feed.creation_line(one)) for one in feed.companion_loaders
            ),
            batch_function=self.batch_functions.batch_function if loader is None else None,
            samples_per_step=float(self._samples_per_step),
            model_samples_per_step=float(median(self._model_counts or [0])),
            accumulation=accumulation,
            optimizers=tuple(type(one).__name__ for one in self._step_optimizer.optimizers),
            step_optimizer=self._step_optimizer.index,
            steps_in_backward=self._step_hooks.steps_in_backward,
            precision=facts.precision_of(self.parameters, forward.autocast),
            autocast=forward.autocast,
            channels_last=forward.channels_last,
            model_calls_hooked=forward.keeps_hooks,
            compiled=facts.has_compiled_code(),
            detects_anomalies=self._anomalies.enabled,
            threads=torch.get_num_threads(),
            uses_join=self.uses_join,
            **found,
        )
