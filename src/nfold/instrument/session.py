"""Instrumentation of one rank of a script: its steps, its input and its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from nfold.core.errors import NfoldError, Unsupported
from nfold.core.measurement import FetchStats, ParameterState, RankSamples
from nfold.core.plan import MIN_TIMED_STEPS
from nfold.core.script_profile import ScriptProfile
from nfold.core.source_location import current_user_line
from nfold.engines import marks
from nfold.engines.base import Observer, Phase, Task
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.marks import Batch
from nfold.engines.recorder import Recorder, RunLength
from nfold.engines.torch.communication.data_parallel import parameter_checksum, sample_parameters
from nfold.engines.torch.communication.gradient_exchange import ExchangeWait
from nfold.engines.torch.devices import Devices
from nfold.instrument.epoch_boundaries import (
    FENCE_INTERVAL_S,
    DeferredDeviceClock,
    EpochBoundaryTracker,
    HostGaps,
)
from nfold.instrument.hooks.distributed_hooks import (
    COLLECTIVE_MODULES,
    install_spawn_hooks,
)
from nfold.instrument.hooks.patches import Patches, TrainerDetector, wrap_everywhere
from nfold.instrument.input.batch_tensors import BatchReplay
from nfold.instrument.input.dataloader_hook import DataLoaderHook, LoaderOverrides
from nfold.instrument.input.epoch_passes import count_pass, length_or_none
from nfold.instrument.input.fetch_times import NO_FETCHES, fetch_difference
from nfold.instrument.loss_log import LossLog
from nfold.instrument.optimizer_steps import (
    OptimizerStepHooks,
    PostBackwardAllReduce,
    StepOptimizer,
)
from nfold.instrument.profilers import StackSampler
from nfold.instrument.rank_environment import AffinityHook, oversubscription_note
from nfold.instrument.run_length import ProbeRun, ScriptInterleaver, planned_length
from nfold.instrument.script_profiler import ScriptProfiler
from nfold.instrument.trained_model import InitialParameters


class InstrumentedRun:
    """Counts and times the steps of one rank's script, and ends the process after the last."""

    def __init__(
        self,
        task: Task,
        observer: Observer,
        trainer_detector: TrainerDetector,
        affinity: AffinityHook,
    ) -> None:
        self._task = task
        self._observer = observer
        self._patches, self._warm_up_patches = Patches(), Patches()
        self._step_optimizer = StepOptimizer()
        self._clock = DeferredDeviceClock()
        length = planned_length(task)
        self._warm_up_end = max(1, length.warmup - 1)
        self.warmup_steps = length.warmup
        self._exchange_wait = ExchangeWait(
            enabled=task.world_size > 1 and task.plan.device == "cpu"
        )
        self._recorder = self._build_recorder(length)
        self._overrides = LoaderOverrides(task, lambda: self._dataloaders.steps)
        self._variant = ActiveVariant(task)
        self._post_backward = PostBackwardAllReduce(task, self._variant)
        self._stack_sampler = StackSampler(
            lambda: not task.variant.profiler_steps and self.timed_steps > 0
        )
        self._host_gaps = HostGaps(self._stack_sampler)
        self._epoch_boundaries = EpochBoundaryTracker(
            task,
            observer,
            self._recorder,
            self._clock,
            repeat_passes=self._overrides.repeat_passes,
            training_loader=lambda: self._dataloaders.training.loader,
            on_last_epoch=self._leave,
            host_gaps=self._host_gaps,
        )
        self._step_hooks = self._build_step_hooks()
        self._loss_log = LossLog()
        self._has_marks = False  # whether calls of nfold.mark_step end the steps
        self._marks_without_training = 0
        self._dataloaders = DataLoaderHook(
            self._prepare,
            self._new_replay,
            self._variant,
            self._epoch_boundaries,
            wait_for_idle_workers=observer.wait_for_idle_children,
        )
        self._profiler = ScriptProfiler(
            task,
            self._variant,
            self._dataloaders,
            self._step_optimizer,
            self._step_hooks,
            trainer_detector,
            affinity,
        )
        self._interleaver = ScriptInterleaver(
            task,
            self._variant,
            self._recorder,
            observer,
            lambda _: self._profiler.switch_variant(),
        )
        self._probe = ProbeRun(task, self._epoch_boundaries.on_other_batch)
        self._fetch_total = NO_FETCHES
        self._initial_parameters = InitialParameters(self._profiler.trained_model)
        self._warm_up_weights: dict[str, Any] = {}
        self.devices = Devices((torch.device("cpu"),))
        self.is_leaving = False
        self.refusal: NfoldError | None = None

    def _build_recorder(self, length: RunLength) -> Recorder[None]:
        return Recorder(
            self._task.rank,
            "",
            self._clock,
            self._observer,
            length,
            lambda _: (),  # The script keeps its losses.
            read_fetches=self._take_fetches,
            fence_interval_s=FENCE_INTERVAL_S,
            read_exchange_wait=self._exchange_wait.take_seconds,
            read_batch_index=lambda: self._dataloaders.replayed_index,
        )

    def _build_step_hooks(self) -> OptimizerStepHooks:
        def record_initial(optimizer: Any) -> None:
            if self._task.variant.profiler_steps and self._task.world_size > 1:
                self._initial_parameters.record(optimizer, self.steps)

        return OptimizerStepHooks(
            self._post_backward,
            self._host_gaps.on_compute,
            self.on_optimizer_step,
            self._on_missing_step,
            self._exchange_wait,
            lambda loss: self._loss_log.add(self.steps, loss),
            record_initial,
        )

    @property
    def steps(self) -> int:
        """Steps so far, including the warm-up."""
        return self._recorder.steps

    @property
    def timed_steps(self) -> int:
        return self.steps - self.warmup_steps

    @property
    def left_at(self) -> str | None:
        """The line where the script left the last pass over its loader before its end."""
        return self._dataloaders.left_at

    @property
    def child_processes(self) -> int:
        """Processes that the script has started, without loader workers."""
        return self._profiler.child_processes

    def install(self) -> None:
        """Install all hooks; the script has just imported torch."""
        self._dataloaders.install(self._patches, self._warm_up_patches)
        self._profiler.install(self._patches, self._warm_up_patches)
        self._post_backward.install()
        install_spawn_hooks(self._task, self._patches)
        destroy = "destroy_process_group"
        wrap_everywhere(self._patches, destroy, self._destroy_process_group, *COLLECTIVE_MODULES)
        self._patches.wrap(Join, "__enter__", self._enter_join)
        self._step_hooks.install(self._patches, self._warm_up_patches)
        marks.set_receiver(self)
        self._recorder.begin_epoch()

    def uninstall(self) -> None:
        marks.set_receiver(None)
        self._stack_sampler.stop()
        self._step_hooks.uninstall()
        self._post_backward.uninstall()
        self._profiler.uninstall(self._warm_up_patches)
        self._patches.undo()
        self._profiler.restore_settings()

    def on_optimizer_step(self, optimizer: Any) -> None:
        with self._record_refusal():
            if self._step_optimizer.ends_step(optimizer) and not self._has_marks:
                self._count_step()

    def mark_step(self) -> None:
        """End a step at a call of ``nfold.mark_step``; before the training it only announces marks."""
        with self._record_refusal():
            is_first, self._has_marks = not self._has_marks, True
            if is_first and self.steps > 1:
                raise Unsupported(
                    f"{current_user_line()}: nfold.mark_step() was first called after {self.steps} "
                    "optimizer steps, which were counted as steps; next: call nfold.mark_step() "
                    "once before the training loop as well",
                    step=self.steps,
                )
            update = self._step_hooks.take_update()
            if update is not None:
                self._step_optimizer.ends_step(update)
            if not self._step_optimizer.has_stepped:
                self._check_training_before_mark()
            elif not (is_first and self.steps):
                self._count_step()

    def _check_training_before_mark(self) -> None:
        self._marks_without_training += 1
        if self._marks_without_training > MAX_MARKS_WITHOUT_TRAINING:
            raise Unsupported(
                f"{current_user_line()}: nfold.mark_step() follows neither a backward pass nor "
                "torch.autograd.grad nor a step of a torch optimizer: the trained parameters are not "
                "known; next: call nfold.mark_step() after each update of the parameters",
                step=0,
            )

    def mark_batches(self, iterable: Iterable[Batch]) -> Iterable[Batch]:
        return self._dataloaders.mark_batches(iterable)

    def _on_missing_step(self, line: str | None) -> None:
        with self._record_refusal():
            raise Unsupported(missing_step_message(self._task.workload.name, line), step=0)

    def _count_step(self) -> None:
        step_input = self._dataloaders.take_step_input()
        if self._probe.is_active:
            # A traced step, and reading the trace, may take as long as a first step.
            self._observer.beat(Phase.FIRST_STEP, self.steps)
            if self._probe.on_step():
                self._leave()
            return
        self._host_gaps.end_step()
        if not self.steps:
            self.devices = self._profiler.trained_model.devices()
            self._clock.set_devices(self.devices)
            self._recorder.device = self.devices.describe()
        samples = self._profiler.on_step(step_input)
        self._recorder.record_steps(1, samples, step_input.sample_hash, None)
        if self.steps == 1:
            self._overrides.require_loader()
            self._profiler.on_first_step()
            self._stack_sampler.start()
            if self._profiler.may_compile:
                self._observer.beat(Phase.FIRST_STEP, self.steps)
        shorter = self._probe.shortened_length(self.steps, self.devices)
        if shorter is not None:
            self._recorder.length = shorter
            self.warmup_steps, self._warm_up_end = shorter.warmup, shorter.warmup - 1
        if self.steps == self._warm_up_end:
            self._end_warm_up()
        if not self._recorder.done and not self._epoch_boundaries.gap_limit.ends_run(self.steps):
            self._interleaver.on_step(self.steps)
        elif not self._probe.begin(cuda=self.devices.is_cuda):
            self._leave()
        else:
            self._stack_sampler.stop()
        self._host_gaps.begin_gap()

    @contextmanager
    def _record_refusal(self) -> Iterator[None]:
        if self.refusal is not None:
            raise self.refusal
        try:
            yield
        except NfoldError as error:
            self.refusal = error
            raise

    def _take_fetches(self) -> FetchStats | None:
        previous, self._fetch_total = self._fetch_total, self._profiler.fetch_total
        return fetch_difference(previous, self._fetch_total)

    def _prepare(self, loader: Any) -> None:
        with self._record_refusal():
            self._overrides(loader)

    def samples(self) -> RankSamples:
        """Return all samples and save the profile. The script makes no more steps."""
        if self.refusal is not None:
            raise self.refusal
        self._epoch_boundaries.on_script_end(self._dataloaders.epochs_completed)
        replays = (*self._dataloaders.replays, *self._profiler.batch_functions.replays)
        # An interleaved variant without a replay before the script ended is run separately.
        has_source = (
            self._dataloaders.training.loader is not None
            or self._profiler.batch_functions.batch_function is not None
        )
        is_replayable = replays or (self._variant.interleaved and has_source)
        if not (self._variant.is_baseline("input") or is_replayable):
            step_line = self._profiler.step_line
            raise Unsupported(
                f"input {self._variant.all_variants[-1].input}: no DataLoader or batch function "
                f"found in {self._task.workload.name}, its input cannot be replayed; next: "
                "nfold.batches() around the iterable of the training loop"
                f"{f' ({step_line} ends its steps)' if step_line else ''}"
            )
        peak = self.devices.peak_memory_bytes()
        profile = self._profiler.final_profile(self.timed_steps, self.devices)
        weights = self._warm_up_weights
        if not self._task.interleaved_variants:
            weights = self._weight_evidence(profile)
        profile = dataclasses.replace(
            profile, trace=self._probe.take_summary(), pass_batches=self._pass_batches()
        )
        self._observer.save_profile(profile)
        samples = self._recorder.samples(
            host_gaps_ms=self._host_gaps.ms,
            host_gap_locations=self._stack_sampler.sampled_lines,
            epoch_starts=self._host_gaps.pass_starts,
            peak_memory_bytes=peak,
            reserved_memory_bytes=self.devices.reserved_memory_bytes(),
            data_bytes=sum(replay.data_bytes for replay in replays),
            parameter_count=self._profiler.trained_model.parameter_count,
            **weights,
            **self._sample_evidence(),
            caveats=(
                *oversubscription_note(self._task, profile.threads),
                *self._profiler.recompilation.caveats(),
            ),
        )
        # Only samples of the warm-up are hashed; the hash of unknown samples is 0.
        hashes = () if self._task.replay_hints.slices_batches else samples.sample_hashes
        hashes = tuple(entry for entry in hashes if int(entry[1], 16))
        return dataclasses.replace(
            samples, rank=self._task.rank, sample_hashes=hashes, losses=self._loss_log.means()
        )

    def _pass_batches(self) -> tuple[int, ...]:
        probes_ranks = self._task.variant.profiler_steps and self._task.world_size > 1
        batches = count_pass(self._dataloaders.training.loader) if probes_ranks else None
        return () if batches is None else (batches,)

    def _sample_evidence(self) -> dict[str, Any]:
        log, inputs = self._dataloaders.sample_log, self._profiler.model_inputs
        found: dict[str, Any] = {
            "sampler_epochs": log.sampler_epochs(self._dataloaders.steps),
            # Under Join ranks may have unequal numbers of batches.
            "batches_per_epoch": (
                None
                if self._profiler.uses_join
                else length_or_none(self._dataloaders.training.loader)
            ),
            "skipped_batches": self._dataloaders.batches_of_steps.skipped(),
            "input_hashes": tuple(inputs.hashes),
            "generator_states": inputs.generator_states(self._profiler.trained_model.modules),
        }
        if self._task.variant.profiler_steps:
            found["batch_hashes"] = tuple(log.batch_hashes)
            found["indexed_samples"] = tuple(log.indexed_samples.items())
        return found

    def _weight_evidence(self, profile: ScriptProfile) -> dict[str, Any]:
        """Return the checksum of parameters that must be equal on all ranks, and a sample of them.

        Nothing for shards, or for a variant that changes the training. Only if all gradients are
        exchanged ranks may differ by rounding, and the sample is compared.
        """
        if not self._task.variant.preserves_training:
            return {}
        parameters = self._profiler.trained_model.replicated_parameters
        if not parameters:
            return {}
        sample = sample_parameters(parameters) if profile.exchanges_all_gradients else ()
        found = {"parameter_checksum": parameter_checksum(parameters), "parameter_sample": sample}
        if self._initial_parameters.parts:
            begin = ParameterState(step=0, parts=self._initial_parameters.parts)
            end = self._initial_parameters.trained_parts(parameters)
            found["parameter_states"] = (begin, ParameterState(step=self.steps, parts=end))
        return found

    def _destroy_process_group(self, original: Any, group: Any = None) -> None:
        if group in (None, dist.group.WORLD) and self.timed_steps >= MIN_TIMED_STEPS:
            self._leave(left_at=self.left_at or "")
        original(group)

    def _enter_join(self, original: Any, join: Any) -> Any:
        self._profiler.uses_join = True
        self._overrides.repeat_passes()
        return original(join)

    def _new_replay(self) -> BatchReplay:
        device = self.devices.primary if self._variant.current.input == "resident" else None
        return BatchReplay(device, self._task.replay_hints.host_tensors)

    def _end_warm_up(self) -> None:
        self._step_optimizer.end_warm_up()
        self._dataloaders.end_warm_up()
        self._profiler.end_warm_up(self.steps, self.devices)
        self._warm_up_patches.undo()
        profile = self._profiler.final_profile(0, self.devices)
        self._observer.save_profile(profile)
        if self._task.interleaved_variants:
            self._warm_up_weights = self._weight_evidence(profile)
        self._observer.wait_for_other_ranks(self.steps)

    def _leave(self, *, left_at: str | None = None) -> None:
        """End the process; ``left_at`` is where a script left its loop that ends by itself."""
        self.is_leaving = True
        self._observer.exit_process(dataclasses.replace(self.samples(), left_at=left_at))


# The first may announce marks; an optimizer may begin to step some marks later.
MAX_MARKS_WITHOUT_TRAINING = 100


def missing_step_message(name: str, line: str | None) -> str:
    where = f" that follows {line}" if line else ""
    return (
        f"{name} trains without a torch optimizer: where its steps end is not known; next: add "
        f"nfold.mark_step() after the update of the parameters{where}"
    )
