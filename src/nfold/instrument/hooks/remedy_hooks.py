"""Applies remedies to a script for its whole length, with the hooks of an explanation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from nfold.core.variant import RunRemedies
from nfold.engines.interleaver import ConstantVariant
from nfold.engines.torch.torch_settings import TorchSettings
from nfold.instrument.hooks.distributed_hooks import DataParallelHooks
from nfold.instrument.hooks.model_hooks import ChannelsLastWeights, ModelCompiler
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.runtime_hooks import (
    AnomalyDetectionHook,
    EventCounter,
    ThreadCountHook,
)
from nfold.instrument.input.loader_workers import TrainingLoaderWorkers

COMPILED_STEPS = 10  # models that train later than this are not compiled
DDP = "DistributedDataParallel"


class RemedyHooks:
    """The hooks of one process.

    After ``COMPILED_STEPS`` optimizer steps a step calls only a hook that counts them, and the
    ``forward`` of SyncBatchNorm if that is replaced.
    """

    def __init__(self, remedies: RunRemedies) -> None:
        variant = ConstantVariant(remedies.variant)
        events = EventCounter()
        self._remedies = remedies
        self._variant = variant
        self._wrappers = DataParallelHooks(variant, self._on_wrap)
        self._has_ddp = False
        self._weights = ChannelsLastWeights()
        self._anomalies = AnomalyDetectionHook(variant, events)
        self._threads = ThreadCountHook(variant, events)
        self._settings = TorchSettings(variant.all_variants)
        self._compiler = ModelCompiler(remedies.variant.compiled)
        self._loaders = (
            None if remedies.workers is None else TrainingLoaderWorkers(remedies.workers)
        )
        self._steps = 0

    def install(self, patches: Patches) -> None:
        """Install the hooks that the remedies need; the script has just imported torch."""
        variant, counters = self._remedies.variant, Patches()
        if self._needs(DDP) or self._needs("SyncBatchNorm"):
            self._wrappers.install(patches, counters)
        if variant.channels_last:
            self._weights.install(patches)
        if not variant.anomaly_detection:
            self._anomalies.install(patches, counters)
        if self._loaders is not None:
            self._loaders.install(patches)
        self._settings.apply(variant)
        self._threads.install(patches, counters)  # the script cannot change a number that is set
        counters.undo()
        self._compiler.start()
        register_optimizer_step_post_hook(self._on_step)

    def applied(self) -> tuple[str, ...]:
        """Return the names of the remedies that have changed something so far."""
        return tuple(self._applied())

    def _applied(self) -> Iterator[str]:
        has = {
            DDP: self._has_ddp,
            "SyncBatchNorm": self._wrappers.has_replaced_batch_norm,
            "convolution": self._weights.has_converted,
            "model that trains": self._compiler.has_compiled,
            "anomaly detection in the script": self._anomalies.was_requested,
        }
        for each, _ in self._remedies.variant.interventions():
            if has.get(each.needed_in_run, True):
                yield each.name
        if self._loaders is not None and self._loaders.has_found:
            yield "workers"

    def _needs(self, what: str) -> bool:
        changed = self._remedies.variant.interventions()
        return any(each.needed_in_run == what for each, _ in changed)

    def _on_wrap(self) -> None:
        self._has_ddp |= bool(self._wrappers.ddp)
        # A script that replaces its model must be able to free the old one.
        self._wrappers.ddp.clear()
        self._wrappers.dp.clear()

    def _on_step(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._steps >= COMPILED_STEPS:
            return  # a hook cannot be removed while PyTorch calls the hooks
        self._steps += 1
        if self._steps == 1:
            # The script may have changed settings in the code before its first step.
            self._settings.apply(self._remedies.variant)
            if self._loaders is not None:
                self._loaders.has_stepped = True
        if self._steps == COMPILED_STEPS:
            self._compiler.stop()
